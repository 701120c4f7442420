"""Runs that are asked to end: they finish the step, save, say so, and go on exactly later."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.resume import Start
from mimo.errors import EXIT_CONTINUE
from mimo.report.status import facts_of, read_view
from mimo.runtime.run_files import incidents
from mimo.runtime.signals import EarlyStop
from tests.cases import quick, quick_values
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.disturbed import disturbing, running_ranks, when_at
from tests.mimo.runs import ADAM, LAYOUT, metrics, run

pytestmark = pytest.mark.usefixtures("run_ranks")  # its fork server
HERE = "tests.mimo.runtime.test_signals"
STEPS = 5
SETTINGS = [*LAYOUT, *ADAM, "train.global_batch_size=4", f"train.steps={STEPS}"]
SAME = ("step", "loss", "grad_norm", "tokens", "epochs", "validation_loss")


# ----------------------------------------------------------------- what runs inside ranks


def signal_one(to: str, attempt: int, run_dir: Path, start: Start) -> None:
    """In the forward pass of step 1, a signal reaches the launcher, or one rank only."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    rank, pid, signum = {
        "launcher": (2, launcher.pid, signal.SIGTERM),
        "encoder": (0, os.getpid(), signal.SIGUSR1),
        "language": (1, os.getpid(), signal.SIGTERM),
        "Ctrl-C": (2, launcher.pid, signal.SIGINT),
    }[to]
    assert pid is not None

    def strike() -> None:
        os.kill(pid, signum)
        time.sleep(1.0)  # launchers look twice a second

    if os.environ["RANK"] == str(rank):
        when_at(1, "forward and backward", strike)


def stall(_: None, attempt: int, run_dir: Path, start: Start) -> None:
    """All ranks wait for one that no signal reaches."""
    if os.environ["RANK"] == "0":
        when_at(2, "checkpoint", lambda: time.sleep(600))


def nothing(_: None, attempt: int, run_dir: Path, start: Start) -> None:
    pass


# -------------------------------------------------------------------------------- tests


# The next test has a quick case with the signal of Ctrl-C.
@pytest.mark.parametrize("to", quick(["launcher", "encoder", "language", "Ctrl-C"], "launcher"))
def test_a_signal_to_one_process_ends_all_ranks_after_the_same_step_and_resuming_is_exact(
    run_ranks: RunRanks, recipe: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    tiny.write_samples(recipe.parent, name="validation")
    validation = f"data.validation=[{{path: '{recipe.parent}/validation-*.tar'}}]"
    settings = [*SETTINGS, "train.validate_every=2", validation]
    train = disturbing(monkeypatch, f"{HERE}:signal_one", to)
    assert train(recipe, settings) == EXIT_CONTINUE
    run_dir = recipe.parent / "runs" / "tiny"
    checkpoint = find_checkpoint(run_dir)
    assert checkpoint.name == "step_2"
    name = {"encoder": "SIGUSR1", "Ctrl-C": "SIGINT"}.get(to, "SIGTERM")
    text = f"ended by {name}, with a checkpoint after step 2"
    assert dict(facts_of(read_view(run_dir)))["state"] == text
    (incident,) = incidents(run_dir)
    assert (incident["kind"], incident["text"], incident["step"]) == ("signal", text, 1)
    assert [line["step"] for line in metrics(recipe)] == [0, 1], "no time for the validation"
    run(run_ranks, recipe, *settings, resume_from=checkpoint)
    run(run_ranks, recipe, *settings, "name=whole")
    got, expected = metrics(recipe), metrics(recipe, "whole")
    assert [line["step"] for line in expected if "validation_loss" in line] == [2, 4]
    for key in SAME:
        assert [line.get(key) for line in got] == [line.get(key) for line in expected], key


@pytest.mark.parametrize(
    "sent", quick_values({"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}, "SIGINT")
)
def test_a_second_signal_ends_a_run_that_hangs_in_a_save_and_its_last_checkpoint_stays(
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    sent: signal.Signals,
) -> None:
    run_dir = recipe.parent / "runs" / "tiny"

    def send() -> None:
        while not (run_dir / "checkpoints" / "step_2").exists():  # the next one hangs
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), sent)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    train = disturbing(monkeypatch, f"{HERE}:stall", None)
    assert train(recipe, [*SETTINGS, "train.save_every=1"]) == 128 + sent
    thread.join()
    assert find_checkpoint(run_dir).name == "step_2"
    assert not running_ranks(run_dir)
    assert capfd.readouterr().err.endswith(f"ended by {sent.name}\n")
    text = f"ended at once by {sent.name} after step 2; the last checkpoint is step_2"
    assert dict(facts_of(read_view(run_dir)))["state"] == text


def test_a_run_whose_time_is_up_saves_and_wants_to_be_continued(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = disturbing(monkeypatch, f"{HERE}:nothing", None)
    assert train(recipe, [*SETTINGS, "train.max_minutes=0.0001"]) == EXIT_CONTINUE
    (incident,) = incidents(recipe.parent / "runs" / "tiny")
    assert incident["text"] == "ended by train.max_minutes, with a checkpoint after step 1"
    assert [line["step"] for line in metrics(recipe)] == [0]


def test_what_is_agreed_on_is_what_any_rank_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [EarlyStop(deadline=time.monotonic()), EarlyStop()]
    monkeypatch.setattr("mimo.runtime.signals.stop_requested", lambda: ())
    sums = [sum(flags) for flags in zip(ranks[0].flags(), ranks[1].flags(), strict=True)]
    for rank in ranks:
        rank.agree(sums)
        assert rank.reasons == ("train.max_minutes",)
    monkeypatch.setattr("mimo.runtime.signals.stop_requested", lambda: ("SIGUSR1",))
    ranks[1].agree(ranks[1].flags())
    assert ranks[1].reasons == ("train.max_minutes", "SIGUSR1")
