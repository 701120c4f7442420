"""`mimo bench engines`: all contestants do the same work, and what is judged. No timings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mimo.bench import engines as bench
from mimo.bench.contest import Run
from mimo.bench.train_theirs import batches_of_ranks
from mimo.errors import InputError

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

NAMES = (*bench.ENGINES, bench.RIVAL)


@pytest.mark.slow
def test_a_quick_run_trains_all_contestants_on_the_same_samples_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, figures = tmp_path / "bench.png", tmp_path / "bench.json"
    assert bench.main(16, 3, True, figures, picture) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bounds_kept=4 bounds_missed=0"
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(figures.read_text())
    (runs,) = found["runs"].values()
    assert (*runs,) == (*found["losses"],) == NAMES
    for name in NAMES:
        first, second = found["losses"][name]
        assert second < first, "the second step profits from the first"
        assert runs[name][0]["peak_bytes"] > 0
    steps = {name: own[0]["found"] for name, own in runs.items()}
    for engine in bench.ENGINES:
        assert steps[engine]["computed"] == steps[engine]["tokens"] == steps[bench.RIVAL]["tokens"]
    assert steps[bench.RIVAL]["computed"] > steps[bench.RIVAL]["tokens"]


def test_batches_of_all_ranks_hold_every_sample_once() -> None:
    first, second = batches_of_ranks(10, 2, 3)
    assert [[*own] for own in first] == [[0, 2, 4], [6, 8]]
    assert [[*own] for own in second] == [[1, 3, 5], [7, 9]]


def test_a_step_takes_as_long_as_its_last_rank_and_as_much_memory_as_its_largest() -> None:
    ranks = [lambda: Run(2.0, 3.0, 10, {"loss": 1.0}), lambda: Run(1.0, 4.0, 20, {"loss": 1.0})]
    assert bench.together(ranks) == Run(2.0, 7.0, 20, {"loss": 1.0})


def test_other_losses_or_tokens_are_another_work() -> None:
    def runs(loss: float = 1.0, tokens: int = 100) -> list[Run]:
        return [Run(1.0, found={"loss": loss, "tokens": tokens})]

    same = {name: runs() for name in NAMES}
    assert all(bound.holds for bound in bench.judge(same))
    other = bench.judge(same | {"fsdp": runs(loss=1.001), bench.RIVAL: runs(tokens=99)})
    assert [bound.holds for bound in other] == [False, True, True, False]


def test_samples_that_do_not_fill_the_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--samples 20: give a multiple of 16"):
        bench.main(20, 1, False, None, tmp_path / "x.png")
