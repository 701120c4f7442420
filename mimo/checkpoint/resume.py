"""Where a job starts: the checkpoints it may resume from, which of them is intact, what is left.

Needs no engine, so that a launcher can hand a start to its ranks.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mimo.checkpoint.folder import (
    belongs_to,
    final_checkpoint,
    find_checkpoint,
    phase_folders,
    read_progress,
    resumable,
)
from mimo.checkpoint.manifest import (
    Listed,
    Unreadable,
    listed_files,
    raise_damaged,
    wrong_checksums,
)
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.config.phases import Phase, PhasedRecipe
from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.parallel.grids import Layout


@dataclass(frozen=True)
class FromScratch:
    """Start with random weights at step 0."""


@dataclass(frozen=True)
class Resume:
    """Continue the run that wrote ``checkpoint``: weights, optimizers, step and data."""

    checkpoint: Path


@dataclass(frozen=True)
class FromWeights:
    """Start with the weights of ``checkpoint``, in whatever layout; fresh optimizers, step 0."""

    checkpoint: Path


Start = FromScratch | Resume | FromWeights


@dataclass(frozen=True)
class Run:
    """One phase to train, its layout, and where it starts."""

    phase: Phase
    layout: Layout
    start: Start

    @property
    def recipe(self) -> Recipe:
        return self.phase.recipe

    @property
    def resumes(self) -> bool:
        """Whether it continues in its run folder; otherwise an older folder must move aside."""
        start = self.start
        return isinstance(start, Resume) and belongs_to(start.checkpoint, self.recipe.run_dir)

    def __str__(self) -> str:
        grids = ", ".join(f"{name} {grid}" for name, grid in self.layout.grids.items())
        return f"{self.phase.title}: {grids}; {self.begins}"

    @property
    def begins(self) -> str:
        """Where it starts, as a predicate for the console."""
        match self.start:
            case Resume(checkpoint):
                return f"continues from {checkpoint}"
            case FromWeights(checkpoint):
                return f"begins with the weights of {checkpoint} and fresh optimizers"
            case FromScratch():
                return "begins from scratch"


def files_to_compare(checkpoint: Path) -> tuple[list[Listed], list[str]]:
    """Return the listed files, and the problems of the manifest itself. Raises Unreadable."""
    try:
        return listed_files(checkpoint), []
    except Unreadable:
        raise
    except InputError as error:
        return [], [str(error)]


def split_by_bytes(files: Sequence[Listed], count: int) -> list[list[Listed]]:
    """Split the files among ``count`` readers, with about equally many bytes each."""
    shares: list[list[Listed]] = [[] for _ in range(count)]
    for listed in sorted(files, key=lambda file: (-file.num_bytes, file.name)):
        min(shares, key=lambda share: sum(file.num_bytes for file in share)).append(listed)
    return shares


def problems_of(
    checkpoint: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Read a checkpoint with all cores and return its problems. progress: bytes done and total."""
    files, problems = files_to_compare(checkpoint)
    if problems:
        return problems
    done, total = 0, sum(listed.num_bytes for listed in files)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    shares = split_by_bytes(files, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(len(shares)) as threads:
        results = threads.map(lambda share: wrong_checksums(checkpoint, share, advance), shares)
        return [line for problems in results for line in problems]


def open_checkpoint(checkpoint: Path) -> dict[str, StoredTensor]:
    """Return a checkpoint's index, after comparing its files without tensors.

    Blocks of tensors are compared while they are read. Raises InputError for damage.
    """
    small = [listed for listed in listed_files(checkpoint) if not listed.blocks]
    raise_damaged(checkpoint, wrong_checksums(checkpoint, small))
    return read_index(checkpoint)


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a job resumes from, if any, and the problems of better ones."""

    checkpoint: Path | None = None
    damaged: Mapping[Path, Sequence[str]] = field(default_factory=dict)


def choose(
    candidates: Iterable[Path], problems: Callable[[Path], Sequence[str]] = problems_of
) -> Choice:
    """Return the first candidate without problems. Raises InputError if all have some."""
    damaged: dict[Path, Sequence[str]] = {}
    for checkpoint in candidates:
        if not (reasons := problems(checkpoint)):
            return Choice(checkpoint, damaged)
        damaged[checkpoint] = reasons
    if damaged:
        lines = [f"{path} is damaged: {'; '.join(reasons)}" for path, reasons in damaged.items()]
        lines.append("no checkpoint is left to resume from: copy one again, or start another run")
        raise InputError("\n".join(lines))
    return Choice()


def candidates(phased: PhasedRecipe, resume: bool, resume_from: Path | None) -> list[Path]:
    """Return the checkpoints from which a job may resume, best first, from the folders alone.

    resume: those of the last phase that has any, then of phases before. resume_from: only this one.
    Raises InputError if that does not exist, or is in the run's folder by another name.
    """
    if not resume and resume_from is None:
        return []
    names = {phase.recipe.run_dir.name for phase in phased.phases}
    for number, folder in phase_folders(phased.run_dir).items() if phased.has_phases else ():
        if folder.name not in names:
            raise InputError(
                f"{folder}: phase {number} of the run to resume has this name, but the recipe's "
                f"phases are {', '.join(sorted(names))}; name them as before, or start another run"
            )
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
    """Return the phases that are left, in order. layouts: of all phases.

    checkpoint: continue its phase, or the next if it is done. Raises InputError if it fits none.
    """
    first, start = _first_phase(phased, checkpoint)
    runs: list[Run] = []
    for phase, layout in list(zip(phased.phases, layouts, strict=True))[first:]:
        runs.append(Run(phase, layout, start))
        start = FromWeights(final_checkpoint(phase.recipe))
    return runs


def _first_phase(phased: PhasedRecipe, checkpoint: Path | None) -> tuple[int, Start]:
    if checkpoint is None:
        return 0, FromScratch()
    progress = read_progress(checkpoint)
    if not phased.has_phases:
        return 0, Resume(checkpoint)
    run_dirs = [phase.recipe.run_dir for phase in phased.phases]
    inside = [checkpoint.resolve().is_relative_to(folder.resolve()) for folder in run_dirs]
    if not any(inside):
        raise InputError(
            f"{checkpoint}: belongs to no phase of this recipe; give a checkpoint in "
            f"{', '.join(map(str, run_dirs))}"
        )
    index = inside.index(True)
    is_done = progress.step >= phased.phases[index].recipe.train.steps
    if is_done and index + 1 < len(phased.phases):
        return index + 1, FromWeights(checkpoint)
    return index, Resume(checkpoint)
