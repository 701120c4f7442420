"""A rank that stalls in any part of a step: the run ends soon, and names the rank.

One encoder lane (rank 0) feeds two language lanes (ranks 1 and 2), or the two stages of one. A rank
sleeps for ever, is stopped, loops in Python or in a library that lets no other thread run, or
leaves out a collective call.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.resume import Start
from mimo.runtime.heartbeat import ACTIVITIES
from mimo.runtime.ranks import RENDEZVOUS
from mimo.runtime.run_files import incidents
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.disturbed import disturbing, running_ranks
from tests.mimo.runtime.conftest import free_port, train

HERE = "tests.mimo.train.test_stalls"
STRUCK = "struck"  # a file in the run folder
TIMEOUT_SECONDS = 3.0
STAGES = "language.grid={tp: 1, pp: 2, dp: 1}"
SHARES = "language.grid={tp: 2, dp: 1}"
LANES = "language.grid={tp: 1, dp: 2}"


def _sleep(*_: Any, **__: Any) -> None:
    time.sleep(600)


def _stop(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop(*_: Any, **__: Any) -> None:
    while True:
        pass


def _hold(*_: Any, **__: Any) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # takes longer than anybody waits, in one call


def _leave_out(*_: Any, **__: Any) -> None:
    """Return at once, as if all had been done."""


@dataclass(frozen=True)
class Case:
    """From a ``phase`` of a step on, ``rank`` stalls instead of call ``number`` of ``owner.name``.

    origin: what the summary says of that rank, or of the rank ``named``: one that waits for a rank
    which left something out. waits: what it says of another one, `waiting`; None if all ranks are
    in the same place.
    """

    rank: int
    stall: Callable[..., None]
    phase: tuple[int, str]
    owner: str
    name: str
    origin: str
    waiting: int | None = None
    waits: str = ""
    number: int = 0
    layout: str = LANES
    named: int | None = None


def progress(step: int, activity: str) -> tuple[int, int]:
    return step, ACTIVITIES.index(activity)


def behind(step: int, activity: str, doing: str = "") -> str:
    return rf"is furthest behind: at step {step}, in '{activity}'{doing}, for "


SILENT = r"does not answer, last seen at step \d, in '.*'.*; stopped or killed, stuck in a library"
STEP, LANGUAGE = (1, "forward and backward"), "of language, stage 0, chunk 0, microbatch"
MODEL, ENGINE = "mimo.model.modules:MimoModel", "mimo.engines.megatron.module:MegatronModule"
RECEIVER, SENDER = (f"bridge.communicator:Bridge{end}er" for end in ("Receiv", "Send"))
ROWS = "waits for bridge vision: rows of microbatch 1"
GRADIENTS = "waits for bridge vision: gradients of microbatch"
NEXT = "at step 2, in 'forward and backward'"
CASES = {
    "setup": Case(1, _sleep, (0, "setup"), "mimo.train.rank", "load_start", behind(0, "setup")),
    "before the first beat": Case(1, _hold, (0, "setup"), "mimo.train.rank", "load_start", SILENT),
    "data": Case(
        1, _sleep, (0, "norm and loss"), "mimo.train.batches:Batches", "_prepare",
        behind(2, "batch"), 2, NEXT,
    ),
    "decode": Case(
        1, _sleep, (0, "setup"), "data.loader:StepLoader", "_decode", behind(0, "setup"),
        layout=SHARES,
    ),
    "encode": Case(
        0, _sleep, STEP, "encoders._tower:Tower", "forward",
        behind(*STEP, ": forward of vision, stage 0, microbatch 1"),
        1, f"at step 1, in 'forward and backward': forward {LANGUAGE} 1, {ROWS}", number=1,
    ),
    "bridge forward": Case(
        0, _stop, STEP, SENDER, "_forward",
        SILENT, 1, f"at step 1, in 'forward and backward': forward {LANGUAGE} 1, {ROWS}", number=1,
    ),
    "bridge backward": Case(
        1, _loop, STEP, RECEIVER, "_backward",
        behind(*STEP, f": backward {LANGUAGE} 1"),
        0, rf".*: backward of vision, stage 0, microbatch 1, {GRADIENTS} 1", number=1,
    ),
    "stage": Case(
        2, _sleep, STEP, MODEL, "_receive",
        behind(*STEP, ": forward of language, stage 1, chunk 0, microbatch 1"), 1,
        rf".*: forward {LANGUAGE} \d, waits for its pipeline neighbours", number=1, layout=STAGES,
    ),
    "gradients": Case(
        2, _leave_out, (1, "gradients"), ENGINE, "finish_gradients",
        behind(1, "gradients"), 2, "at step 1, in 'norm and loss', waits for the sum over", named=1,
    ),
    "norm": Case(
        0, _stop, (1, "norm and loss"), "mimo.train.batches", "sum_over_world",
        SILENT, 1, "at step 1, in 'norm and loss', waits for the sum over all ranks",
    ),
    "optimizer": Case(1, _hold, (1, "update"), ENGINE, "update", SILENT, 0, NEXT),
    "validation": Case(
        0, _loop, (0, "validation"), "encoders._tower:Tower", "forward",
        behind(0, "validation", ": forward of vision, stage 0, microbatch 1"),
        1, rf"at step 0, in 'validation': forward {LANGUAGE} 1, {ROWS}", number=1,
    ),
    "save": Case(
        2, _sleep, (0, "checkpoint"), "mimo.checkpoint.tensors", "_chunks",
        behind(0, "checkpoint"),
    ),
}  # fmt: skip


# ------------------------------------------------------- functions that run inside ranks


def stall(case: Case, attempt: int, run_dir: Path, start: Start | None) -> None:
    """Let this rank stall in the first attempt if it is its turn."""
    from mimo.runtime.hang_monitor import HangMonitor

    is_stuck, begins, calls = HangMonitor._is_stuck, HangMonitor.at, 0
    place: tuple[int, str] = (0, "setup")

    def at(self: HangMonitor, step: int, activity: str) -> None:
        nonlocal place
        place = step, activity
        begins(self, step, activity)

    def is_stuck_since_then(self: HangMonitor) -> bool:
        # How long setup takes on a busy machine says nothing.
        begun = place[1] != "setup" or (run_dir / STRUCK).exists()
        return is_stuck(self) and begun

    HangMonitor.at, HangMonitor._is_stuck = at, is_stuck_since_then  # type: ignore[method-assign]
    if attempt == 0 and os.environ["RANK"] == str(case.rank):
        owner = pkgutil.resolve_name(case.owner)
        called = getattr(owner, case.name)

        def stall_or_call(*args: Any, **settings: Any) -> Any:
            nonlocal calls
            calls += progress(*place) >= progress(*case.phase)
            if calls > case.number:
                (run_dir / STRUCK).touch()
                return case.stall()
            return called(*args, **settings)

        setattr(owner, case.name, stall_or_call)


def run_stalling_task(case: Case, rank: int, port: int, folder: Path, arguments: list[str]) -> None:
    """A task of srun, which no launcher ends."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", RENDEZVOUS: ""}
    stall(case, 0, folder / "runs" / "tiny", None)
    os._exit(train(port, folder, arguments))


# ---------------------------------------------------------------------------- tests


@pytest.mark.parametrize("phase", quick(CASES, "encode"))
def test_a_stall_ends_the_run_and_names_the_rank_and_what_others_wait_for(
    run_ranks: RunRanks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    phase: str,
) -> None:
    case, run_dir = CASES[phase], tmp_path / "runs" / "tiny"
    tiny.write_samples(tmp_path, (2, 1, 1, 3) * 3)
    tiny.write_samples(tmp_path, (2, 1, 1, 3) * 3, "validation")
    settings = [f"train.step_timeout_seconds={TIMEOUT_SECONDS}", case.layout]
    settings += ["train.global_batch_size=12", "train.micro_batch_size=2"]
    if phase == "save":
        settings += ["train.save_every=1"]
    if phase == "validation":
        validation = f"[{{path: '{tmp_path}/validation-*.tar'}}]"
        settings += ["train.validate_every=1", f"data.validation={validation}"]
    train = disturbing(monkeypatch, f"{HERE}:stall", case)
    code = train(tiny.write_recipe(tmp_path), settings)
    ended = time.time()

    errors = capfd.readouterr().err
    summary = run_dir / "hang" / "summary.txt"
    assert summary.exists(), errors
    struck = (run_dir / STRUCK).stat().st_mtime
    text = summary.read_text()
    first, origin, *others = text.splitlines()
    assert re.match(r"the run hangs: rank \d .* \(train.step_timeout_seconds 3\)", first)
    named = case.rank if case.named is None else case.named
    origins = [line for line in (origin, *others) if line.startswith("origin: ")]
    expected = rf"origin: rank {named} \(\w+, lane \d\) {case.origin}"
    assert any(re.match(expected, line) for line in origins), text
    if case.waiting is not None:
        assert len(origins) == 1, text
        waits = rf"(.*, )?rank {case.waiting} \(\w+, lane \d\)(, rank.*?)?: {case.waits}"
        assert any(re.match(waits, line) for line in others), text
    assert errors.rstrip().endswith(f"{first}\n{origin}")
    assert code == 1
    assert summary.stat().st_mtime - struck < TIMEOUT_SECONDS + 10
    assert ended - struck < TIMEOUT_SECONDS + 10
    assert not running_ranks(run_dir), "a rank is left over"
    (incident,) = incidents(run_dir)
    assert (incident["kind"], len(incident["ranks"])) == ("hang", len(origins))
    assert named in incident["ranks"]
    stacks = {path.name: path.read_text() for path in (run_dir / "hang").glob("rank_*.txt")}
    answering = {0, 1, 2} - ({case.rank} if case.stall is _stop else set())
    assert stacks.keys() == {f"rank_{rank}.txt" for rank in answering}
    assert all("Thread 0x" in text for text in stacks.values())


@pytest.mark.slow
def test_tasks_of_srun_end_although_the_stopped_rank_is_the_one_where_they_meet(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path, (2, 1, 1, 3) * 3)
    timeout = f"train.step_timeout_seconds={TIMEOUT_SECONDS}"
    arguments = [str(tiny.write_recipe(tmp_path)), LANES, timeout, "train.micro_batch_size=2"]
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    args = [(CASES["norm"], rank, port, tmp_path, arguments) for rank in range(3)]
    tasks = [context.Process(target=run_stalling_task, args=args_of_rank) for args_of_rank in args]
    for task in tasks:
        task.start()
    try:
        struck = tmp_path / "runs" / "tiny" / STRUCK
        for task in tasks[1:]:
            task.join(60)
            assert task.exitcode == 1
        assert time.time() - struck.stat().st_mtime < TIMEOUT_SECONDS + 10
    finally:
        for task in tasks:
            task.kill()
            task.join()
    text = (struck.parent / "hang" / "summary.txt").read_text()
    assert re.search(rf"origin: rank 0 \(vision, lane 0\) {SILENT}", text)
    printed = [(tmp_path / f"printed_{rank}").read_text() for rank in (1, 2)]
    assert sum(text in lines for lines in printed) == 1
