"""Killed at any moment and started again, a run ends as an undisturbed one does."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from mimo.checkpoint import reading
from mimo.checkpoint.folder import read_progress
from mimo.checkpoint.resume import Resume, Start
from mimo.runtime import processes
from mimo.runtime.run_files import incidents
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.disturbed import disturbing, when_at
from tests.mimo.runs import ADAM, metrics

HERE = "tests.mimo.train.test_kills"
STEPS = 6
SAVE_EVERY = 2
CASES = 18  # each part of a step, in both kinds of layout
# A rank for the tower and one for the language model; or both on both ranks, in two stages.
KINDS = (
    ["train.async_save=true"],
    ["encoders.vision.placement=colocated", "language.grid.pp=2", "encoders.vision.grid.dp=2"],
)
SAME = ("step", "loss", "grad_norm", "tokens", "skipped_samples", "epochs")


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a rank, so many steps after the first one of its life.

    where: one of `DEATHS`. moment: which one of that part of the step, in 0 to 1.
    """

    rank: int
    where: str
    steps: int
    moment: float


# ----------------------------------------------------------------- what runs inside ranks


def disturb(kills: list[Kill], attempt: int, run_dir: Path, start: Start) -> None:
    """Note the samples of every step; die if it is this rank's turn."""
    rank = int(os.environ["RANK"])
    note_samples(run_dir / f"samples_{rank}.jsonl")
    kill = kills[attempt] if attempt < len(kills) else None
    if kill is not None and kill.rank == rank:
        first = read_progress(start.checkpoint).step if isinstance(start, Resume) else 0
        DEATHS[kill.where](first + kill.steps, kill.moment)


def note_samples(file: Path) -> None:
    from mimo.model.step_plan import StepPlan
    from mimo.train.rank import MonitoredSteps

    def planned(self: MonitoredSteps, step: int, plan: StepPlan) -> None:
        samples = [
            (m.samples.source.tolist(), m.samples.sample.tolist()) for m in plan.microbatches
        ]
        with file.open("a") as lines:
            lines.write(json.dumps([step, samples]) + "\n")

    # In this rank's process only. Pyright: a method is not an attribute.
    MonitoredSteps.planned = planned  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_setup(step: int, moment: float) -> None:
    timer = threading.Timer(0.3 * moment, die)
    timer.daemon = True
    timer.start()


def in_forward(step: int, moment: float) -> None:
    """At the n-th module that runs forward, whichever microbatch that is in."""
    left = 1 + int(60 * moment)

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    def begin() -> None:
        torch.nn.modules.module.register_module_forward_pre_hook(count)

    when_at(step, "forward and backward", begin)


def in_bridge(step: int, moment: float) -> None:
    """Between a send and its receive: of rows, or in the backward pass of their gradients."""
    from bridge import BridgeReceiver, BridgeSender
    from bridge.colocated import ColocatedBridge

    left = 1 + int(3 * moment)

    def die_in(owner: type, name: str, then: bool) -> None:
        call = getattr(owner, name)

        def called(*args: object) -> object:
            nonlocal left
            left -= 1
            if left <= 0 and not then:
                die()
            result = call(*args)
            if left <= 0:
                die()
            return result

        setattr(owner, name, called)

    def arm() -> None:
        die_in(BridgeSender, "send", then=True)
        die_in(BridgeReceiver, "receive", then=False)
        die_in(ColocatedBridge, "deliver", then=True)
        die_in(ColocatedBridge, "collect", then=False)

    when_at(step, "forward and backward", arm)


def in_data(step: int, moment: float) -> None:
    """In the thread that prepares a batch ahead of use."""
    from mimo.train.batches import Batches

    prepare = Batches._prepare

    def prepare_or_die(self, loaded, unusable):
        if loaded.step >= step:
            time.sleep(0.01 * moment)
            die()
        return prepare(self, loaded, unusable)

    Batches._prepare = prepare_or_die  # type: ignore[method-assign]


def in_a_file(step: int, moment: float) -> None:
    """When the checkpoint's largest file is so far written: the kernel ends who goes on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    when_at(step, "checkpoint", lambda: limit_files(2_000 + int(moment * 30_000)))


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def in_a_rename(step: int, moment: float) -> None:
    """When a complete checkpoint is to get its name, or `latest` is to name it."""
    left = 1 + int(2 * moment)

    def hear(event: str, args: tuple) -> None:
        nonlocal left
        if event == "os.rename" and "checkpoints" in str(args[0]):
            left -= 1
            if left <= 0:
                die()

    when_at(step, "checkpoint", lambda: sys.addaudithook(hear))


def at_any_time(step: int, moment: float) -> None:
    """Do nothing: the test kills this rank."""


DEATHS: dict[str, Callable[[int, float], None]] = {
    "setup": in_setup,
    "forward": in_forward,
    "bridge": in_bridge,
    "norm": lambda step, moment: when_at(step, "norm and loss", die),
    "update": lambda step, moment: when_at(step, "update", die),
    "data": in_data,
    "file": in_a_file,
    "rename": in_a_rename,
    "outside": at_any_time,
}


# ------------------------------------------------------------------------------ helpers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Path:
    directory = tmp_path_factory.mktemp("kills")
    tiny.write_samples(directory)
    tiny.write_samples(directory, (1, 0, 2, 0, 1), name="other")
    tiny.write_recipe(directory)
    return directory


def settings(folder: Path, kind: int, name: str) -> list[str]:
    paths = [folder / f"{source}-*.tar" for source in ("train", "other")]
    sources = f"[{{path: '{paths[0]}', weight: 2.0}}, {{path: '{paths[1]}'}}]"
    return [
        *(f"train.steps={STEPS}", f"train.save_every={SAVE_EVERY}", "train.keep_checkpoints=1"),
        *("train.global_batch_size=4", "train.micro_batch_size=1", "data.packing_window=9"),
        *(f"data.sources={sources}", "data.shuffle_block=null", f"name={name}", *ADAM),
        *("data.tokens_per_microbatch=128", *KINDS[kind]),
    ]


def samples_of(run_dir: Path, rank: int) -> dict[int, list]:
    """The samples of a rank by step, which are the same before and after it was killed."""
    samples_by_step: dict[int, list] = {}
    for line in (run_dir / f"samples_{rank}.jsonl").read_text().splitlines():
        step, samples = json.loads(line)
        assert samples_by_step.setdefault(step, samples) == samples, f"step {step} differs"
    return samples_by_step


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Of all modules and their optimizers, at the end of a run."""
    checkpoint = run_dir / "checkpoints" / f"step_{STEPS}"
    return reading.read(checkpoint)


@pytest.fixture(scope="module")
def undisturbed(folder: Path):
    """The run of a kind that nobody disturbs."""

    @cache
    def of(kind: int) -> Path:
        name = f"undisturbed_{kind}"
        with pytest.MonkeyPatch.context() as patch:
            train = disturbing(patch, f"{HERE}:disturb", [])
            assert train(folder / "tiny.yaml", settings(folder, kind, name)) == 0
        return folder / "runs" / name

    return of


def num_lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


@contextmanager
def killing_from_outside(kills: list[Kill], run_dir: Path) -> Iterator[None]:
    """Send SIGKILL to ranks of jobs that run inside, so many steps after their lives began."""
    over = threading.Event()

    def kill_each() -> None:
        for attempt, kill in enumerate(kills):
            pid = run_dir / f"pid_{attempt}_{kill.rank}"
            while not (pid.exists() and pid.read_text()):
                if over.wait(0.005):
                    return
            if kill.where != "outside":
                continue
            noted = run_dir / f"samples_{kill.rank}.jsonl"
            last = num_lines(noted) + kill.steps
            while num_lines(noted) < last:
                if over.wait(0.002):
                    return
            if not over.wait(0.05 * kill.moment):
                with suppress(ProcessLookupError):
                    os.kill(int(pid.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill_each)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def kills_of(seed: int) -> list[Kill]:
    """One or two, of any kind."""
    rng, where = np.random.default_rng(seed), list(DEATHS)
    first = where[seed % len(where)]  # every kind as often as the others
    names = [first, *rng.choice(where, int(rng.integers(0, 2)))]
    return [
        Kill(int(rng.integers(2)) * (name != "rename"), name, int(rng.integers(0, 4)), rng.random())
        for name in names
    ]


# -------------------------------------------------------------------------------- tests


# `tests/mimo/checkpoint/test_saving.py` has quick kills while files are written.
@pytest.mark.parametrize("seed", quick_values({str(n): n for n in range(CASES)}, "2"))
def test_a_run_that_is_killed_at_any_moment_ends_as_an_undisturbed_one(
    folder: Path, undisturbed, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, kills, name = seed // len(DEATHS), kills_of(seed), f"killed_{seed}"
    run_dir, expected = folder / "runs" / name, undisturbed(kind)
    # A rank that dies silently is the cause; there is no need to wait for what others report.
    monkeypatch.setattr(processes, "_SILENT_CAUSE_SECONDS", 0.05)
    train = disturbing(monkeypatch, f"{HERE}:disturb", kills)
    with killing_from_outside(kills, run_dir):
        assert train(folder / "tiny.yaml", settings(folder, kind, name), max_restarts=3) == 0

    restarts = [i for i in incidents(run_dir) if i["kind"] == "restart"]
    assert restarts, "nobody was killed"
    for restart, kill in zip(restarts, kills, strict=False):
        died = "SIGXFSZ" if kill.where == "file" else "SIGKILL"
        assert restart["cause"] == f"rank {kill.rank} was killed by {died}"
        assert restart["rank"] == kill.rank
    for rank in range(2):
        samples, whole = (samples_of(folder, rank) for folder in (run_dir, expected))
        assert list(samples) == list(range(STEPS))
        assert samples == whole
    got, lines = (metrics(folder / "tiny.yaml", run.name) for run in (run_dir, expected))
    for key in SAME:
        assert [line[key] for line in got] == [line[key] for line in lines], key
    progress = read_progress(run_dir / "checkpoints" / f"step_{STEPS}")
    assert progress == read_progress(expected / "checkpoints" / f"step_{STEPS}")
    # Every position is used once, or waits.
    assert sum(len(source) for step in samples.values() for source, _ in step) == progress.samples
    after, at_best = weights(run_dir), weights(expected)
    assert after.keys() == at_best.keys()
    assert all(torch.equal(after[key], at_best[key]) for key in at_best)
