"""Blocks of remote shards on a local disk, shared by all processes of a host.

fsspec's `blockcache` is not used: it marks a block as kept before its request has succeeded, knows
no versions of files over HTTP, and its processes overwrite each other's record of blocks.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

Fetch = Callable[[int, int], bytes]
"""offset, size -> exactly these bytes of a shard."""

_BLOCK = 2**21  # bytes: about what arrives in the time that a request takes anyway
_PART = 2**16  # bytes with a checksum, so that a small read checks little; divides a block
_KEPT = 0.9  # share of the limit that stays after shards were removed


def default_cache_directory() -> Path:
    """The folder of caches unless the recipe names one."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "mimo"


class BlockCache:
    """A folder with a sparse file per version of a shard: its bytes, then a CRC-32 per part.

    A part counts as kept when its checksum fits, so writers need no locks. Above ``limit`` bytes,
    the least recently used shards are removed. Safe to use from many threads and processes.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory / "blocks", limit
        self._writable = limit >= 2 * _BLOCK

    def read(self, version: str, shard_size: int, offset: int, size: int, fetch: Fetch) -> bytes:
        """Return bytes [offset, offset + size) of a shard, which has all of them.

        version: names the shard and its version. Raises what `fetch` raises; a folder that cannot
        be written only costs speed, and one warning.
        """
        name = hashlib.sha256(f"{version}\0{shard_size}".encode()).hexdigest()[:32]
        path = self.directory / name
        if (kept := _kept(path, shard_size, offset, size)) is not None:
            return kept
        if not self._writable:
            return fetch(offset, size)
        begin = offset // _BLOCK * _BLOCK
        data = fetch(begin, min(-(-(offset + size) // _BLOCK) * _BLOCK, shard_size) - begin)
        try:
            self._store(path, shard_size, begin, data)
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"the cache of shards in {self.directory} cannot be written ({error}); this "
                "process now reads shards where they are",
                stacklevel=2,
            )
        return data[offset - begin : offset - begin + size]

    def _store(self, path: Path, shard_size: int, begin: int, data: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._make_room(len(data))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for content, place in (
                (data, begin),
                (_checksums(data), shard_size + 4 * (begin // _PART)),
            ):
                if os.pwrite(file, content, place) < len(content):
                    raise OSError("no space is left")
        finally:
            os.close(file)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used shards if ``size`` bytes more exceed the limit."""
        shards = []
        for path in self.directory.rglob("*"):
            with suppress(FileNotFoundError):  # another process has removed it
                status = path.stat()
                shards.append((status.st_atime_ns, 512 * status.st_blocks, path))
        used = sum(num_bytes for _, num_bytes, _ in shards) + size
        if used <= self.limit:
            return
        for _, num_bytes, path in sorted(shards):
            if used <= self.limit * _KEPT:
                break
            if not path.is_dir():
                path.unlink(missing_ok=True)
                used -= num_bytes


def _kept(path: Path, shard_size: int, offset: int, size: int) -> bytes | None:
    """Bytes [offset, offset + size) if their parts are kept and undamaged, else None."""
    first, last = offset // _PART, -(-(offset + size) // _PART)
    begin, end = first * _PART, min(last * _PART, shard_size)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.pread(file, end - begin, begin)
        sums = os.pread(file, 4 * (last - first), shard_size + 4 * first)
        if len(data) < end - begin or _checksums(data) != sums:
            return None
        with suppress(OSError):  # another user's file, or a read-only disk
            os.utime(file, ns=(time.time_ns(), os.fstat(file).st_mtime_ns))
        return data[offset - begin : offset - begin + size]
    except OSError:
        return None
    finally:
        os.close(file)


def _checksums(data: bytes) -> bytes:
    """uint32 per part. No sum is 0, which a hole in the file has."""
    parts = [zlib.crc32(data[first : first + _PART]) or 1 for first in range(0, len(data), _PART)]
    return np.array(parts, "<u4").tobytes()
