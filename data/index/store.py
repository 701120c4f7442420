"""Find the indexes on disk, tell which are current, and open them.

    <folder of the pattern>/.index/<fingerprint of the settings>/<shard>.index
    <folder of the pattern>/.index/<fingerprint of the settings>/<pattern>.catalog

Other settings have other files, and patterns share the files of a shard. Where that folder cannot
be written, a folder of the cache takes its place. Every file is replaced in one step.
"""

import errno
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.index.build import IndexTask, Progress, build_here
from data.index.remote import is_remote
from data.index.samples import Index, Processors, settings_fingerprint
from data.index.shard_index import ENTRY, Catalog, DamagedFileError, index_file, read_entry
from data.index.shards import find_shards, first_three, pattern_root
from data.text.chat import ChatTokenizer

# Why an index cannot be in a folder, whenever it is tried.
_NO_PLACE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENOSPC, errno.EDQUOT),
}

Build = Callable[[Sequence[IndexTask], ChatTokenizer, Processors, Progress | None], None]
"""Indexes shards as `build_here` does."""


@dataclass(frozen=True)
class Survey:
    """The state of a source's index."""

    catalog: Catalog  # of all shards; entries of unindexed shards are undefined
    tasks: tuple[IndexTask, ...]  # the shards that are not indexed yet
    is_written: bool  # whether the catalog is on disk

    def open(self) -> Index:
        """Open the index; write its catalog if needed. Raises ValueError, OSError."""
        if self.tasks:
            named = first_three([task.shard.path for task in self.tasks])
            raise ValueError(
                f"{len(self.tasks)} shards have changed while they were indexed: {named}; wait "
                "until they are written, and start again"
            )
        if not self.is_written:
            self.catalog.write()
        return Index(self.catalog)


def survey(pattern: str, settings: str, media: Sequence[str], home: Path) -> Survey:
    """Compare the shards of a pattern with the indexes in a folder.

    settings: fingerprint. media: names, sorted. Warns of files that need to be built again.
    Raises ValueError when no shard matches, or one of the catalog's is missing.
    """
    root, shards = _absolute_root(pattern), find_shards(pattern)
    names = tuple(_inside(root, shard.path) for shard in shards)
    if outside := [name for name in names if ".." in name.split("/")]:
        raise ValueError(
            f"{pattern!r} names shards outside of {root}, such as {outside[0]}: give those of each "
            "folder as a source of its own"
        )
    path = home / f"{_slug(pattern)}.catalog"
    old = _read("made", Catalog.read, path, root)
    if old is not None and old.settings != settings:
        old = None
    if old is not None and (missing := sorted(set(old.names) - set(names))):
        raise ValueError(
            f"shards of the index {path} are missing: "
            f"{first_three([os.path.join(root, name) for name in missing])}; put them back, or "
            "delete that file to go on with the shards that are left"
        )
    known = {} if old is None else {name: number for number, name in enumerate(old.names)}
    entries, tasks, num_known = np.zeros(len(shards), ENTRY), [], 0
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        file, at = index_file(home, name), known.get(name)
        if old is not None and at is not None and old.has_shard(at, shard):
            entries[number] = old.entries[at]
            num_known += 1
        elif (entry := _read("built", read_entry, file, settings, shard)) is not None:
            entries[number] = entry
        else:
            tasks.append(IndexTask(shard, file, settings))
    if old is not None and num_known == len(names) == len(old.names):
        return Survey(old, (), is_written=True)
    sizes, versions = zip(*((shard.size, shard.version) for shard in shards), strict=True)
    catalog = Catalog(path, root, settings, tuple(media), names, sizes, versions, entries)
    return Survey(catalog, tuple(tasks), is_written=False)


def _read[T](done: str, read: Callable[..., T], *args: Any) -> T | None:
    """Return ``read(*args)``; None without a file or, with a warning, for a damaged one."""
    try:
        return read(*args)
    except FileNotFoundError:
        return None
    except (OSError, DamagedFileError) as error:
        warnings.warn(f"{done} again: {error}", stacklevel=4)
        return None


def load_or_build_index(
    pattern: str,
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
    cache: Path | None = None,
    build: Build = build_here,
) -> Index:
    """Open the index of the shards that `pattern` names; build and store the missing parts.

    cache: a folder for the indexes of sources whose own folder cannot be written. build: indexes
    the missing shards. Raises ValueError for missing, damaged or misread shards, and where no
    folder can be written.
    """
    settings, media = settings_fingerprint(chat, processors), sorted(processors)
    state = find_survey(pattern, settings, media, cache)
    if state.tasks:
        home = state.catalog.path.parent
        if any(other.parent != home for other in home.parent.glob(f"*/{state.catalog.path.name}")):
            warnings.warn(
                f"{pattern!r} is indexed again: its index in {home.parent} is of another version, "
                "or of another tokenizer, template or preprocessing",
                stacklevel=2,
            )
        build(state.tasks, chat, processors, progress)
        state = survey(pattern, settings, media, home)
    return state.open()


def find_survey(pattern: str, settings: str, media: Sequence[str], cache: Path | None) -> Survey:
    """Return the first complete survey, else that of the first folder that can be written."""
    homes = index_homes(pattern, settings, cache)
    surveys: dict[Path, Survey] = {}
    for home in filter(Path.is_dir, homes):
        surveys[home] = survey(pattern, settings, media, home)
        if surveys[home].is_written:
            return surveys[home]
    find_shards(pattern)  # to say that there are none, before a folder is made
    errors = list[OSError]()
    for home in homes:
        try:
            home.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=home).close()
        except OSError as error:
            errors.append(error)
        else:
            return surveys.get(home) or survey(pattern, settings, media, home)
    raise ValueError(
        f"got {pattern}, whose index can be stored neither beside its shards nor in "
        f"data.cache_directory; give a folder there ({'; '.join(map(str, errors))})"
    ) from next((error for error in errors if error.errno not in _NO_PLACE), None)


def index_homes(pattern: str, settings: str, cache: Path | None) -> list[Path]:
    """The folders for the index of a pattern, by preference."""
    root = _absolute_root(pattern)
    homes = [] if is_remote(root) else [Path(root) / ".index" / settings]
    if cache is not None:
        digest = hashlib.sha256(root.encode()).hexdigest()[:16]
        homes.append(Path(cache).absolute() / "index" / digest / settings)
    return homes


def _absolute_root(pattern: str) -> str:
    root = str(pattern_root(pattern))
    return root if is_remote(pattern) else os.path.abspath(root)


def _inside(root: str, path: str) -> str:
    if is_remote(root):
        return path.removeprefix(root).lstrip("/")
    return os.path.relpath(path, root)


def _slug(pattern: str) -> str:
    """Turn a pattern into a file name that is unique among the patterns of a folder."""
    rest = _inside(_absolute_root(pattern), pattern)
    digest = hashlib.sha256(rest.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', rest)[:100]}-{digest}"
