"""Which runs a job still has to do, and where each of them begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo.checkpoint.folder import (
    final_checkpoint,
    find_checkpoint,
    newest_checkpoint,
    read_progress,
    stage_folders,
)
from mimo.checkpoint.start import FromScratch, FromWeights, Resume, Start
from mimo.errors import InputError
from mimo.layout.grids import Layout
from mimo.recipe.phases import Stage, StagedRecipe
from mimo.recipe.schema import Recipe


@dataclass(frozen=True)
class Run:
    """One stage to train: on which layout, and where it begins."""

    stage: Stage
    layout: Layout
    start: Start

    @property
    def recipe(self) -> Recipe:
        """The stage's, whole."""
        return self.stage.recipe

    @property
    def resumes(self) -> bool:
        """Whether it continues in its run folder; else an older folder is in the way."""
        return isinstance(self.start, Resume)

    def __str__(self) -> str:
        """For the console: the stage, its layout, and where it begins."""
        grids = ", ".join(f"{name} {grid}" for name, grid in self.layout.grids.items())
        return f"{self.stage.title}: {grids}; {self.begins}"

    @property
    def begins(self) -> str:
        """Where, in words."""
        match self.start:
            case Resume(checkpoint):
                return f"continues from {checkpoint}"
            case FromWeights(checkpoint):
                return f"begins with the weights of {checkpoint}"
            case FromScratch():
                return "begins from scratch"


def runs_to_do(
    staged: StagedRecipe, layouts: Sequence[Layout], resume: bool, resume_from: Path | None
) -> list[Run]:
    """The stages that are left, in order; only folders are looked at.

    layouts: of all stages. resume: continue the last stage that has a checkpoint, or begin the one
    after it where that is done; without any checkpoint, begin the first. resume_from: continue the
    stage whose checkpoint this is; the stages after it run anew.
    Raises InputError when that checkpoint is not there, or when it belongs to no stage.
    """
    first, start = _first(staged, resume, resume_from)
    runs: list[Run] = []
    for stage, layout in list(zip(staged.stages, layouts, strict=True))[first:]:
        runs.append(Run(stage, layout, start))
        start = FromWeights(final_checkpoint(stage.recipe.run_dir, stage.recipe.train.steps))
    return runs


def _first(staged: StagedRecipe, resume: bool, resume_from: Path | None) -> tuple[int, Start]:
    """The index of the stage to begin with, and where that one begins."""
    if not resume and resume_from is None:
        return 0, FromScratch()
    _check_folders(staged)
    if resume_from is None:
        checkpoint = newest_checkpoint(staged.run_dir)
        if checkpoint is None:
            return 0, FromScratch()
    else:
        checkpoint = find_checkpoint(resume_from)
    if not staged.has_stages:
        return 0, Resume(checkpoint)
    index = _stage_of(staged, checkpoint)
    done = read_progress(checkpoint).step >= staged.stages[index].recipe.train.steps
    if done and index + 1 < len(staged.stages):
        return index + 1, FromWeights(checkpoint)
    return index, Resume(checkpoint)


def _stage_of(staged: StagedRecipe, checkpoint: Path) -> int:
    """The index of the stage in whose run folder `checkpoint` is."""
    for index, stage in enumerate(staged.stages):
        if checkpoint.resolve().is_relative_to(stage.recipe.run_dir.resolve()):
            return index
    folders = ", ".join(str(stage.recipe.run_dir) for stage in staged.stages)
    raise InputError(
        f"{checkpoint}: belongs to no stage of this recipe; give a checkpoint in {folders}"
    )


def _check_folders(staged: StagedRecipe) -> None:
    """Raise InputError where the folder of a stage is one that the recipe knows by another name."""
    own = {stage.recipe.run_dir.name for stage in staged.stages}
    for number, folder in stage_folders(staged.run_dir).items() if staged.has_stages else ():
        if folder.name not in own:
            raise InputError(
                f"{folder}: stage {number} of the run to resume has this name, but the recipe's "
                f"stages are {', '.join(sorted(own))}; name them as before, or start another run"
            )
