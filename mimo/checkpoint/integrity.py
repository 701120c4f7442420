"""Whether a checkpoint is as it was written: of all of it, or of what a reader is about to use.

Checkpoints of earlier versions may have no manifest; of them only what the index says is checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mimo.checkpoint.files import Unreadable, reading
from mimo.checkpoint.folder import read_progress
from mimo.checkpoint.manifest import Listed, listed_files, refuse, wrong_checksums
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.errors import InputError


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
