"""A small binary file of columns that is read by mapping it: an index's only form on disk.

    magic, version, bytes of the header, its CRC-32     little-endian, 24 bytes
    the header, JSON: facts and where each column is
    the columns, each in the narrowest dtype that holds it, from a multiple of 64 bytes

A column of equal steps (a constant, or 0, 1, 2, ...) is in the header alone.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC, _VERSION = b"MIMOCOLS", 1
_PREFIX = struct.Struct("<8sIII4x")
_ALIGNMENT = 64
_MAX_HEADER = 2**20  # bytes, so that a damaged file does not take memory
_MAX_NUMBER = 2**53  # numbers in a header are floats

DTYPES = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<i8", "<f8"))
BYTES = 0  # the dtype of texts
STEPS = len(DTYPES)  # the dtype of a column that is not stored: first, first + step, ...
WIDTHS = np.array([dtype.itemsize for dtype in DTYPES] + [0])
SPEC = np.dtype(
    [
        ("dtype", "u1"),  # into DTYPES, or STEPS
        ("crc", "<u4"),  # of what is stored
        ("offset", "<i8"),  # byte in the file
        ("count", "<i8"),
        ("first", "<f8"),
        ("step", "<f8"),
    ]
)


class DamagedFileError(ValueError):
    """A file that is not what it should be; the text says which, and why."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(
            f"the index file {path} is damaged or of another version ({reason}); delete it, and "
            "the next run builds it again"
        )
        self._given = str(path), reason

    def __reduce__(self) -> tuple[Any, ...]:
        return DamagedFileError, self._given


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
        if values.dtype.kind != "f" and values.dtype != np.uint8:
            values = values.astype(np.int64, copy=False)
        steps = _steps(values)
        if steps is not None:
            specs[name] = [STEPS, 0, 0, len(values), *steps]
            continue
        values = _narrowed(values)
        specs[name] = [DTYPES.index(values.dtype), zlib.crc32(values), size, len(values), 0, 0]
        stored.append((size, values))
        size = _aligned(size + values.nbytes)
    header = json.dumps({"facts": facts, "size": size, "columns": specs}).encode()
    assert len(header) <= _MAX_HEADER, f"{len(header)} bytes of facts and column names"
    start = _aligned(_PREFIX.size + len(header))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(_PREFIX.pack(_MAGIC, _VERSION, len(header), zlib.crc32(header)) + header)
        for offset, values in stored:
            file.seek(start + offset)
            file.write(values)
        file.truncate(start + size)
        file.flush()
        os.fsync(file.fileno())  # else the new name might outlive a crash, and what it names not


def _steps(values: np.ndarray) -> tuple[float, float] | None:
    """(first, step) of a column of equal steps. Bytes and varying floats have none."""
    assert values.ndim == 1, "columns have one dimension"
    if values.dtype == np.uint8:
        return None
    if len(values) < 2:
        return (float(values[0]) if len(values) else 0.0), 0.0
    step = values[1] - values[0]
    if (values.dtype.kind == "f" and step != 0) or np.any(np.diff(values) != step):
        return None
    return float(values[0]), float(step)


def _narrowed(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, DTYPES[-1])
    low, high = int(values.min()), int(values.max())
    assert low >= 0, f"{low}: columns of integers begin at 0"
    fits = [dtype for dtype in DTYPES[:-1] if high <= np.iinfo(dtype).max]
    return np.ascontiguousarray(values, fits[0])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write instead of `path`, which it becomes at the end; removed on failure."""
    # Ranks on other machines may share the disk, so a process id would not be unique.
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------ reading


class ColumnFile:
    """A mapped file, its header checked: every column lies inside it.

    facts: as written. specs: (SPEC) by column. head_crc: of everything before the columns.
    Raises OSError if there is none, DamagedFileError. Takes little memory, whatever is in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = map_file(path)
        try:
            self.head_size, header = _header(self.bytes)
            self.facts = dict(header["facts"])
            self.specs = {
                name: _spec(values, self.head_size, len(self.bytes))
                for name, values in header["columns"].items()
            }
            if self.head_size + header["size"] != len(self.bytes):
                raise ValueError(f"it has {len(self.bytes)} bytes")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedFileError(path, str(error)) from error
        self.head_crc = zlib.crc32(self.bytes[: self.head_size])

    def check(self) -> None:
        """Read everything once. Raises DamagedFileError."""
        for name, spec in self.specs.items():
            if spec["dtype"] != STEPS and zlib.crc32(stored(self.bytes, spec)) != spec["crc"]:
                raise DamagedFileError(self.path, f"the checksum of {name} differs")

    def values(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Entries [start, stop) of a column."""
        spec = self.specs[name]
        numbers = range(int(spec["count"]))[start:stop]
        if spec["dtype"] != STEPS:
            return stored(self.bytes, spec)[numbers.start : numbers.stop]
        return spec["first"] + spec["step"] * np.arange(numbers.start, numbers.stop)


def stored(data: np.ndarray, spec: np.void) -> np.ndarray:
    """The column that a checked spec describes, as it is in a mapped file."""
    dtype = DTYPES[spec["dtype"]]
    start = int(spec["offset"])
    return data[start : start + int(spec["count"]) * dtype.itemsize].view(dtype)


def _header(data: np.ndarray) -> tuple[int, dict[str, Any]]:
    if len(data) < _PREFIX.size:
        raise ValueError("it is too short")
    magic, version, size, crc = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    if size > min(_MAX_HEADER, len(data) - _PREFIX.size):
        raise ValueError(f"a header of {size} bytes")
    header = data[_PREFIX.size : _PREFIX.size + size].tobytes()
    if zlib.crc32(header) != crc:
        raise ValueError("the checksum of its header differs")
    return _aligned(_PREFIX.size + size), json.loads(header)


def _spec(values: list[Any], start: int, size: int) -> np.void:
    dtype, crc, offset, count, first, step = values
    whole = (dtype, crc, offset, count)
    if not all(type(value) is int and 0 <= value < _MAX_NUMBER for value in whole):
        raise ValueError(f"a column is described by {values}")
    if dtype > STEPS or not all(abs(value) < _MAX_NUMBER for value in (first, step)):
        raise ValueError(f"a column is described by {values}")
    if offset % _ALIGNMENT or start + offset + count * int(WIDTHS[dtype]) > size:
        raise ValueError("a column ends after the file")
    return np.array([(dtype, crc, start + offset, count, first, step)], SPEC)[0]


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping:
    """A file's bytes in memory, for as long as an array of them lives."""

    def __init__(self, path: Path) -> None:
        # Python's mmap keeps the file open. Thousands of shards would exceed the limit of open
        # files, which is 1,024 on many machines.
        self.size = 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise DamagedFileError(path, "it is empty")
            address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")
        self.address, self.size = address, size
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),
        }

    def __del__(self) -> None:
        if self.size:
            _LIBC.munmap(self.address, self.size)


def map_file(path: Path) -> np.ndarray:
    """uint8 (bytes,), read-only: a file. Raises OSError, and DamagedFileError for an empty one."""
    return np.asarray(_Mapping(path))
