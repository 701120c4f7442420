"""Whether a checkpoint is as it was written: sizes at once, checksums by whoever has time.

``manifest.json`` lists every file of the folder but itself with its size and CRC-32. Checkpoints of
earlier versions have none; of them only what the index says can be checked.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mimo.checkpoint.files import Unreadable, read_document, reading
from mimo.checkpoint.folder import MANIFEST, MANIFEST_FORMAT, read_progress
from mimo.checkpoint.tensors import read_index
from mimo.errors import InputError

_NAME = re.compile(r"(?!\.{1,2}(/|$))[^/\x00]{1,255}(/(?!\.{1,2}(/|$))[^/\x00]{1,255}){0,3}")
_SUM = re.compile(r"[0-9a-f]{8}")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Listed:
    """A file as the manifest has it. name: relative to the checkpoint."""

    name: str
    num_bytes: int
    crc32: int


def listed_files(checkpoint: Path) -> list[Listed] | None:
    """All files that the manifest lists; None without a manifest. Raises InputError."""
    path = checkpoint / MANIFEST
    try:
        document = read_document(path)
        if document["format"] != MANIFEST_FORMAT:
            raise ValueError(
                f"format {str(document['format'])[:80]!r}, known is {MANIFEST_FORMAT!r}"
            )
        return [_listed(name, **entry) for name, entry in document["files"].items()]
    except FileNotFoundError:
        return None
    except Unreadable:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _listed(name: str, bytes: int, crc32: str) -> Listed:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a valid file name")
    if type(bytes) is not int or bytes < 0 or not _SUM.fullmatch(crc32):
        raise ValueError(f"{name[:80]!r} has no size and checksum")
    return Listed(name, bytes, int(crc32, 16))


def wrong_sizes(checkpoint: Path) -> list[str]:
    """What is wrong as far as names, sizes and small files tell: nothing large is read.

    Raises Unreadable where that cannot be found out.
    """
    problems: list[str] = []
    with reading(checkpoint):
        if not checkpoint.is_dir():
            return ["the folder is missing"]
    try:
        for listed in listed_files(checkpoint) or ():
            size = _size(checkpoint, listed.name)
            if size is None:
                problems.append(f"{listed.name} is missing, or is a link")
            elif size != listed.num_bytes:
                problems.append(f"{listed.name} has {size} bytes, not {listed.num_bytes}")
        if not problems:
            read_progress(checkpoint)
            read_index(checkpoint)
    except Unreadable:
        raise
    except InputError as error:
        problems.append(str(error))
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


def wrong_checksums(
    checkpoint: Path, files: Iterable[Listed], advance: Callable[[int], None]
) -> list[str]:
    """Which of these files have other bytes than were written. All of their bytes are read.

    advance: told of the bytes of each piece that was read. Raises Unreadable.
    """
    problems: list[str] = []
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for listed in files:
        found = 0
        try:
            path = checkpoint / listed.name
            with reading(path), path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    found = zlib.crc32(buffer[:count], found)
                    advance(count)
        except OSError as error:
            problems.append(f"{listed.name} cannot be read: {error}")
            continue
        if found != listed.crc32:
            problems.append(f"{listed.name} has checksum {found:08x}, not {listed.crc32:08x}")
    return problems


def dealt(files: Sequence[Listed], count: int) -> list[list[Listed]]:
    """The files dealt to so many readers, about as many bytes to each."""
    found: list[list[Listed]] = [[] for _ in range(count)]
    loads = [0] * count
    for listed in sorted(files, key=lambda one: (-one.num_bytes, one.name)):
        least = loads.index(min(loads))
        found[least].append(listed)
        loads[least] += listed.num_bytes
    return found


def problems_of(
    checkpoint: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """All that is wrong with a checkpoint; this machine's cores read all of it.

    progress: told of the bytes that are done, and of how many there are.
    """
    if problems := wrong_sizes(checkpoint):
        return problems
    files = listed_files(checkpoint) or []
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


def refuse(checkpoint: Path, problems: Sequence[str]) -> None:
    """Raise InputError if there are any."""
    if problems:
        raise InputError(
            f"{checkpoint} is damaged: {'; '.join(problems)}; copy it again, or give another"
        )


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
