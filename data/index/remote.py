"""Shards that have a URL: what they are, and ranged reads of them, through fsspec.

Every request is tried a fixed number of times and has a time limit; the length of every answer is
checked. Messages name the URL and repeat no credentials.

Blocks of shards are kept on a local disk, shared by all processes of a host. fsspec's caches have
no limit in bytes; `filecache` takes whole shards, and processes of `blockcache` overwrite each
other's record of blocks.
"""

import hashlib
import os
import random
import re
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

State = tuple[int, str]
"""Size in bytes and version of a file; the version is empty where none is known."""

_TRIES = 5
_PAUSE_SECONDS = 0.5  # after the first try; doubled after each further one
_TIMEOUT_SECONDS = 15.0  # of one try, and as long again for every 8 MiB that it asks for
_MANY = 16  # requests under way at the same time
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, ValueError, ImportError)
_RETRIED_STATUS = (408, 425, 429)  # and 500 to 599
_VERSIONS = (
    *("ETag", "etag", "generation", "md5Hash", "Last-Modified", "LastModified", "last_modified"),
    *("mtime", "modified", "updated", "created"),
)


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def check_url(pattern: str) -> None:
    """Raise ValueError for a URL with credentials; the message does not repeat them."""
    protocol, _, rest = pattern.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    web = protocol in ("http", "https")
    if (at and (web or ":" in user)) or (web and "?" in rest):
        raise ValueError(
            f"a {protocol}:// URL with a user, a password or a query may hold credentials, and "
            "would be copied into run folders and messages: give the URL without, and the "
            "credentials where fsspec looks for them (a file in ~/.config/fsspec, environment "
            "variables such as FSSPEC_HTTP, or what the protocol's package documents)"
        )


def describe(url: str) -> State:
    """Return what a shard is now. Raises OSError with the URL; FileNotFoundError if it is none."""

    def ask() -> State:
        system, path = _file_system(url)
        system.invalidate_cache()
        return _state(system.info(path, **_limit(system, 0)))

    return _retried(url, ask)


def read(url: str, offset: int, size: int) -> bytes:
    """Return bytes [offset, offset + size). Raises OSError with the URL."""

    def ask() -> bytes:
        system, path = _file_system(url)
        data = system.cat_file(path, start=offset, end=offset + size, **_limit(system, size))
        if len(data) > size:
            raise ValueError(f"{len(data)} bytes came instead of {size}: need ranged reads")
        if len(data) < size:
            raise ConnectionError(f"{len(data)} bytes came instead of {size}")
        return data

    return _retried(url, ask)


def find(patterns: Sequence[str]) -> list[tuple[str, State | None]]:
    """Expand globs. None stands for a pattern without any shards. Raises OSError with the URL."""
    shards: list[tuple[str, State | None]] = []
    with ThreadPoolExecutor(_MANY) as pool:
        for pattern, matches in zip(patterns, pool.map(_find, patterns), strict=True):
            shards += matches or [(pattern, None)]
    return shards


def _find(pattern: str) -> list[tuple[str, State]]:
    if not re.search(r"[*?[]", pattern):
        try:
            return [(pattern, describe(pattern))]
        except FileNotFoundError:
            return []
    listed = _retried(pattern, lambda: _list(pattern))
    return [(url, state or describe(url)) for url, state in listed]


def _list(pattern: str) -> list[tuple[str, State | None]]:
    system, path = _file_system(pattern)
    system.invalidate_cache()
    # Most file systems know their files without protocol and host.
    head = f"{pattern.partition('://')[0]}://"
    prefix = pattern.removesuffix(path) if pattern.endswith(path) else head
    return [
        (prefix + name, _state(info) if info.get("size") is not None else None)
        for name, info in system.glob(path, detail=True).items()
        if info.get("type") != "directory"
    ]


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # late: it is slow to import, and most shards are files

    return url_to_fs(url)


def _limit(system: Any, size: int) -> dict[str, Any]:
    """The time limit of a request for ``size`` bytes, as fsspec's asynchronous systems take it."""
    if not system.async_impl:
        return {}
    return {"timeout": _TIMEOUT_SECONDS * (1 + size / 2**23)}


def _retried[Answer](url: str, request: Callable[[], Answer]) -> Answer:
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_SECONDS * 2 ** (number - 1) * random.uniform(0.5, 1.5))
        try:
            return request()
        except Exception as raised:  # any type, from the package of any protocol
            # fsspec's HTTP calls every failure to describe a file a missing file.
            cause = raised.__cause__ if isinstance(raised, FileNotFoundError) else None
            error = cause or raised
            status = getattr(error, "status", None)
            reason = _reason(error)
            if status is None:
                final = isinstance(error, _PERMANENT)
            else:
                final = status < 500 and status not in _RETRIED_STATUS
            if final:
                is_missing = isinstance(error, FileNotFoundError) or status in (404, 410)
                raise (FileNotFoundError if is_missing else OSError)(f"{url}: {reason}") from None
    raise OSError(f"{url}: {reason} (tried {_TRIES} times)")


def _reason(error: BaseException) -> str:
    """Return an error's message without credentials, such as the query of a redirected URL."""
    if isinstance(error, ImportError):
        package = getattr(error.__cause__, "name", None) or str(error)
        return f"a package for this protocol is missing: pip install {package.partition('.')[0]}"
    if (status := getattr(error, "status", None)) is not None:
        return f"the server answered {status} {getattr(error, 'message', '')}".rstrip()
    if isinstance(error, FileNotFoundError):
        return "no such file"
    text = re.sub(r"(\w://)[^/\s@]*@|(\?)[^\s'\")]*", r"\1\2", str(error))
    return text or f"no answer in time ({type(error).__name__})"


def _state(info: dict[str, Any]) -> State:
    version = next((info[key] for key in _VERSIONS if info.get(key) is not None), "")
    # Listings and questions about one file do not always agree on the form.
    version = version.timestamp() if isinstance(version, datetime) else version
    return int(info["size"]), str(version).strip('"')


_BLOCK = 2**21  # bytes: about what arrives in the time that a request takes anyway
_KEPT = 0.9  # share of the limit that stays after blocks were removed
_LOOKS = 100  # scans of the folder while as many bytes as the limit are written


def default_cache_directory() -> Path:
    """The folder of caches unless the recipe names one."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo"


class BlockCache:
    """A folder with a file per block of a shard's version.

    A block gets its name once it is complete, so readers and writers need no locks. Above ``limit``
    bytes, the least recently used blocks are removed. Safe to use from many threads and processes.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory / "blocks", limit
        self._writable = limit >= 2 * _BLOCK

    def read(
        self,
        version: str,
        shard_size: int,
        offset: int,
        size: int,
        fetch: Callable[[int, int], bytes],
    ) -> bytes:
        """Return bytes [offset, offset + size) of a shard, which has all of them.

        version: names the shard and its version. fetch: offset, size -> exactly these bytes; what
        it raises is raised. A folder that cannot be written only costs speed, and one warning.
        """
        name = hashlib.sha256(f"{version}\0{shard_size}".encode()).hexdigest()[:32]
        starts = range(offset // _BLOCK * _BLOCK, offset + size, _BLOCK)
        blocks = {start: self.directory / f"{name}.{start // _BLOCK}" for start in starts}
        kept = b""
        for start, path in blocks.items():
            first, last = max(offset, start), min(offset + size, start + _BLOCK)
            kept += _read_kept(path, min(_BLOCK, shard_size - start), first - start, last - first)
        if len(kept) == size:
            return kept
        if not self._writable:
            return fetch(offset, size)
        begin = starts.start
        data = fetch(begin, min(starts[-1] + _BLOCK, shard_size) - begin)
        try:
            self._make_room(len(data))
            for start, path in blocks.items():
                self._store(path, data[start - begin : start - begin + _BLOCK])
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"the cache of shards in {self.directory} cannot be written ({error}); this "
                "process now reads shards where they are",
                stacklevel=2,
            )
        return data[offset - begin : offset - begin + size]

    def _store(self, path: Path, data: bytes) -> None:
        partial = path.with_name(f".{uuid.uuid4().hex}")
        try:
            partial.write_bytes(data)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used blocks if ``size`` bytes more exceed the limit."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if random.random() * self.limit > _LOOKS * size:  # a scan of many blocks takes long
            return
        blocks = []
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                status = path.stat()
                blocks.append((status.st_mtime_ns, status.st_size, path))
        used = sum(num_bytes for _, num_bytes, _ in blocks) + size
        if used <= self.limit:
            return
        for _, num_bytes, path in sorted(blocks):
            if used <= self.limit * _KEPT:
                break
            path.unlink(missing_ok=True)
            used -= num_bytes


def _read_kept(path: Path, block_size: int, offset: int, size: int) -> bytes:
    """Return bytes of a block; none unless the whole block is kept."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != block_size:
                return b""
            with suppress(PermissionError):  # another user's file
                os.utime(path)
            return os.pread(file.fileno(), size, offset)
    except OSError:
        return b""
