"""A generator's rank dies, or stands still: the job names it, ends soon, and can go on exactly.

Rank 0 reads, rank 1 has the language model, rank 2 draws. The fault strikes rank 2 when it has got
the rows of microbatch 1 of the second step, and answers them with no gradient.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint.reading import read
from mimo.checkpoint.resume import Resume, Start
from mimo.runtime import processes
from mimo.runtime.run_files import incidents
from tests.conftest import RunRanks
from tests.mimo import drawings
from tests.mimo.disturbed import disturbing, running_ranks
from tests.mimo.runs import ADAM, metrics

HERE = "tests.mimo.train.test_output_faults"
TIMEOUT_SECONDS = 5.0
SETTINGS = [
    *ADAM,
    drawings.GENERATOR,
    f"bridge.timeout_seconds={TIMEOUT_SECONDS}",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.steps=3",
    "train.save_every=1",
    "train.ema_decay=0.9",
]


def disturb(fault: str, attempt: int, run_dir: Path, start: Start) -> None:
    if os.environ["RANK"] != "2" or isinstance(start, Resume) or not fault:
        return
    from bridge import OutputReceiver

    receive, calls = OutputReceiver.receive, 0

    def receive_and_strike(self: Any, number: int) -> Any:
        nonlocal calls
        rows, calls = receive(self, number), calls + 1
        if calls == 6:
            if fault == "stalled":
                time.sleep(600)
            time.sleep(1.0)  # the others wait, and this rank has written where it is
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    OutputReceiver.receive = receive_and_strike  # type: ignore[method-assign]


@pytest.fixture
def path(tmp_path: Path, run_ranks: RunRanks) -> Path:
    return drawings.write_recipe(tmp_path)


@pytest.mark.slow  # `test_faults.py` kills an encoder
def test_a_killed_generator_ends_all_ranks_and_its_peers_say_what_they_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train = disturbing(monkeypatch, f"{HERE}:disturb", "killed")
    assert train(path, SETTINGS) == 1
    run_dir, text = path.parent / "runs" / "tiny", capfd.readouterr().err
    assert not running_ranks(run_dir), "a rank is left over"
    assert re.match(r"rank 2 \(image, lane 0\) was killed by SIGKILL, ", text.splitlines()[-1])
    waited = (
        r"rank 1 failed: .*bridge image -> language: gradients of microbatch \d failed while "
        r"waiting for rank 2 to send [1-9]\d* rows"
    )
    assert re.search(waited, text), text
    (incident,) = incidents(run_dir)
    assert (incident["kind"], incident["rank"]) == ("crash", 2)


@pytest.mark.slow
def test_a_generator_that_stands_still_is_the_origin_of_the_hang(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = disturbing(monkeypatch, f"{HERE}:disturb", "stalled")
    assert train(path, SETTINGS) == 1
    run_dir = path.parent / "runs" / "tiny"
    assert not running_ranks(run_dir), "a rank is left over"
    text = (run_dir / "hang" / "summary.txt").read_text()
    assert re.match(r"the run hangs: rank \d .*\norigin: rank 2 ", text), text


@pytest.mark.slow
def test_a_job_whose_generator_was_killed_ends_as_an_undisturbed_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SILENT_CAUSE_SECONDS", 0.05)
    for fault in ("", "killed"):
        name = fault or "whole"
        with pytest.MonkeyPatch.context() as patch:
            train = disturbing(patch, f"{HERE}:disturb", fault)
            assert train(path, [*SETTINGS, f"name={name}"], max_restarts=1) == 0
    runs = path.parent / "runs"
    (restart,) = (i for i in incidents(runs / "killed") if i["kind"] == "restart")
    assert restart["cause"] == "rank 2 was killed by SIGKILL"
    got, expected = (metrics(path, name) for name in ("killed", "whole"))
    for key in ("step", "loss", "loss_image", "grad_norm"):
        assert [line[key] for line in got] == [line[key] for line in expected], key
    ours, theirs = (read(runs / name / "checkpoints" / "step_3") for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
