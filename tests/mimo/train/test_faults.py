"""Faults in a running job: it ends soon, says what was missing, and leaves no process behind.

Two encoder lanes (ranks 0 and 1) feed one language rank (2), or share two ranks with the two stages
of the language model. The fault strikes rank 0 when it is to send microbatch 1 of the second step,
or in its tower's work on it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.resume import Start
from mimo.runtime.run_files import incidents
from tests.cases import quick, quick_values
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.disturbed import disturbing, running_ranks

HERE = "tests.mimo.train.test_faults"
STRUCK = "struck"  # a file in the run folder
TIMEOUT_SECONDS = 5.0
MICROBATCHES = 3
SAMPLES = [f"sample{number:04d}" for number in range(12)]
# Two lanes on the two stages of the language model, each encoding a whole step in one go.
COLOCATED = ("encoders.vision.placement=colocated", "language.grid.pp=2")
Call = tuple[Tensor, Tensor]  # a tower's patches and grids
ROWS = r"rank 0 to send [1-9]\d* rows"


@dataclass(frozen=True)
class Ended:
    """How a job ended; `seconds`: from the moment that the fault struck."""

    exit_code: int
    text: str
    seconds: float
    run_dir: Path

    @property
    def last_line(self) -> str:
        return self.text.splitlines()[-1]

    def named_samples(self) -> list[str]:
        return re.findall(r"sample\d{4}", self.last_line)


@pytest.fixture
def run_with(
    run_ranks: RunRanks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Ended]:
    """`run_with(fault, *settings) -> Ended`: this file's job with a fault, through the launcher."""
    tiny.write_samples(tmp_path, (2, 1, 1, 3) * MICROBATCHES)
    path, run_dir = tiny.write_recipe(tmp_path), tmp_path / "runs" / "tiny"
    settings = [f"bridge.timeout_seconds={TIMEOUT_SECONDS}", "encoders.vision.grid.dp=2"]

    def run(fault: str, *more: str) -> Ended:
        train = disturbing(monkeypatch, f"{HERE}:disturb", fault)
        code = train(path, [*settings, *more])
        seconds = time.time() - (run_dir / STRUCK).stat().st_mtime
        assert not running_ranks(run_dir), "a rank is left over"
        return Ended(code, capfd.readouterr().err, seconds, run_dir)

    return run


# ------------------------------------------------------- functions that run inside ranks


def disturb(fault: str, attempt: int, run_dir: Path, start: Start) -> None:
    if os.environ["RANK"] == "0":
        FAULTS[fault](run_dir / STRUCK)


def _count_steps() -> Callable[[], int]:
    """Return a function that returns the step of this rank's model, counted from 0."""
    from mimo.model.modules import MimoModel

    run, step = MimoModel.run, -1

    def count(self, *args, **settings):
        nonlocal step
        step += 1
        return run(self, *args, **settings)

    MimoModel.run = count  # type: ignore[method-assign]
    return lambda: step


def _when_sending(strike: Callable[[], None], struck: Path) -> None:
    """Call ``strike`` when this rank is to send microbatch 1 of step 1."""
    from bridge import BridgeSender

    send, step = BridgeSender.send, _count_steps()

    def send_or_strike(self, microbatch, rows):
        if (step(), microbatch) == (1, 1):
            struck.touch()
            strike()
        return send(self, microbatch, rows)

    BridgeSender.send = send_or_strike  # type: ignore[method-assign]


def _kill() -> None:
    time.sleep(1.0)  # the others wait, and this rank has written where it is
    os.kill(os.getpid(), signal.SIGKILL)


def _plan_in_another_order(struck: Path) -> None:
    from mimo.model.step_plan import StepPlanner

    struck.touch()
    plan = StepPlanner.microbatches
    StepPlanner.microbatches = lambda self, step: plan(self, step)[::-1]  # type: ignore[method-assign]


def _when_encoding(strike: Callable[[Tensor, Tensor], Call | None], struck: Path) -> None:
    """From the second step on, ``strike`` gets what this rank's tower is called with.

    It returns what the tower is to be called with instead; None leaves the call alone.
    """
    from encoders._tower import Tower

    prepare, forward, step, prepared = Tower.prepare, Tower.forward, _count_steps(), []

    def prepare_and_note(self, grids, copy):
        prepared.append((prepare(self, grids, copy), grids))
        return prepared[-1][0]

    def forward_or_strike(self, patches, items):
        other = None
        if step() == 1 and not struck.exists():
            grids = next(grids for packed, grids in prepared if packed is items)
            other = strike(self.values(patches), grids)
        if other is None:
            return forward(self, patches, items)
        struck.touch()
        return forward(self, *other)

    Tower.prepare, Tower.forward = prepare_and_note, forward_or_strike  # type: ignore[method-assign]


def _swap_items(patches: Tensor, grids: Tensor) -> Call | None:
    """Two items of unequal size that follow each other change places, patches and all."""
    sizes = grids.prod(1).tolist()
    for n in range(len(sizes) - 1):
        if sizes[n] != sizes[n + 1]:
            order = list(range(len(sizes)))
            order[n], order[n + 1] = n + 1, n
            parts = patches.split(sizes)
            return torch.cat([parts[item] for item in order]), grids[order]
    return None


def _drop_row(struck: Path) -> None:
    """The tower's merger loses its last row."""
    from encoders.qwen_vl import QwenVLTower

    project = QwenVLTower.project

    def one_less(self, hidden, packed):
        rows = project(self, hidden, packed)
        return rows[:-1] if struck.exists() else rows

    QwenVLTower.project = one_less  # type: ignore[method-assign]
    _when_encoding(lambda patches, grids: (patches, grids) if len(grids) else None, struck)


def _use_up_memory(struck: Path) -> None:
    """No memory is left for microbatch 1 of step 1, in the tower."""
    calls = 0

    def strike(patches: Tensor, grids: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            struck.touch()
            raise MemoryError("cannot allocate")

    _when_encoding(strike, struck)


FAULTS: dict[str, Callable[[Path], None]] = {
    "dropped row": _drop_row,
    "swapped items": lambda struck: _when_encoding(_swap_items, struck),
    "out of memory": _use_up_memory,
    "killed": lambda struck: _when_sending(_kill, struck),
    "stalled": lambda struck: _when_sending(lambda: time.sleep(600), struck),
    "other plan": _plan_in_another_order,
}


# ---------------------------------------------------------------------------- tests


def test_killed_encoder_rank_is_the_cause_and_its_peer_says_what_it_waited_for(
    run_with: Callable[..., Ended],
) -> None:
    ended = run_with("killed")
    assert ended.exit_code == 1
    assert ended.last_line.startswith("rank 0 (vision, lane 0) was killed by SIGKILL, last seen")
    waited = rf"bridge vision -> language: rows of microbatch 1 failed while waiting for {ROWS}: "
    assert re.search(rf"rank 2 failed: .*{waited}", ended.text)
    assert re.search(waited, (ended.run_dir / "error_rank_2.txt").read_text())
    assert ended.seconds < TIMEOUT_SECONDS, "nobody needs to wait for the timeout"
    (incident,) = incidents(ended.run_dir)
    assert (incident["kind"], incident["rank"]) == ("crash", 0)
    assert re.match(
        r"rank 0 \(vision, lane 0\) was killed by SIGKILL, last seen at step 1, in 'forward and "
        r"backward': forward of vision, stage 0, microbatch 1, with .*B of resident memory; .*; "
        r"in step 1, samples of microbatch 1 \(\d+ tokens, \d+ rows\): sample\d{4}, ",
        incident["text"],
    )


def test_a_rank_without_memory_says_in_what_for_which_samples_and_what_its_memory_holds(
    run_with: Callable[..., Ended],
) -> None:
    ended = run_with("out of memory")
    assert ended.exit_code == 1
    (incident,) = incidents(ended.run_dir)
    where = "forward and backward': forward of vision, stage 0, microbatch 1"
    samples = r"in step 1, samples of microbatch 1 \(\d+ tokens, \d+ rows\): sample\d{4}, "
    error = r"rank 0 failed: MemoryError: cannot allocate"
    holds = rf"rank 0 \(vision, lane 0\) failed at step 1, in '{where}; it holds vision: "
    assert re.search(rf"{error}\n{samples}.*\n{holds}", ended.text)
    assert re.match(rf"rank 0 \(vision, lane 0\) failed at step 1, in '{where}", incident["text"])
    assert re.search(samples, incident["text"])
    assert (incident["kind"], incident["rank"], incident["step"]) == ("crash", 0, 1)
    memory = incident["memory"]
    assert memory["vision"]["parameters"] == memory["vision"]["gradients"] > 4 * 16 * 24
    assert memory["process"]["resident memory"] > 2**25


@pytest.mark.slow
def test_without_a_timeout_of_its_own_a_hang_is_explained_before_transfers_time_out(
    run_with: Callable[..., Ended],
) -> None:
    ended = run_with("stalled")
    assert ended.exit_code == 1
    text = (ended.run_dir / "hang" / "summary.txt").read_text()
    assert ended.text.rstrip().endswith("\n".join(text.splitlines()[:2]))
    assert re.match(r"the run hangs: rank \d .*\(bridge.timeout_seconds 5\)\norigin: rank 0 ", text)
    assert "waits for bridge vision: rows of microbatch 1" in text
    assert TIMEOUT_SECONDS / 2 < ended.seconds < TIMEOUT_SECONDS + 10


def test_mismatched_plans_name_the_ranks_the_microbatch_and_its_samples(
    run_with: Callable[..., Ended],
) -> None:
    ended = run_with("other plan")
    assert ended.exit_code == 1
    error, where = ended.text.splitlines()[-2:]
    assert re.fullmatch(
        r"rank \d failed: bridge\S+: bridge vision, microbatch 0: ranks \[0\] and ranks \[1, 2\] "
        r"planned different transfers; they read different data indexes or recipes",
        error,
    )
    assert re.match(r"in step 0, samples of microbatch 0 \(\d+ tokens, \d+ rows\): ", where)
    assert len(ended.named_samples()) == len(SAMPLES) // MICROBATCHES


@pytest.mark.parametrize(
    "settings", quick_values({"disjoint": (), "colocated": COLOCATED}, "disjoint")
)
@pytest.mark.parametrize("fault", quick(["dropped row", "swapped items"], "swapped items"))
def test_rows_of_other_items_than_planned_end_the_run_with_item_sample_and_both_numbers(
    run_with: Callable[..., Ended], fault: str, settings: tuple[str, ...]
) -> None:
    ended = run_with(fault, *settings)
    assert ended.exit_code == 1
    error, where = ended.text.splitlines()[-2:]
    match = re.fullmatch(
        r"rank 0 failed: bridge\S+: encoder vision, lane 0, microbatch (\d): the tower produced "
        r"(\d+) rows for item (\d) of (\d), counted from 0, planned are (\d+)",
        error,
    )
    assert match, error
    microbatch, produced, item, items, planned = map(int, match.groups())
    assert re.fullmatch(rf"in step 1, sample sample\d{{4}} of microbatch {microbatch}", where)
    if fault == "dropped row":  # it is missing at the end
        assert (produced, item) == (planned - 1, items - 1)
        assert microbatch == (MICROBATCHES - 1 if settings else 0)
    else:
        assert produced != planned
    assert ended.seconds < TIMEOUT_SECONDS, "nobody needs to wait for the timeout"
