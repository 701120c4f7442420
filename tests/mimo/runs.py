"""Whole runs of a recipe in tests: in the shared pool of ranks, or through the command line.

Runs that should succeed use the pool; what a person sees on failure goes through the command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typer.testing import CliRunner, Result

from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import FromScratch, Resume, Start
from mimo.cli.main import app
from mimo.config.schema import Recipe
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.runtime.run_files import BAD_SAMPLES
from mimo.train.run_folder import make_run_dir
from tests.conftest import RunRanks
from tests.ranks import MarkedJob

if TYPE_CHECKING:  # so that processes that only start runs need no torch
    from mimo.checkpoint.save import Saver
    from mimo.model.dataset import Dataset
    from mimo.train.loop import Trainer

LAYOUT = ["language.grid.dp=2", "train.micro_batch_size=2"]
ADAM = ["train.optimizer=adam", "train.learning_rate=0.003", "train.clip_grad_norm=1.0"]


def mimo(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line, from start to end; no process of it may be left over."""
    job = MarkedJob()
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, env=job.environment
    )
    assert not job.leftovers(), done.stderr
    return done


def mimo_here(run_ranks: RunRanks, *arguments: object) -> Result:
    """The command line in this process, whose ranks need no imports: ten seconds less."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mimo.cli.main", *map(str, arguments)]


def run(run_ranks: RunRanks, path: Path, *overrides: str, resume_from: Path | None = None) -> None:
    """Train to the end in this process's pool of ranks; the run folder is made as a job does."""
    start = FromScratch() if resume_from is None else Resume(resume_from)
    run_from(run_ranks, load_recipe(path, overrides), start)


def run_from(run_ranks: RunRanks, recipe: Recipe, start: Start) -> None:
    """Like `run`, from anywhere."""
    layout = check_recipe(recipe, None)
    run_dir = make_run_dir(recipe, resumes=isinstance(start, Resume))
    run_ranks(_train, layout.world_size, recipe, layout, run_dir, start)


def _train(rank: int, recipe: Recipe, layout: Layout, run_dir: Path, start: Start) -> None:
    from mimo.train.rank import train_in_world

    train_in_world(recipe, layout, run_dir, start)


def open_trainer(recipe: Recipe) -> tuple[Trainer, Dataset]:
    """Return this rank's trainer and its training data; runs inside ranks."""
    from mimo.model.dataset import open_dataset
    from mimo.parallel.build import build_layout
    from mimo.parallel.groups import build_topology
    from mimo.train.loop import Trainer

    trainer = Trainer(recipe, build_topology(build_layout(recipe)), recipe.run_dir)
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    return trainer, dataset


def save(saver: Saver, progress: Progress) -> None:
    """Write a checkpoint that is there on return; every rank calls it."""
    saver.begin(progress)
    saver.publish()
    saver.wait()


def metrics(recipe: Path, run: str = "tiny") -> list[dict]:
    path = recipe.parent / "runs" / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def bad_samples(recipe: Path, run: str = "tiny") -> list[dict]:
    path = recipe.parent / "runs" / run / BAD_SAMPLES
    return [json.loads(line) for line in path.read_text().splitlines()]


def shards(recipe: Path, *names: str, split: str = "sources") -> str:
    """Return the override that takes the shards of these names, beside the recipe, as a split."""
    paths = ", ".join(f"{{path: '{recipe.parent}/{name}-*.tar'}}" for name in names)
    return f"data.{split}=[{paths}]"


def corrupt(recipe: Path, name: str = "train") -> None:
    """Break pixels inside the first item: its header, which the index reads, stays good."""
    shard = recipe.parent / f"{name}-00000.tar"
    data = bytearray(shard.read_bytes())
    first = data.index(b"IDAT")
    data[first + 8 : first + 40] = bytes(32)
    shard.write_bytes(data)
