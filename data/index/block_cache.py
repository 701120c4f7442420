"""Blocks of remote shards on a local disk, shared by all processes of a host.

Samples are drawn in random order, and shards are large: so blocks of a few MiB are kept, about what
arrives in the time that a request takes anyway. Each is a file named after the shard, its version
and the block, so that a changed shard never gets old bytes. It ends with checksums of its parts;
one that does not fit is fetched again. Blocks appear by renaming, and locks are the kernel's, so no
process needs another one to go on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

Fetch = Callable[[int, int], bytes]
"""offset, size -> all these bytes of a shard."""

_BLOCK = 2**21  # bytes
_PART = 2**16  # bytes of a block with a checksum of their own, so that small reads check little
_LOCK_SECONDS = 60.0  # how long to wait for somebody who fetches or removes blocks
_KEPT = 0.9  # of the limit, when it is passed


def default_cache_directory() -> Path:
    """Where caches live unless the recipe says otherwise."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "mimo"


class BlockCache:
    """Blocks in a folder, of `limit` bytes together; the least recently used go first.

    Safe to use from many threads and processes at once. With a limit of less than two blocks,
    nothing is kept.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory / "blocks", limit
        self._writable = limit >= 2 * _BLOCK

    def read(self, version: str, shard_size: int, offset: int, size: int, fetch: Fetch) -> bytes:
        """Bytes [offset, offset + size) of a shard; all of them lie inside of it.

        version: of the shard, and no other's. Raises what `fetch` raises; trouble with the folder
        only costs speed, and a warning.
        """
        name = hashlib.sha256(f"{version}\0{shard_size}".encode()).hexdigest()[:32]
        parts: dict[int, bytes | None] = {}
        for block in range(offset // _BLOCK, (offset + size - 1) // _BLOCK + 1):
            parts[block] = self._wanted(name, block, shard_size, offset, size)
        missing = [block for block, data in parts.items() if data is None]
        if missing and not self._writable:
            return fetch(offset, size)
        while missing:
            first = missing[0]
            with self._locked(f"lock-{_folder(name, first)}"):
                for block in missing:  # somebody else may have fetched them meanwhile
                    parts[block] = self._wanted(name, block, shard_size, offset, size)
                missing = [block for block in missing if parts[block] is None]
                run = [block for n, block in enumerate(missing) if block == missing[0] + n]
                if run:
                    begin = run[0] * _BLOCK
                    data = fetch(begin, min((run[-1] + 1) * _BLOCK, shard_size) - begin)
                    # The first comes last: whoever waits for it then finds all of them.
                    for n, block in reversed([*enumerate(run)]):
                        own = data[n * _BLOCK : (n + 1) * _BLOCK]
                        self._store(name, block, own)
                        parts[block] = own[slice(*_inside(block, offset, size))]
                missing = missing[len(run) :]
        return b"".join(part for part in parts.values() if part is not None)

    def _wanted(
        self, name: str, block: int, shard_size: int, offset: int, size: int
    ) -> bytes | None:
        """What a kept block has of the bytes asked for; None if it is not there or damaged."""
        length = min(_BLOCK, shard_size - block * _BLOCK)
        begin, end = _inside(block, offset, size)
        end = min(end, length)
        first, last = begin // _PART, -(-end // _PART)
        try:
            file = os.open(self._path(name, block), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(file)
            if status.st_size != length + 4 * -(-length // _PART):
                return None
            data = os.pread(file, min(last * _PART, length) - first * _PART, first * _PART)
            if _checksums(data) != os.pread(file, 4 * (last - first), length + 4 * first):
                return None
            with suppress(OSError):  # somebody else's file, or read-only
                os.utime(file, ns=(time.time_ns(), status.st_mtime_ns))  # for _remove_oldest
            return data[begin - first * _PART : end - first * _PART]
        except OSError:
            return None
        finally:
            os.close(file)

    def _store(self, name: str, block: int, data: bytes) -> None:
        data += _checksums(data)
        path = self._path(name, block)
        temporary = path.with_name(f".{uuid.uuid4().hex}")
        try:
            # The lock is kept until the block is there, so that nobody counts without it.
            with self._locked("used") as file:
                if file is None or not self._writable:
                    return
                path.parent.mkdir(exist_ok=True)
                self._make_room(file, len(data))
                temporary.write_bytes(data)
                os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._writable:
            warnings.warn(
                f"the cache of shards in {self.directory} cannot be written ({error}); from now on "
                "this process reads what is missing there from where the shards are",
                stacklevel=2,
            )
        self._writable = False

    def _make_room(self, file: int, size: int) -> None:
        """Count `size` bytes more, and remove blocks if that is too much.

        file: holds the sum, which may be too large, never too small.
        """
        try:
            used = int(os.pread(file, 32, 0)) + size
        except ValueError:
            used = self.limit + 1
        if used > self.limit:
            used = self._remove_oldest(int(self.limit * _KEPT) - size) + size
        os.pwrite(file, f"{used:<31}\n".encode(), 0)

    def _remove_oldest(self, limit: int) -> int:
        """Remove the least recently used blocks until `limit` bytes are left; how many are."""
        blocks = []
        for path in self.directory.glob("??/*"):
            try:
                status = path.stat()
            except FileNotFoundError:  # the user is emptying the cache
                continue
            # Nobody else writes now, so what was not renamed is of a process that died.
            last_use = 0 if path.name[0] == "." else status.st_atime_ns
            blocks.append((last_use, status.st_size, path))
        left = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks):
            if left <= limit:
                break
            path.unlink(missing_ok=True)
            left -= size
        return left

    @contextmanager
    def _locked(self, name: str) -> Iterator[int | None]:
        """Hold a lock; gives its open file, or None when it cannot be had, or not soon enough."""
        file, locked = -1, False
        until = time.monotonic() + _LOCK_SECONDS
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while not locked and time.monotonic() < until:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                except BlockingIOError:
                    time.sleep(0.005)
        except OSError as error:
            self._give_up(error)
        try:
            yield file if locked else None
        finally:
            if locked:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a fork may have a copy
            if file >= 0:
                os.close(file)

    def _path(self, name: str, block: int) -> Path:
        return self.directory / _folder(name, block) / f"{name}-{block}"


def _folder(name: str, block: int) -> str:
    """One of 256, the same for all processes."""
    return f"{(int(name[:2], 16) + block) % 256:02x}"


def _inside(block: int, offset: int, size: int) -> tuple[int, int]:
    """Which bytes of a block [offset, offset + size) takes, counted from the block's first."""
    begin = block * _BLOCK
    return max(offset - begin, 0), min(offset + size - begin, _BLOCK)


def _checksums(data: bytes) -> bytes:
    parts = [zlib.crc32(data[first : first + _PART]) for first in range(0, len(data), _PART)]
    return np.array(parts, "<u4").tobytes()
