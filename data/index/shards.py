"""Shards: the files that a pattern names, their versions, and reads from them.

Only this file opens shards. A shard is a file of this machine, or has a URL (remote.py).
"""

import glob
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice

from braceexpand import braceexpand

from data.index import remote
from data.index.remote import BlockCache

_MAX_SHARDS = 2**20  # of one pattern
# Between two checks whether an open shard has changed.
_CHECK_FILE_SECONDS, _CHECK_URL_SECONDS = 10.0, 120.0
# Bytes that a stream reads at a time: a request takes as long as 100 KB to 1 MB.
_FILE_PART, _URL_PART = 2**15, 2**20
_PARTS = 4


@dataclass(frozen=True)
class Shard:
    """A file of samples. path: as in messages. size: bytes. version: changes with each write."""

    path: str
    size: int
    version: str


class ShardChangedError(ValueError):
    """A shard differs from its index, so none of its samples can be trusted."""


def find_shards(pattern: str) -> tuple[Shard, ...]:
    """Return the shards that a pattern names, sorted by path.

    pattern: a path or a URL, with wildcards (`*`, `?`, `[...]`, `**`) and braces (`{000..123}`,
    `{a,b}`) or without. A path that exists is taken literally. Raises ValueError when there are
    none, any that braces name is missing, or a URL cannot be used.
    """
    remote.check_url(pattern)
    texts = [pattern] if os.path.isfile(pattern) else braceexpand(pattern, escape=False)
    named = [*islice(texts, _MAX_SHARDS + 1)]
    if len(named) > _MAX_SHARDS:
        raise ValueError(f"{pattern!r} stands for more than {_MAX_SHARDS} shards")
    named = sorted({*named})
    try:
        listed = remote.find(named) if remote.is_remote(pattern) else _find_local(named)
    except OSError as error:
        raise ValueError(f"shards of {pattern!r} cannot be looked up: {error}") from error
    shards = {path: Shard(path, *state) for path, state in listed if state is not None}
    missing = sorted(path for path, state in listed if state is None)
    if not shards or missing:
        what = f"{len(missing)} shards of {pattern!r} are missing: {first_three(missing)}"
        hint = " A web server lists no files: use a brace range such as {000..123}."
        raise ValueError(
            f"{what if shards else f'no shard matches {pattern!r}'}: prepare the data first, or "
            f"correct the path in the recipe."
            f"{hint if pattern.startswith('http') and glob.has_magic(pattern) else ''}"
        )
    return tuple(shards[path] for path in sorted(shards))


def first_three(names: Sequence[str]) -> str:
    """Join the first three names for a message, with the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _find_local(patterns: Sequence[str]) -> list[tuple[str, remote.State | None]]:
    result: list[tuple[str, remote.State | None]] = []
    for pattern in patterns:
        before = len(result)
        paths = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        for path in paths:
            with suppress(FileNotFoundError, NotADirectoryError):
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode):
                    result.append((path, _state(status)))
        if len(result) == before:
            _raise_if_sick(pattern)
            result.append((pattern, None))
    return result


def _raise_if_sick(pattern: str) -> None:
    """Raise OSError for a failing file system, which `glob` takes for an empty one."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
        os.scandir(pattern_root(pattern)).close()
        os.stat(pattern)


def _state(status: os.stat_result) -> remote.State:
    return status.st_size, str(status.st_mtime_ns)


def pattern_root(pattern: str) -> str:
    """Return the folder or URL of a pattern: its longest prefix without wildcards and braces."""
    folder = pattern
    while folder == pattern or glob.has_magic(folder) or "{" in folder:
        folder = folder.rpartition("/")[0]
    if remote.is_remote(pattern) and not remote.is_remote(folder):
        return pattern[: pattern.index("://") + 3]
    return folder or ("/" if pattern.startswith("/") else ".")


class ShardFile:
    """An open shard. Safe to use from several threads, and in a forked process.

    It closes itself with its last reference: another thread may still read a shard that was evicted
    from a cache. cache: keeps blocks of a remote shard. Raises OSError when it cannot be opened,
    ShardChangedError when it differs.
    """

    def __init__(self, shard: Shard, cache: BlockCache | None = None) -> None:
        self._file = -1  # __del__ needs it when open() fails
        self.shard, self.path, self._cache = shard, shard.path, cache
        self._pause, self._check_at = _CHECK_URL_SECONDS, 0.0
        if not remote.is_remote(self.path):
            self._pause = _CHECK_FILE_SECONDS
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._check_now_and_then()

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset`, fewer at the end. Raises OSError, ShardChangedError."""
        self._check_now_and_then()
        size = max(min(size, self.shard.size - offset), 0)
        if not size:
            return b""
        if self._file >= 0:
            data = os.pread(self._file, size, offset)
            while len(data) < size:  # network disks may return less than asked
                more = os.pread(self._file, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        elif self._cache is not None and self.shard.version:
            name = f"{self.path}\0{self.shard.version}"
            fetch = partial(remote.read, self.path)
            data = self._cache.read(name, self.shard.size, offset, size, fetch)
        else:
            data = remote.read(self.path, offset, size)
        if len(data) < size:
            self.check()
        return data

    def check(self) -> None:
        """Raise ShardChangedError if the shard has changed; OSError if that is unknown."""
        now = _state(os.fstat(self._file)) if self._file >= 0 else remote.describe(self.path)
        if now != (self.shard.size, self.shard.version):
            raise ShardChangedError(
                f"the shard {self.path} has changed since it was indexed: it had "
                f"{self.shard.size} bytes (version {self.shard.version or 'unknown'}) and has "
                f"{now[0]} ({now[1] or 'unknown'}); run `mimo data index` on the recipe, then "
                "start again, and leave shards alone while a run reads them"
            )

    def _check_now_and_then(self) -> None:
        # Not for every sample: checking a remote shard is a request.
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + self._pause
        with suppress(OSError):  # after an outage, the read itself fails
            self.check()

    def stream(self) -> "ShardStream":
        return ShardStream(self, _FILE_PART if self._file >= 0 else _URL_PART)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class ShardStream:
    """A shard, or a member, as a file. Caches its last parts, so that headers need no request."""

    def __init__(self, shard: ShardFile, part_size: int) -> None:
        self.begin, self.size, self._position = 0, shard.shard.size, 0
        self._shard = shard
        from fsspec.caching import BlockCache as Parts  # late: fsspec is slow to import

        self._parts = Parts(part_size, lambda a, b: shard.read(a, b - a), self.size, _PARTS)

    def member(self, begin: int, size: int) -> "ShardStream":
        """Return a member as a file that shares the parts of this stream."""
        stream = copy(self)
        stream.begin, stream.size, stream._position = begin, size, 0
        return stream

    def read(self, size: int = -1) -> bytes:
        left = max(self.size - self._position, 0)
        begin = self.begin + self._position
        size = left if size < 0 else min(size, left)
        if size > self._parts.blocksize:
            data = self._shard.read(begin, size)  # large things are read once, by one request
        else:
            data = self._parts._fetch(begin, begin + size)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position
