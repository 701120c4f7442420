"""Which runs a job still has to do, and where each one begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo.checkpoint.folder import (
    belongs_to,
    final_checkpoint,
    find_checkpoint,
    phase_folders,
    read_progress,
    resumable,
)
from mimo.checkpoint.start import FromScratch, FromWeights, Resume, Start
from mimo.config.phases import Phase, PhasedRecipe
from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.parallel.grids import Layout


@dataclass(frozen=True)
class Run:
    """One phase to train, its layout, and where it begins."""

    phase: Phase
    layout: Layout
    start: Start

    @property
    def recipe(self) -> Recipe:
        """The phase's complete recipe."""
        return self.phase.recipe

    @property
    def resumes(self) -> bool:
        """Whether it continues in its run folder; if not, an older folder must move aside."""
        start = self.start
        return isinstance(start, Resume) and belongs_to(start.checkpoint, self.recipe.run_dir)

    def __str__(self) -> str:
        """For the console: the phase, its layout, and where it begins."""
        grids = ", ".join(f"{name} {grid}" for name, grid in self.layout.grids.items())
        return f"{self.phase.title}: {grids}; {self.begins}"

    @property
    def begins(self) -> str:
        """Where it begins, in words."""
        match self.start:
            case Resume(checkpoint):
                return f"continues from {checkpoint}"
            case FromWeights(checkpoint):
                return f"begins with the weights of {checkpoint} and fresh optimizers"
            case FromScratch():
                return "begins from scratch"


def candidates(phased: PhasedRecipe, resume: bool, resume_from: Path | None) -> list[Path]:
    """The checkpoints from which a job may go on, the best first; found from the folders alone.

    resume: those of the last phase that has any, then of phases before. resume_from: this one and
    no other. Raises InputError if that does not exist, or is in the run's folder by another name.
    """
    if not resume and resume_from is None:
        return []
    _check_folders(phased)
    if resume_from is not None:
        checkpoint = find_checkpoint(resume_from)
        folders = (phased.run_dir, *(phase.recipe.run_dir for phase in phased.phases))
        is_inside = checkpoint.resolve().is_relative_to(phased.run_dir.resolve())
        if is_inside and not any(belongs_to(checkpoint, folder) for folder in folders):
            raise InputError(
                f"{checkpoint}: is in the run's own folder, but is none of its checkpoints; move "
                f"it out of {phased.run_dir}, or to checkpoints/step_<n> in there"
            )
        return [checkpoint]
    folders = (phased.run_dir, *reversed(phase_folders(phased.run_dir).values()))
    return [checkpoint for folder in folders for checkpoint in resumable(folder)]


def runs_to_do(
    phased: PhasedRecipe, layouts: Sequence[Layout], checkpoint: Path | None
) -> list[Run]:
    """The phases that are left, in order.

    layouts: of all phases. checkpoint: continue its phase, or begin the next one if that phase is
    done; later phases run anew. None begins the first.
    Raises InputError if the checkpoint is damaged or belongs to no phase.
    """
    first, start = _first(phased, checkpoint)
    runs: list[Run] = []
    for phase, layout in list(zip(phased.phases, layouts, strict=True))[first:]:
        runs.append(Run(phase, layout, start))
        start = FromWeights(final_checkpoint(phase.recipe.run_dir, phase.recipe.train.steps))
    return runs


def _first(phased: PhasedRecipe, checkpoint: Path | None) -> tuple[int, Start]:
    """The index of the phase to begin with, and where it begins."""
    if checkpoint is None:
        return 0, FromScratch()
    progress = read_progress(checkpoint)
    if not phased.has_phases:
        return 0, Resume(checkpoint)
    index = _phase_of(phased, checkpoint)
    done = progress.step >= phased.phases[index].recipe.train.steps
    if done and index + 1 < len(phased.phases):
        return index + 1, FromWeights(checkpoint)
    return index, Resume(checkpoint)


def _phase_of(phased: PhasedRecipe, checkpoint: Path) -> int:
    """The index of the phase whose run folder holds `checkpoint`."""
    for index, phase in enumerate(phased.phases):
        if checkpoint.resolve().is_relative_to(phase.recipe.run_dir.resolve()):
            return index
    folders = ", ".join(str(phase.recipe.run_dir) for phase in phased.phases)
    raise InputError(
        f"{checkpoint}: belongs to no phase of this recipe; give a checkpoint in {folders}"
    )


def _check_folders(phased: PhasedRecipe) -> None:
    """Raise InputError if the folder of a phase has another name than the phase in the recipe."""
    own = {phase.recipe.run_dir.name for phase in phased.phases}
    for number, folder in phase_folders(phased.run_dir).items() if phased.has_phases else ():
        if folder.name not in own:
            raise InputError(
                f"{folder}: phase {number} of the run to resume has this name, but the recipe's "
                f"phases are {', '.join(sorted(own))}; name them as before, or start another run"
            )
