"""Files of a checkpoint and their manifest."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from mimo.errors import InputError, StartError

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


MANIFEST = "manifest.json"
FORMAT = "mimo checkpoint 1"
BLOCK_BYTES = 1 << 18
"""Bytes of a block: few beside what a rank reads at a time, and 8 digits in the manifest."""
_MOST_BLOCK_BYTES = 1 << 26  # that a manifest may claim: a reader holds one block
_DIGEST_BYTES = 4
_KEYS = {"format", "files", "blocks", "crc32"}
_NAME = re.compile(r"(?!\.{1,2}(/|$))[^/\x00]{1,255}(/(?!\.{1,2}(/|$))[^/\x00]{1,255}){0,3}")
_SUM = re.compile(r"[0-9a-f]{8}")
_CHUNK_BYTES = 1 << 22


# ------------------------------------------------------------------------------- writing


class Summing:
    """Size and checksums of a file, from its bytes as they are written."""

    def __init__(self) -> None:
        self.num_bytes, self._crc, self._ends = 0, 0, bytearray()

    def add(self, chunk: bytes | memoryview) -> None:
        """Go on with the next bytes of the file, however many."""
        left = memoryview(chunk)
        while left:
            part = left[: BLOCK_BYTES - self.num_bytes % BLOCK_BYTES]
            self._crc = crc32(part, self._crc)
            self.num_bytes += len(part)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._ends += self._crc.to_bytes(_DIGEST_BYTES)
            left = left[len(part) :]

    def sum(self) -> Sum:
        """The sum of all bytes so far, as those of the whole file."""
        last = self._crc.to_bytes(_DIGEST_BYTES) if self.num_bytes % BLOCK_BYTES else b""
        return Sum(self.num_bytes, f"{self._crc:08x}", (self._ends + last).hex())


def write_manifest(folder: Path, files: Mapping[str, Sum]) -> None:
    """Write the manifest of files by name; it is on disk on return."""
    document = {
        "format": FORMAT,
        "files": {name: {"bytes": one.bytes, "crc32": one.crc32} for name, one in files.items()},
        "blocks": {
            "bytes": BLOCK_BYTES,
            "files": {name: one.blocks for name, one in files.items() if one.blocks},
        },
    }
    document["crc32"] = _own_sum(document)
    write_synced(folder / MANIFEST, json.dumps(document, indent=1))


def _own_sum(document: object) -> str:
    """The checksum of the manifest itself, whatever its spaces."""
    return f"{crc32(json.dumps(document).encode()):08x}"


# ------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Listed:
    """A file of a checkpoint as the manifest has it.

    name: relative to the checkpoint. crc32: None for a checkpoint without a manifest. blocks: 4
    bytes for each block of ``block_bytes``, the CRC-32 of the file up to its end; empty if unknown.
    """

    name: str
    num_bytes: int
    crc32: int | None
    blocks: bytes = b""
    block_bytes: int = BLOCK_BYTES

    def is_intact(self, block: int, content: memoryview) -> bool:
        """Whether the bytes of a block are those that were written, as far as this is known."""
        begin = block * _DIGEST_BYTES
        before = self.blocks[max(begin - _DIGEST_BYTES, 0) : begin]
        after = self.blocks[begin : begin + _DIGEST_BYTES]
        return not after or crc32(content, int.from_bytes(before)) == int.from_bytes(after)


def listed_files(checkpoint: Path) -> list[Listed] | None:
    """All files that the manifest lists; None without a manifest. Raises InputError."""
    path = checkpoint / MANIFEST
    try:
        document = read_document(path)
        if document["format"] != FORMAT:
            raise ValueError(f"format {str(document['format'])[:80]!r}, known is {FORMAT!r}")
        if unknown := document.keys() - _KEYS:
            raise ValueError(f"unknown key {min(unknown)[:80]!r}")
        if "blocks" not in document:  # of an earlier version
            return [_listed(name, **entry) for name, entry in document["files"].items()]
        if document.pop("crc32") != _own_sum(document):
            raise ValueError("its own checksum differs")
        block_bytes, ends = document["blocks"]["bytes"], document["blocks"]["files"]
        if type(block_bytes) is not int or not 0 < block_bytes <= _MOST_BLOCK_BYTES:
            raise ValueError(f"blocks of {str(block_bytes)[:80]} bytes")
        return [
            _listed(name, **entry, ends=bytes.fromhex(ends.get(name, "")), block_bytes=block_bytes)
            for name, entry in document["files"].items()
        ]
    except FileNotFoundError:
        return None
    except Unreadable:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _listed(
    name: str, bytes: int, crc32: str, ends: bytes = b"", block_bytes: int = BLOCK_BYTES
) -> Listed:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a valid file name")
    if type(bytes) is not int or bytes < 0 or not _SUM.fullmatch(crc32):
        raise ValueError(f"{name[:80]!r} has no size and checksum")
    if ends and len(ends) != -(-bytes // block_bytes) * _DIGEST_BYTES:
        raise ValueError(f"{name[:80]!r} has {len(ends) // _DIGEST_BYTES} checksums of blocks")
    return Listed(name, bytes, int(crc32, 16), ends, block_bytes)


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
                    found = crc32(buffer[:count], found)
                    advance(count)
        except OSError as error:
            problems.append(f"{listed.name} cannot be read: {error}")
            continue
        if found != listed.crc32:
            problems.append(f"{listed.name} has checksum {found:08x}, not {listed.crc32:08x}")
    return problems


def refuse(checkpoint: Path, problems: Sequence[str]) -> None:
    """Raise InputError if there are any."""
    if problems:
        raise InputError(
            f"{checkpoint} is damaged: {'; '.join(problems)}; copy it again, or give another"
        )
