"""Shards: which files a pattern names, what tells one version of a file from another, reading them.

Nothing else of ours opens a shard.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shard:
    """A file of samples. path: as in messages. size: bytes. version: other when it was written."""

    path: str
    size: int
    version: str


def find_shards(pattern: str) -> tuple[Shard, ...]:
    """The shards that a glob pattern names, sorted by path.

    Raises ValueError when there are none.
    """
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        hint = " Braces are not understood: use * or ?." if "{" in pattern else ""
        raise ValueError(
            f"no shard matches {pattern!r}: prepare the data first, or correct the path in the "
            f"recipe.{hint}"
        )
    return tuple(describe_shard(path) for path in paths)


def describe_shard(path: str) -> Shard:
    """A shard as it is now. Raises OSError."""
    status = os.stat(path)
    return Shard(path, status.st_size, str(status.st_mtime_ns))


def pattern_root(pattern: str) -> Path:
    """The folder of a pattern: its longest leading part without a wildcard."""
    parent = Path(pattern).parent
    while glob.has_magic(str(parent)):
        parent = parent.parent
    return parent


class ShardFile:
    """An open shard. Safe to use from several threads; closes itself once nobody uses it.

    Another thread may still be reading from it when it is pushed out of a cache.
    Raises OSError when it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._file = -1  # so that __del__ works when open() fails
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the end of the file; shares no file position.

        Raises OSError.
        """
        parts: list[bytes] = []
        while size > 0:
            part = os.pread(self._file, size, offset)  # may return less than asked on network disks
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
