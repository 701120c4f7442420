"""The index file of a shard, and the catalog of a source."""

import ctypes
import hashlib
import json
import mmap
import os
import struct
import uuid
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.index.shards import Shard

_MAGIC, _VERSION = b"MIMOCOLS", 1
_PREFIX = struct.Struct("<8sIII4x")
_ALIGNMENT = 64

_DTYPES = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<i8", "<f8"))
STEPS = len(_DTYPES)  # the dtype of a column that is not stored: first, first + step, ...
SPEC = np.dtype(
    [
        ("dtype", "u1"),  # into _DTYPES, or STEPS
        ("crc", "<u4"),  # of what is stored
        ("offset", "<i8"),  # byte in the file
        ("count", "<i8"),
        ("first", "<f8"),
        ("step", "<f8"),
    ]
)


class DamagedFileError(ValueError):
    """An index file is damaged; the text names it and the reason."""


def damaged(path: str | Path, reason: str) -> DamagedFileError:
    """Return the error to raise."""
    return DamagedFileError(
        f"the index file {path} is damaged or of another version ({reason}); delete it, and "
        "the next run builds it again"
    )


# ------------------------------------------------------------------------------ writing


def write_columns(path: Path, facts: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
    """Write or atomically replace a file; its folder is created.

    facts: as JSON. columns: one-dimensional, of integers >= 0 or of floats; uint8 is stored as it
    is. Raises OSError.
    """
    specs: dict[str, list[float]] = {}
    stored: list[tuple[int, np.ndarray]] = []
    size = 0
    for name, values in columns.items():
        if (steps := _steps(values)) is not None:
            specs[name] = [STEPS, 0, 0, len(values), *steps]
            continue
        values = _narrowed(values)
        specs[name] = [_DTYPES.index(values.dtype), zlib.crc32(values), size, len(values), 0, 0]
        stored.append((size, values))
        size = _aligned(size + values.nbytes)
    header = json.dumps({"facts": facts, "size": size, "columns": specs}).encode()
    start = _aligned(_PREFIX.size + len(header))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks on other machines may share the disk, so a process id would not be unique.
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_PREFIX.pack(_MAGIC, _VERSION, len(header), zlib.crc32(header)) + header)
            for offset, values in stored:
                file.seek(start + offset)
                file.write(values)
            file.truncate(start + size)
            file.flush()
            os.fsync(file.fileno())  # else the name might outlive a crash, and what it names not
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _steps(values: np.ndarray) -> tuple[float, float] | None:
    """(first, step) of a column of equal steps. Bytes and varying floats have none."""
    if values.dtype == np.uint8:
        return None
    if len(values) < 2:
        return (float(values[0]) if len(values) else 0.0), 0.0
    step = float(values[1]) - float(values[0])
    if (values.dtype.kind == "f" and step != 0) or np.any(np.diff(values) != step):
        return None
    return float(values[0]), step


def _narrowed(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, _DTYPES[-1])
    low, high = values.min(initial=0), values.max(initial=0)
    assert low >= 0, f"{low}: columns of integers begin at 0"
    fits = (dtype for dtype in _DTYPES[:-1] if high <= np.iinfo(dtype).max)
    return np.ascontiguousarray(values, next(fits))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# ------------------------------------------------------------------------------ reading


class ColumnFile:
    """A mapped file, its header and size checked.

    facts: as written. specs: (SPEC) by column. head_crc: of everything before the columns.
    Raises OSError if there is none, DamagedFileError.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, map_file(path)
        prefix = self.bytes[: _PREFIX.size].tobytes().ljust(_PREFIX.size, b"\0")
        magic, version, size, crc = _PREFIX.unpack(prefix)
        text = self.bytes[_PREFIX.size : _PREFIX.size + size].tobytes()
        if (magic, version, crc) != (_MAGIC, _VERSION, zlib.crc32(text)):
            raise damaged(path, "it begins otherwise, or the checksum of its header differs")
        header = json.loads(text)
        self.head_size = _aligned(_PREFIX.size + size)
        if self.head_size + header["size"] != len(self.bytes):
            raise damaged(path, f"it has {len(self.bytes)} bytes")
        self.head_crc = zlib.crc32(self.bytes[: self.head_size])
        self.facts: dict[str, Any] = header["facts"]
        self.specs: dict[str, np.void] = {}
        for name, (dtype, crc, offset, count, *steps) in header["columns"].items():
            spec = (dtype, crc, self.head_size + offset, count, *steps)
            self.specs[name] = np.array([spec], SPEC)[0]

    def check(self) -> None:
        """Read everything once. Raises DamagedFileError."""
        for name, spec in self.specs.items():
            if spec["dtype"] != STEPS and zlib.crc32(stored(self.bytes, spec)) != spec["crc"]:
                raise damaged(self.path, f"the checksum of {name} differs")

    def values(self, name: str) -> np.ndarray:
        spec = self.specs[name]
        if spec["dtype"] != STEPS:
            return stored(self.bytes, spec)
        return spec["first"] + spec["step"] * np.arange(spec["count"])


def stored(data: np.ndarray, spec: np.void) -> np.ndarray:
    """Return the column that a spec describes, from a mapped file."""
    dtype = _DTYPES[spec["dtype"]]
    start = int(spec["offset"])
    return data[start : start + int(spec["count"]) * dtype.itemsize].view(dtype)


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(path: Path) -> np.ndarray:
    """Map a file read-only: uint8 (bytes,). Raises OSError; DamagedFileError for an empty one."""
    # Python's mmap keeps the file open. Thousands of shards would exceed the limit of open files,
    # which is 1,024 on many machines.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise damaged(path, "it is empty")
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")
    buffer = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(buffer, _LIBC.munmap, address, size).atexit = False
    mapped = np.frombuffer(buffer, np.uint8)
    mapped.flags.writeable = False
    return mapped


COLUMNS = {  # what it has an entry for
    "json_offset": "samples",  # byte in the shard
    "json_size": "samples",  # bytes
    "token_length": "samples",  # items expanded
    "loss_tokens": "samples",
    "unknown_tokens": "samples",  # that stand for text which the tokenizer does not know
    "item_start": "samples",  # first item
    "key_end": "samples",  # byte in keys
    "item_media": "items",  # into the modalities, sorted by name
    "item_number": "items",  # among the items of its part
    "item_file": "items",  # first file of its part
    "item_frames": "items",  # files of its part
    "item_fps": "items",  # frames per second
    "item_size_0": "items",  # of each file of its part: the first number of its Size
    "item_size_1": "items",  # the second
    "item_rows": "items",  # see EncodedSample
    "item_placeholder": "items",  # token of the first row inside its sample's tokens
    "item_cost": "items",  # see PartPlan.cost
    "file_offset": "files",  # byte in the shard
    "file_size": "files",  # bytes
    "keys": "bytes",  # all keys, one after another
    "skipped": "bytes",  # JSON: [key, reason] of each sample that cannot be used
}
NAMES = tuple(COLUMNS)

_COUNTS = (
    *("samples", "items", "files", "skipped", "most_tokens", "most_rows"),
    *("text_tokens", "unknown_tokens"),
)
ENTRY = np.dtype(  # all that a catalog knows of a shard's index
    [
        *((name, "<i8") for name in (*_COUNTS, "file_size", "file_time", "head_size")),
        ("head_crc", "<u4"),
        ("columns", SPEC, (len(NAMES),)),
    ]
)


def write_shard_index(
    path: Path,
    settings: str,
    shard: Shard,
    columns: Mapping[str, np.ndarray],
    skipped: Sequence[tuple[str, str]],
    text_tokens: int,
) -> None:
    """Write the index of a shard.

    skipped: keys and reasons. columns: all others of COLUMNS. text_tokens: tokens that do not stand
    for items.
    """
    starts, rows = columns["item_start"], columns["item_rows"]
    before = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
    rows = np.diff(before[np.append(starts, len(rows))])
    facts = {
        "settings": settings,
        "shard_size": shard.size,
        "shard_version": shard.version,
        "samples": len(starts),
        "items": len(columns["item_rows"]),
        "files": len(columns["file_size"]),
        "skipped": len(skipped),
        "most_tokens": int(columns["token_length"].max(initial=0)),
        "most_rows": int(rows.max(initial=0)),
        "text_tokens": text_tokens,
        "unknown_tokens": int(columns["unknown_tokens"].sum()),
    }
    text = json.dumps(skipped).encode() if skipped else b""
    columns = {**columns, "skipped": np.frombuffer(text, np.uint8)}
    write_columns(path, facts, {name: columns[name] for name in NAMES})


def read_entry(path: Path, settings: str, shard: Shard) -> np.void | None:
    """Return a shard's ENTRY, None for another version. Raises OSError or DamagedFileError."""
    file = ColumnFile(path)
    facts = file.facts
    made_of = (facts["settings"], facts["shard_size"], facts["shard_version"])
    if made_of != (settings, shard.size, shard.version):
        return None
    file.check()
    entry = np.zeros(1, ENTRY)[0]
    for name in _COUNTS:
        entry[name] = facts[name]
    for number, name in enumerate(NAMES):
        entry["columns"][number] = file.specs[name]
    entry["file_size"], entry["file_time"] = len(file.bytes), path.stat().st_mtime_ns
    entry["head_size"], entry["head_crc"] = file.head_size, file.head_crc
    return entry


@dataclass(frozen=True)
class Catalog:
    """The summary of a source, read without opening the files of its shards."""

    path: Path  # the shards' files are beside it
    root: str  # folder of the shards
    settings: str  # fingerprint
    media: tuple[str, ...]  # sorted names of modalities
    names: tuple[str, ...]  # of the shards, inside the root
    sizes: tuple[int, ...]  # of the shards
    versions: tuple[str, ...]
    entries: np.ndarray  # (S,) ENTRY, of their index files

    @classmethod
    def read(cls, path: Path, root: str) -> Self:
        """Read a catalog. Raises OSError, DamagedFileError."""
        file = ColumnFile(path)
        file.check()
        names, sizes, versions = map(tuple, json.loads(file.values("shards").tobytes()))
        if any(os.path.isabs(name) or ".." in name.split("/") for name in names):
            raise damaged(path, "it names files of other folders")
        media, entries = tuple(file.facts["media"]), file.values("entries").view(ENTRY)
        return cls(path, root, file.facts["settings"], media, names, sizes, versions, entries)

    def write(self) -> None:
        """Write or atomically replace the catalog. Raises OSError."""
        text = json.dumps([self.names, self.sizes, self.versions]).encode()
        facts = {"settings": self.settings, "media": self.media}
        columns = {
            "shards": np.frombuffer(text, np.uint8),
            "entries": np.ascontiguousarray(self.entries).view(np.uint8),
        }
        write_columns(self.path, facts, columns)

    @cached_property
    def shards(self) -> tuple[str, ...]:
        return tuple(os.path.join(self.root, name) for name in self.names)

    @cached_property
    def identity(self) -> str:
        """Hex digest of the contents of its index files, wherever they are."""
        facts = (self.settings, self.names, self.sizes, self.versions)
        heads = self.entries["head_crc"].tobytes()
        return hashlib.sha256(repr(facts).encode() + heads).hexdigest()[:32]

    def file(self, shard: int) -> Path:
        return index_file(self.path.parent, self.names[shard])

    def has_shard(self, number: int, shard: Shard) -> bool:
        """Whether a shard and its index file are unchanged."""
        try:
            status = self.file(number).stat()
        except OSError:
            return False
        entry = self.entries[number]
        return (self.sizes[number], self.versions[number]) == (shard.size, shard.version) and (
            (entry["file_size"], entry["file_time"]) == (status.st_size, status.st_mtime_ns)
        )


def index_file(home: Path, name: str) -> Path:
    """The index file of a shard in a folder of indexes."""
    return home / f"{name}.index"
