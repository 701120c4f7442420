"""A run whose ranks are killed at any moment trains on the samples of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mimo.checkpoint.folder import newest_checkpoint, read_progress
from mimo.checkpoint.start import FromScratch, Resume
from mimo.hf.recipes import load_recipe
from mimo.launch.processes import RanksFailed
from mimo.layout.grids import Layout
from mimo.model.recipe_checks import check_recipe
from mimo.recipe.schema import Recipe
from mimo.train.run_folder import make_run_dir
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import ADAM, metrics

STEPS = 12
KILLS = 2  # of each run
KINDS = (
    [
        "encoders.vision.placement=colocated",
        "data.tokens_per_microbatch=128",
        "train.async_save=true",
    ],
    ["train.micro_batch_size=2"],  # a rank for the tower, and one for the language model
)
SAME = ("step", "loss", "grad_norm", "tokens", "skipped_samples", "epochs")


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a rank, so many seconds after a step has begun; -1 is before the first one."""

    rank: int
    step: int
    seconds: float


def train(
    rank: int, recipe: Recipe, layout: Layout, run_dir: Path, start: Resume | None, kill: Kill
) -> None:
    """Runs inside ranks: train, note the samples of every step, be killed."""
    from mimo.step.plan import StepPlan
    from mimo.train.presence import Presence
    from mimo.train.rank import train_in_world

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def begin(step: int) -> None:
        if (rank, step) == (kill.rank, kill.step):
            timer = threading.Timer(kill.seconds, die)
            timer.daemon = True
            timer.start()

    tell = Presence.at

    def at(self: Presence, step: int, activity: str) -> None:
        tell(self, step, activity)
        if activity == "batch":
            begin(step)

    def planned(self: Presence, step: int, plan: StepPlan) -> None:
        samples = [
            (m.samples.source.tolist(), m.samples.sample.tolist()) for m in plan.microbatches
        ]
        with (run_dir / f"samples_{rank}.jsonl").open("a") as file:
            file.write(json.dumps([step, samples]) + "\n")

    Presence.at, Presence.planned = at, planned  # type: ignore[method-assign]
    begin(-1)
    train_in_world(recipe, layout, run_dir, start or FromScratch())


def samples_of(run_dir: Path, rank: int) -> dict[int, list]:
    """By step, what a rank was last given; what it was given before it was killed is the same."""
    found: dict[int, list] = {}
    for line in (run_dir / f"samples_{rank}.jsonl").read_text().splitlines():
        step, samples = json.loads(line)
        assert found.setdefault(step, samples) == samples, f"step {step} is another after a kill"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kills")
    tiny.write_samples(directory)
    tiny.write_samples(directory, (1, 0, 2, 0, 1), name="other")
    tiny.write_recipe(directory)
    return directory


def job(folder: Path, kind: int, name: str) -> tuple[Recipe, Layout]:
    paths = [folder / f"{source}-*.tar" for source in ("train", "other")]
    sources = f"[{{path: '{paths[0]}', weight: 2.0}}, {{path: '{paths[1]}'}}]"
    settings = [f"train.steps={STEPS}", "train.save_every=2", "train.keep_checkpoints=1"]
    settings += ["train.global_batch_size=4", "train.micro_batch_size=1", "data.packing_window=9"]
    settings += [f"data.sources={sources}", "data.shuffle_block=null", f"name={name}", *ADAM]
    if kind == 1:
        settings.remove("data.packing_window=9")
    recipe = load_recipe(folder / "tiny.yaml", [*settings, *KINDS[kind]])
    return recipe, check_recipe(recipe, None)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, run_ranks: RunRanks):
    """The run of a kind that nobody disturbs."""

    @cache
    def of(kind: int) -> Path:
        recipe, layout = job(folder, kind, f"undisturbed_{kind}")
        run_dir = make_run_dir(recipe, resumes=False)
        never = Kill(-1, 0, 0.0)
        run_ranks(train, layout.world_size, recipe, layout, run_dir, None, never)
        return run_dir

    return of


@pytest.mark.parametrize("seed", quick_values({str(seed): seed for seed in range(20)}, "0"))
def test_a_run_that_is_killed_at_any_moment_repeats_and_loses_no_sample(
    run_ranks: RunRanks, folder: Path, undisturbed, seed: int
) -> None:
    rng, kind = np.random.default_rng(seed), seed % len(KINDS)
    recipe, layout = job(folder, kind, f"killed_{seed}")
    run_dir, ends, done = make_run_dir(recipe, resumes=False), list[str](), False
    while not done:
        checkpoint = newest_checkpoint(run_dir)
        first = read_progress(checkpoint).step if checkpoint else 0
        start = Resume(checkpoint) if checkpoint else None
        # In the first life early enough to happen, later also too late.
        step = -1 if rng.random() < 0.15 else first + int(rng.integers(0, 6))
        rank = int(rng.integers(layout.world_size)) if len(ends) < KILLS else -1
        kill = Kill(rank, step, float(rng.uniform(0, 0.1 if step >= 0 else 0.5)))
        make_run_dir(recipe, resumes=True)
        try:
            run_ranks(train, layout.world_size, recipe, layout, run_dir, start, kill)
            done = True
        except RanksFailed as failure:
            ends.append(str(failure))
    assert ends, "nobody was killed"
    assert all(end.endswith("was killed by SIGKILL") for end in ends), ends
    expected = undisturbed(kind)
    for rank in range(layout.world_size):
        found, whole = (samples_of(folder, rank) for folder in (run_dir, expected))
        assert list(found) == list(range(STEPS))
        assert found == whole
    got, lines = (metrics(folder / "tiny.yaml", own.name) for own in (run_dir, expected))
    for key in SAME:
        assert [line[key] for line in got] == [line[key] for line in lines], key
    ours, theirs = (
        read_progress(own / "checkpoints" / f"step_{STEPS}") for own in (run_dir, expected)
    )
    assert ours == theirs
    # Every position is used once, or waits.
    assert sum(len(source) for step in found.values() for source, _ in step) == ours.samples
