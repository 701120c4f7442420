"""Where a job continues."""

from __future__ import annotations

import os
import stat
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
    reading,
    refuse,
    wrong_checksums,
)
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.config.phases import Phase, PhasedRecipe
from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.parallel.grids import Layout


@dataclass(frozen=True)
class FromScratch:
    """Freshly drawn weights, step 0."""


@dataclass(frozen=True)
class Resume:
    """Where the run that wrote ``checkpoint`` stood: weights, optimizers, step and data."""

    checkpoint: Path


@dataclass(frozen=True)
class FromWeights:
    """The weights of ``checkpoint``, in whatever layout; fresh optimizers, step 0."""

    checkpoint: Path


Start = FromScratch | Resume | FromWeights


def wrong_sizes(checkpoint: Path) -> list[str]:
    """What is wrong as far as names, sizes and small files tell: nothing large is read.

    Raises Unreadable where that cannot be found out.
    """
    with reading(checkpoint):
        if not checkpoint.is_dir():
            return ["the folder is missing"]
    try:
        problems = _wrong_files(checkpoint, listed_files(checkpoint) or ())
        if not problems:
            read_progress(checkpoint)
            read_index(checkpoint)
    except Unreadable:
        raise
    except InputError as error:
        return [str(error)]
    return problems


def _wrong_files(checkpoint: Path, files: Iterable[Listed]) -> list[str]:
    """Which of the listed files are missing or have another size."""
    problems: list[str] = []
    for listed in files:
        size = _size(checkpoint, listed.name)
        if size is None:
            problems.append(f"{listed.name} is missing, or is a link")
        elif size != listed.num_bytes:
            problems.append(f"{listed.name} has {size} bytes, not {listed.num_bytes}")
    return problems


def _size(checkpoint: Path, name: str) -> int | None:
    """Of a plain file; None if it is anything else, or reached by a link."""
    path = checkpoint
    for part in name.split("/"):
        path /= part
        try:
            with reading(path):
                found = path.lstat()
        except OSError:
            return None
        if stat.S_ISLNK(found.st_mode):
            return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def dealt(files: Sequence[Listed], count: int) -> list[list[Listed]]:
    """The files dealt to so many readers, about as many bytes to each."""
    found: list[list[Listed]] = [[] for _ in range(count)]
    loads = [0] * count
    for listed in sorted(files, key=lambda one: (-one.num_bytes, one.name)):
        least = loads.index(min(loads))
        found[least].append(listed)
        loads[least] += listed.num_bytes
    return found


def _no_progress(done: int, total: int) -> None:
    """Tell nobody."""


def problems_of(checkpoint: Path, progress: Callable[[int, int], None] = _no_progress) -> list[str]:
    """All that is wrong with a checkpoint; this machine's cores read all of it.

    progress: told of the bytes that are done, and of how many there are.
    """
    return wrong_sizes(checkpoint) or _compare(checkpoint, listed_files(checkpoint) or [], progress)


def _compare(
    checkpoint: Path, files: Sequence[Listed], progress: Callable[[int, int], None]
) -> list[str]:
    """`wrong_checksums` of these files, by all cores of this machine."""
    done, total = 0, sum(listed.num_bytes for listed in files)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    def check(listed: Listed) -> list[str]:
        return wrong_checksums(checkpoint, [listed], advance)

    largest_first = sorted(files, key=lambda one: -one.num_bytes)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return [one for found in threads.map(check, largest_first) for one in found]


def open_checkpoint(
    checkpoint: Path, progress: Callable[[int, int], None] = _no_progress
) -> dict[str, StoredTensor]:
    """Return the index of a checkpoint that is about to be used, if it is as it was written.

    Sizes of all files are compared, and the checksums of those without sums of their blocks: of the
    small files, and in checkpoints of earlier versions of all. Blocks of tensors are compared while
    they are read. progress: see `problems_of`. Raises InputError for what is damaged.
    """
    files = listed_files(checkpoint) or []
    whole = [listed for listed in files if not listed.blocks]
    problems = _wrong_files(checkpoint, files) or _compare(checkpoint, whole, progress)
    refuse(checkpoint, problems)
    return read_index(checkpoint)


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a job goes on from, if any, and what is wrong with better ones."""

    checkpoint: Path | None = None
    damaged: Mapping[Path, Sequence[str]] = field(default_factory=dict)


def choose(
    candidates: Iterable[Path], problems: Callable[[Path], Sequence[str]] = problems_of
) -> Choice:
    """The first candidate without problems. Raises InputError if there is none but bad ones."""
    damaged: dict[Path, Sequence[str]] = {}
    for checkpoint in candidates:
        found = problems(checkpoint)
        if not found:
            return Choice(checkpoint, damaged)
        damaged[checkpoint] = found
    if damaged:
        raise InputError(
            "\n".join(f"{path} is damaged: {'; '.join(why)}" for path, why in damaged.items())
            + "\nno checkpoint is left to go on from: copy one again, or start another run"
        )
    return Choice()


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
