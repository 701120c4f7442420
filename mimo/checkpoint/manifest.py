"""The files of a checkpoint: synced when written, checked when read, listed in a manifest.

``manifest.json`` lists every other file with its size and CRC-32. For files of tensors it also has,
by block of `BLOCK_BYTES`, the CRC-32 of the file up to the end of that block. CRC-32 can continue
from any earlier value, so a block is checked alone, as it is read, from the value before it.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from zlib import crc32

from mimo.errors import InputError, StartError

MANIFEST = "manifest.json"
_FORMAT = "mimo checkpoint 1"
BLOCK_BYTES = 1 << 18  # few beside what a rank reads at a time; 8 digits in the manifest
_CHECKSUM_BYTES = 4
_CHUNK_BYTES = 1 << 22
# A missing file, or a folder in its place, is damage; any other OSError is not.
_DAMAGE_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


class Unreadable(StartError):
    """A file cannot be read because of the disk, the network or its permissions."""


@dataclass(frozen=True)
class Sum:
    """Size and CRC-32 of a file, as in the manifest: 8 hexadecimal digits.

    blocks: 8 more digits for each block, the CRC-32 up to its end. header: a digest of the header,
    which lists the pieces. Both only for files of tensors.
    """

    bytes: int
    crc32: str
    blocks: str = ""
    header: str = ""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that has none, such as those of writing and syncing."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError that is no sign of damage into Unreadable."""
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE_ERRNOS:
            raise
        raise Unreadable(
            f"{path} cannot be read: {os.strerror(error.errno or errno.EIO)}; that need not be "
            f"damage: repair the file system or the permissions, or move the checkpoint away"
        ) from error


def write_synced(path: Path, text: str) -> None:
    """Write or replace a file atomically; its content is on disk on return."""
    partial = path.with_name(f".{path.name}")
    with naming(path), partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_sum(path: Path) -> Sum:
    """Sync a file to disk and return its size and checksum."""
    crc = 0
    with naming(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = crc32(chunk, crc)
        os.fsync(file.fileno())
        return Sum(file.tell(), f"{crc:08x}")


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Turn the errors of a file that is missing or has other content into InputError."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}; copy the checkpoint again") from error


def read_document(path: Path, checksum: int | None = None) -> Any:
    """Return the content of a JSON file; call it in `parsing`. Raises Unreadable."""
    with reading(path):
        content = path.read_bytes()
    if checksum is not None and (actual := crc32(content)) != checksum:
        raise ValueError(f"it has checksum {actual:08x}, not {checksum:08x}")
    return json.loads(content)


# ------------------------------------------------------------------- writing the manifest


class Summing:
    """Size and checksums of a file, computed from its bytes as they are written."""

    def __init__(self) -> None:
        self.num_bytes, self._crc, self._block_ends = 0, 0, bytearray()

    def add(self, chunk: bytes | memoryview) -> None:
        rest = memoryview(chunk)
        while rest:
            part = rest[: BLOCK_BYTES - self.num_bytes % BLOCK_BYTES]
            self._crc = crc32(part, self._crc)
            self.num_bytes += len(part)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._block_ends += self._crc.to_bytes(_CHECKSUM_BYTES)
            rest = rest[len(part) :]

    def sum(self, header: str) -> Sum:
        """Return the sum of the whole file, whose last byte has been added."""
        last = self._crc.to_bytes(_CHECKSUM_BYTES) if self.num_bytes % BLOCK_BYTES else b""
        return Sum(self.num_bytes, f"{self._crc:08x}", (self._block_ends + last).hex(), header)


def write_manifest(folder: Path, files: Mapping[str, Sum]) -> None:
    """Write the manifest of files by name; it is on disk on return."""
    blocks = {name: sum.blocks for name, sum in files.items() if sum.blocks}
    document = {
        "format": _FORMAT,
        "files": {name: {"bytes": sum.bytes, "crc32": sum.crc32} for name, sum in files.items()},
        "blocks": {"bytes": BLOCK_BYTES, "files": blocks},
    }
    document["crc32"] = _manifest_sum(document)
    write_synced(folder / MANIFEST, json.dumps(document, indent=1))


def _manifest_sum(document: object) -> str:
    """Return the checksum of the manifest itself, independent of white space."""
    return f"{crc32(json.dumps(document).encode()):08x}"


# ------------------------------------------------------------------- reading the manifest


@dataclass(frozen=True)
class Listed:
    """A file of a checkpoint as the manifest lists it.

    name: relative to the checkpoint. blocks: 4 bytes for each block of ``block_bytes``, the CRC-32
    of the file up to its end; empty if the file has no tensors.
    """

    name: str
    num_bytes: int
    crc32: int
    blocks: bytes = b""
    block_bytes: int = BLOCK_BYTES

    def is_intact(self, block: int, content: memoryview) -> bool:
        begin = block * _CHECKSUM_BYTES
        before = self.blocks[max(begin - _CHECKSUM_BYTES, 0) : begin]
        after = self.blocks[begin : begin + _CHECKSUM_BYTES]
        return crc32(content, int.from_bytes(before)) == int.from_bytes(after)


def listed_files(checkpoint: Path) -> list[Listed]:
    """Return all files that the manifest lists. Raises InputError."""
    path = checkpoint / MANIFEST
    with parsing(path):
        try:
            document = read_document(path)
        except FileNotFoundError:
            document = {}
        if "blocks" not in document:
            raise InputError(
                f"{path} is missing or without checksums of blocks: the checkpoint is incomplete, "
                f"or an earlier version wrote it; copy it again, or export it with `mimo convert "
                f"to-hf` of that version and start from the folder (init_from)"
            )
        if document["format"] != _FORMAT or document.pop("crc32") != _manifest_sum(document):
            raise ValueError("its format or its own checksum differs")
        blocks = document["blocks"]
        files: list[Listed] = []
        for name, file in document["files"].items():
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts:
                raise ValueError(f"{name[:80]!r} leads out of the folder")
            block_sums = bytes.fromhex(blocks["files"].get(name, ""))
            crc = int(file["crc32"], 16)
            files.append(Listed(name, file["bytes"], crc, block_sums, blocks["bytes"]))
        return files


def wrong_checksums(
    checkpoint: Path, files: Iterable[Listed], advance: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Read these files whole; return a problem for each that has changed. Raises Unreadable."""
    problems: list[str] = []
    for listed in files:
        crc, size, path = 0, 0, checkpoint / listed.name
        try:
            with reading(path), path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    crc = crc32(chunk, crc)
                    size += len(chunk)
                    advance(len(chunk))
        except OSError:
            problems.append(f"{listed.name} is missing")
            continue
        if size != listed.num_bytes:
            problems.append(f"{listed.name} has {size} bytes, not {listed.num_bytes}")
        elif crc != listed.crc32:
            problems.append(f"{listed.name} has checksum {crc:08x}, not {listed.crc32:08x}")
    return problems


def raise_damaged(checkpoint: Path, problems: Sequence[str]) -> None:
    """Raise InputError if there are problems."""
    if problems:
        raise InputError(
            f"{checkpoint} is damaged: {'; '.join(problems)}; copy it again, or give another"
        )
