"""Jobs to write scripts for, in a fixed folder, so that scripts are the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mimo.slurm.script import Job, prepare
from tests.mimo.tiny import RECIPE

FOLDER = Path("/project")
WIDE = [  # so that heads divide by 8
    "language.model.hidden_size=64",
    "language.model.num_attention_heads=8",
    "language.model.num_query_groups=8",
    "encoders.vision.placement=disjoint",
    "train.micro_batch_size=1",
    "train.run_dir=runs",
]
SEVENTEEN = ["language.grid={tp: 8, dp: 2}", "train.global_batch_size=12"]


def write_recipe(directory: Path) -> Path:
    """Write a recipe whose data need not exist."""
    path = directory / "tiny.yaml"
    path.write_text(RECIPE.format(directory="/data"))
    return path


def job_of(directory: Path, overrides: Sequence[str] = (), site: str = "") -> Job:
    """Return a job that was launched in `FOLDER`. site: text of the file of `--cluster`."""
    file = None
    if site:
        file = directory / "site.yaml"
        file.write_text(site)
    job = prepare(write_recipe(directory), [*WIDE, *overrides], file)
    return replace(job, folder=FOLDER, bin=FOLDER / ".venv/bin")
