"""Single files of a checkpoint: written so that they are on disk, and read whoever wrote them."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from mimo.errors import StartError

_MOST_BYTES = 1 << 32
"""Of a JSON file; an index has some 50 for each piece of a tensor."""


# What a checkpoint is damaged by: a file that is missing, or is a link or a folder.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


class Unreadable(StartError):
    """A file cannot be read for a reason that is not in it: the disk, the network, or rights."""


@dataclass(frozen=True)
class Sum:
    """Size and CRC-32 of a file, as in the manifest: 8 hexadecimal digits.

    blocks: 8 more for each block, the CRC-32 up to its end; only files of tensors have them.
    """

    bytes: int
    crc32: str
    blocks: str = ""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError that does not: those of writing and syncing do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises Unreadable in place of an OSError that says nothing of what was once written."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise
        raise Unreadable(
            f"{path} cannot be read: {os.strerror(error.errno or errno.EIO)}; that need not be "
            f"damage, so nothing was moved: repair the file system or the permissions and start "
            f"again, or move the checkpoint away"
        ) from error


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on disk on return, so that older checkpoints may be deleted."""
    with naming(path), path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_names(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def synced_sum(path: Path) -> Sum:
    """Of a file that may not be on disk yet, and is on return."""
    crc = 0
    with naming(path), path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = crc32(chunk, crc)
        os.fsync(file.fileno())
        return Sum(file.tell(), f"{crc:08x}")


def read_document(path: Path, checksum: int | None = None) -> Any:
    """What a JSON file says, whoever wrote it. Raises ValueError or OSError, or Unreadable.

    checksum: its CRC-32, if it is known.
    """
    with reading(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError("it is a link or not a regular file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        content = path.read_bytes()
    if checksum is not None and (found := crc32(content)) != checksum:
        raise ValueError(f"it has checksum {found:08x}, not {checksum:08x}")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
