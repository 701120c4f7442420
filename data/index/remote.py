"""Shards that have a URL: what they are and ranged reads of them, through fsspec.

Every request is tried a fixed number of times and has a time limit; every answer is checked for its
length. HTTP is asked here, over fsspec's session: its own reads check neither the answered range
nor whether the file is still the same.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import url_to_fs

State = tuple[int, str]
"""Size in bytes and version of a file; the version is empty where none is known."""

_TRIES = 5
_PAUSE_SECONDS = 0.5  # after the first try; twice as long after each further one
_TIMEOUT_SECONDS = 15.0  # of one try, and so long again for every 8 MiB that it asks for
_MANY = 16  # requests under way at the same time
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, ValueError, ImportError)
_RETRIED_STATUS = (408, 425, 429)  # and 500 to 599
_VERSIONS = (
    *("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "mtime"),
    *("modified", "updated", "created"),
)
_SYSTEM = random.SystemRandom()  # forked processes do not wait for equally long


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def check_url(pattern: str) -> None:
    """Raise ValueError for a URL with credentials; the message does not repeat them.

    A URL gets into messages, run folders and index files, so it is no place for them.
    """
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
    """What a shard is now. Raises OSError with the URL; FileNotFoundError if there is none."""
    return _tried(_describe, url)


def read(url: str, offset: int, size: int) -> tuple[bytes, State | None]:
    """Bytes [offset, offset + size), all of them, and what the shard is if the answer says so.

    Raises OSError with the URL when that fails for good, or again and again.
    """
    return _tried(_read, url, offset, size)


def find(patterns: Sequence[str]) -> list[tuple[str, State | None]]:
    """The shards of each pattern, globs expanded; a pattern without any stands there with None.

    Raises OSError with the URL.
    """
    found: list[tuple[str, State | None]] = []
    with ThreadPoolExecutor(_MANY) as pool:
        for pattern, shards in zip(patterns, pool.map(_find, patterns), strict=True):
            found += shards or [(pattern, None)]
    return found


def _find(pattern: str) -> list[tuple[str, State]]:
    if not re.search(r"[*?[]", pattern):
        try:
            return [(pattern, describe(pattern))]
        except FileNotFoundError:
            return []
    return [(url, state or describe(url)) for url, state in _tried(_list, pattern)]


def _list(pattern: str) -> list[tuple[str, State | None]]:
    system, path = url_to_fs(pattern)
    system.invalidate_cache()
    # Most file systems know their files without protocol and host.
    head = f"{pattern.partition('://')[0]}://"
    prefix = pattern.removesuffix(path) if pattern.endswith(path) else head
    return [
        (prefix + name, _state(info) if info.get("size") is not None else None)
        for name, info in _call(system, "glob", 0, path, detail=True).items()
        if info.get("type") != "directory"
    ]


def _describe(url: str) -> State:
    system, path = url_to_fs(url)
    if _is_web(url):
        return _awaited(system, 0, _get(system, url, 0, 1))[1]
    system.invalidate_cache()
    return _state(_call(system, "info", 0, path))


def _read(url: str, offset: int, size: int) -> tuple[bytes, State | None]:
    system, path = url_to_fs(url)
    state, end = None, offset + size
    if _is_web(url):
        data, state = _awaited(system, size, _get(system, url, offset, size))
    else:
        data = _call(system, "cat_file", size, path, start=offset, end=end)
    if len(data) != size and (state is None or end <= state[0]):
        raise ConnectionError(f"{len(data)} bytes came instead of {size}")
    return data, state


async def _get(system: Any, url: str, offset: int, size: int) -> tuple[bytes, State]:
    """One ranged HTTP request: its bytes, fewer at the end of the file, and what the file is."""
    session = await system.set_session()
    options = dict(system.kwargs)
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    headers["Range"] = f"bytes={offset}-{offset + size - 1}"
    async with session.get(system.encode_url(url), headers=headers, **options) as answer:
        status = answer.status
        if status in (404, 410):
            raise FileNotFoundError(f"the server has no such file ({status})")
        if status in (401, 403, 407):
            raise PermissionError(f"the server refuses access ({status})")
        if status in _RETRIED_STATUS or status >= 500:
            raise ConnectionError(f"the server answered {status} {answer.reason}")
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
        version = version.strip('"')
        given = answer.headers.get("Content-Range", "")
        if status == 416 and (past := re.fullmatch(r"bytes \*/(\d+)", given)):
            return b"", (int(past[1]), version)
        if status != 206:
            raise ValueError(
                f"the server answered {status} where 206 is needed: it has to support ranged reads"
            )
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", given)
        total = int(match[3]) if match else 0
        last = min(offset + size, total) - 1
        if not match or (int(match[1]), int(match[2])) != (offset, last):
            raise ConnectionError(f"the server answered {given[:80]!r} to {headers['Range']!r}")
        return await answer.content.readexactly(last + 1 - offset), (total, version)


def _call(system: Any, name: str, size: int, *args: Any, **options: Any) -> Any:
    if isinstance(system, AsyncFileSystem):
        return _awaited(system, size, getattr(system, f"_{name}")(*args, **options))
    return getattr(system, name)(*args, **options)


def _awaited(system: Any, size: int, answer: Coroutine[Any, Any, Any]) -> Any:
    """An answer of so many bytes, from fsspec's loop; it is given up when it takes too long."""
    return sync(system.loop, asyncio.wait_for, answer, _TIMEOUT_SECONDS * (1 + size / 2**23))


def _tried[Answer](request: Callable[..., Answer], url: str, *args: int) -> Answer:
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_SECONDS * 2 ** (number - 1) * _SYSTEM.uniform(0.5, 1.5))
        try:
            return request(url, *args)
        except _PERMANENT as error:
            kind = type(error) if isinstance(error, OSError) else OSError
            raise kind(f"{url}: {_reason(error)}") from None
        except Exception as error:  # of any protocol's package, most of them about connections
            last = _reason(error)
    raise OSError(f"{url}: {last} (tried {_TRIES} times)")


def _reason(error: Exception) -> str:
    """An error in a message; without the query of a URL that a server has redirected to."""
    if isinstance(error, ImportError):
        package = getattr(error.__cause__, "name", None) or str(error)
        return f"a package for this protocol is missing: pip install {package.partition('.')[0]}"
    text = re.sub(r"(\w://)[^/\s@]*@|(\?)[^\s'\")]*", r"\1\2", str(error))
    return text or f"no answer in time ({type(error).__name__})"


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _state(info: dict[str, Any]) -> State:
    version = next((info[key] for key in _VERSIONS if info.get(key) is not None), "")
    # Listings and questions about one file do not always agree on the form.
    version = version.timestamp() if isinstance(version, datetime) else version
    return int(info["size"]), str(version).strip('"')
