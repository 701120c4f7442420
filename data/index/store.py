"""Keeping an index on disk, beside the shards it describes, and rebuilding it when it is stale.

A folder holds three parquet files and meta.json. meta.json names the others and is replaced last,
in one step, so a reader sees the old index or the new one, never half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data.index.block_cache import BlockCache, default_cache_directory
from data.index.build import Progress, build_index
from data.index.remote import is_remote
from data.index.samples import (
    FILE_DTYPES,
    INDEX_VERSION,
    ITEM_DTYPES,
    SAMPLE_DTYPES,
    Index,
    Processors,
    SkippedSample,
    index_fingerprint,
    make_index,
)
from data.index.shards import find_shards, pattern_root
from data.text.chat import ChatTokenizer

_META = "meta.json"


def save_index(index: Index, directory: str | Path) -> None:
    """Write an index into a folder, which is created; an index already there is replaced at once.

    Shard paths are kept relative to the folder, so both can be moved together.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    samples = {name: getattr(index, name) for name in SAMPLE_DTYPES}
    samples |= {"item_count": np.diff(index.item_start), "key": index.keys.tolist()}
    tables = {
        "samples": pa.table(samples, schema=_sample_schema(pa)),
        "items": pa.table({name: getattr(index, name) for name in ITEM_DTYPES}),
        "files": pa.table({name: getattr(index, name) for name in FILE_DTYPES}),
    }
    files: dict[str, str] = {}
    for name, table in tables.items():
        files[name] = f"{name}-{index.fingerprint}.parquet"
        with _replacing(directory / files[name]) as temporary:
            pq.write_table(table, str(temporary))
    meta = {
        "version": INDEX_VERSION,
        "fingerprint": index.fingerprint,
        "files": files,
        "media": index.media,
        "shards": [_unresolved(directory, shard) for shard in index.shards],
        "skipped": [[_unresolved(directory, s.shard), s.key, s.reason] for s in index.skipped],
    }
    with _replacing(directory / _META) as temporary:
        temporary.write_text(json.dumps(meta, indent=1), encoding="utf-8")
    for stale in directory.glob("*.parquet"):
        if stale.name not in files.values():
            stale.unlink(missing_ok=True)


def load_index(directory: str | Path) -> Index:
    """Read an index that `save_index` wrote.

    Raises ValueError when the folder has none, or it is damaged or of another version.
    """
    import pyarrow.parquet as pq

    directory = Path(directory).absolute()
    meta = _read_meta(directory)
    try:
        columns: dict[str, np.ndarray] = {}
        tables = {
            name: pq.read_table(str(directory / meta["files"][name]))
            for name in ("samples", "items", "files")
        }
        dtypes = {"samples": SAMPLE_DTYPES, "items": ITEM_DTYPES, "files": FILE_DTYPES}
        for name, table in tables.items():
            columns |= {column: table[column].to_numpy() for column in dtypes[name]}
        samples = tables["samples"]
        return make_index(
            shards=[_resolve(directory, shard) for shard in meta["shards"]],
            media=meta["media"],
            keys=samples["key"].to_pylist(),
            item_counts=samples["item_count"].to_numpy(),
            columns=columns,
            skipped=[
                SkippedSample(_resolve(directory, shard), key, reason)
                for shard, key, reason in meta["skipped"]
            ],
            fingerprint=meta["fingerprint"],
        )
    except (OSError, KeyError, TypeError, ValueError) as error:  # pyarrow's errors are among these
        raise _unreadable(directory, error) from error


def load_or_build_index(
    pattern: str,
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
    cache_directory: Path | None = None,
    cache: BlockCache | None = None,
) -> Index:
    """The index of the shards that `pattern` names: loaded if it is current, else built and stored.

    It lives in `index_directory(pattern)`. Where that cannot be written, it is built in memory each
    time, with a warning.

    Raises ValueError as `build_index` does, and when a shard of the stored index is missing.
    """
    directory = index_directory(pattern, cache_directory)
    try:
        meta = _read_meta(directory)
    except ValueError:
        meta = None  # none yet, or unreadable: build
    if meta is not None:
        paths = [_resolve(directory, shard) for shard in meta["shards"]]
        root = pattern_root(pattern)
        root = root if is_remote(root) else os.path.abspath(root)
        if not all(Path(path).is_relative_to(root) for path in paths):
            paths, meta = [], None  # not an index of this pattern, whoever wrote it: build
        missing = [path for path in paths if not is_remote(path) and not os.path.isfile(path)]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(
                f"shards of the index {directory} are missing: {', '.join(missing[:3])}{more}; put "
                "them back, or delete that folder to go on with the shards that are left"
            )
        expected = index_fingerprint(pattern, find_shards(pattern), chat, processors)
        if meta is not None and meta["fingerprint"] == expected:
            try:
                return load_index(directory)
            except ValueError:
                pass  # a damaged file: build again
    index = build_index(pattern, chat, processors, progress, cache)
    try:
        save_index(index, directory)
    except OSError as error:
        warnings.warn(
            f"the index of {pattern!r} cannot be stored in {directory} ({error}); it is built "
            "again every time",
            stacklevel=2,
        )
    return index


def index_directory(pattern: str, cache_directory: Path | None = None) -> Path:
    """Where the index of a pattern lives: `<folder>/.index/<pattern as a file name>`.

    That of a URL is in the cache folder (None: the user's).
    """
    root = pattern_root(pattern)
    rest = os.path.relpath(pattern, root)
    # "*" and "?" get letters of their own, so that patterns that differ do so after the rest is
    # cleaned.
    slug = rest.replace("*", "_all").replace("?", "_any")
    home = Path(root) / ".index"
    if is_remote(root):
        digest = hashlib.sha256(root.encode()).hexdigest()[:16]
        home = (cache_directory or default_cache_directory()) / "index" / digest
    return (home / re.sub(r"[^A-Za-z0-9._-]", "_", slug)).absolute()


def _read_meta(directory: Path) -> dict[str, Any]:
    try:
        meta = json.loads((directory / _META).read_text(encoding="utf-8"))
        if meta["version"] != INDEX_VERSION:
            raise ValueError(
                f"it has version {meta['version']}, this program writes {INDEX_VERSION}"
            )
        if not isinstance(meta["fingerprint"], str) or not all(
            isinstance(s, str) for s in meta["shards"]
        ):
            raise ValueError("fingerprint or shards are malformed")
        if not all(re.fullmatch(r"\w+-\w+\.parquet", name) for name in meta["files"].values()):
            raise ValueError("it names files of other folders")
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable(directory, error) from error
    return meta


def _unreadable(directory: Path, error: Exception) -> ValueError:
    return ValueError(
        f"no usable index in {directory} ({error}): delete the folder and build it again"
    )


def _resolve(directory: Path, shard: str) -> str:
    return shard if is_remote(shard) else os.path.normpath(directory / shard)


def _unresolved(directory: Path, shard: str) -> str:
    return shard if is_remote(shard) else os.path.relpath(shard, directory)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write instead of `path`, which it becomes at the end; removed on failure."""
    # Ranks on other machines may share the disk, so a process id would not be unique.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sample_schema(pa: Any) -> Any:
    # Named types: an empty list of keys would otherwise become a column of nulls.
    numbers = [(name, pa.from_numpy_dtype(dtype)) for name, dtype in SAMPLE_DTYPES.items()]
    return pa.schema([*numbers, ("item_count", pa.int64()), ("key", pa.string())])
