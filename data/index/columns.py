"""A small binary file of columns that is read by mapping it: an index's only form on disk.

    magic, version, bytes of the header, its CRC-32     little-endian, 24 bytes
    the header, JSON: facts and where each column is
    the columns, each in the narrowest dtype that holds it, from a multiple of 64 bytes

A column of equal steps (a constant, or 0, 1, 2, ...) is in the header alone. What is in a file is
trusted once its checksums fit.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import uuid
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
    """A file that is not what it should be; the text says which, and why."""


def damaged(path: str | Path, reason: str) -> DamagedFileError:
    """The error to raise."""
    return DamagedFileError(
        f"the index file {path} is damaged or of another version ({reason}); delete it, and "
        "the next run builds it again"
    )


# ------------------------------------------------------------------------------ writing


def write_columns(path: Path, facts: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
    """Write a file, or replace it at once; its folder is created.

    facts: for JSON. columns: of integers from 0 on or of floats, each one-dimensional; one of uint8
    is stored as it is. Raises OSError.
    """
    specs: dict[str, list[float]] = {}
    stored: list[tuple[int, np.ndarray]] = []
    size = 0
    for name, values in columns.items():
        assert values.ndim == 1, "columns have one dimension"
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
        """The entries of a column."""
        spec = self.specs[name]
        if spec["dtype"] != STEPS:
            return stored(self.bytes, spec)
        return spec["first"] + spec["step"] * np.arange(spec["count"])


def stored(data: np.ndarray, spec: np.void) -> np.ndarray:
    """The column that a spec describes, as it is in a mapped file."""
    dtype = _DTYPES[spec["dtype"]]
    start = int(spec["offset"])
    return data[start : start + int(spec["count"]) * dtype.itemsize].view(dtype)


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(path: Path) -> np.ndarray:
    """uint8 (bytes,), read-only: a file. Raises OSError, and DamagedFileError for an empty one."""
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
