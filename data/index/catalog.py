"""The catalog of a source: the headers of its shards' index files, in one file.

It is a cache. Whatever it says is in the files, too; it makes opening a source one read.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data.index.columns import (
    BYTES,
    STEPS,
    WIDTHS,
    ColumnFile,
    DamagedFileError,
    write_columns,
)
from data.index.shard_index import COLUMNS, ENTRY
from data.index.shards import Shard

SUFFIX = ".catalog"


@dataclass(frozen=True)
class Catalog:
    """What is known of a source without opening the files of its shards.

    path: of its file; the shards' files are beside it. root: folder of the shards. media: names,
    sorted. names: of the shards, inside the root. sizes, versions: of the shards. entries: (S,)
    ENTRY, of their index files.
    """

    path: Path
    root: str
    settings: str
    media: tuple[str, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    versions: tuple[str, ...]
    entries: np.ndarray

    @classmethod
    def read(cls, path: Path, root: str, identity: str | None = None) -> Catalog:
        """A catalog as it was written.

        identity: of the one that is meant. Raises OSError, DamagedFileError.
        """
        file = ColumnFile(path)
        file.check()
        try:
            if any(file.specs[name]["dtype"] != BYTES for name in ("shards", "entries")):
                raise ValueError("its texts are none")
            names, sizes, versions = json.loads(file.values("shards").tobytes())
            entries = file.values("entries").view(ENTRY)
            if not len(names) == len(sizes) == len(versions) == len(entries):
                raise ValueError("it has not as many names as entries")
            if any(os.path.isabs(name) or ".." in name.split("/") for name in names):
                raise ValueError("it names files of other folders")
            _check_specs(entries)
            catalog = cls(
                path,
                root,
                str(file.facts["settings"]),
                tuple(map(str, file.facts["media"])),
                tuple(map(str, names)),
                tuple(map(int, sizes)),
                tuple(map(str, versions)),
                entries,
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedFileError(path, str(error)) from error
        if identity is not None and catalog.identity != identity:
            raise DamagedFileError(path, "it was replaced while it was in use")
        return catalog

    def write(self) -> None:
        """Write it, or replace an older one at once. Raises OSError."""
        text = json.dumps([self.names, self.sizes, self.versions]).encode()
        facts = {"settings": self.settings, "media": self.media}
        columns = {
            "shards": np.frombuffer(text, np.uint8),
            "entries": np.ascontiguousarray(self.entries).view(np.uint8),
        }
        write_columns(self.path, facts, columns)

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """The paths of the shards."""
        return tuple(os.path.join(self.root, name) for name in self.names)

    @cached_property
    def identity(self) -> str:
        """Hex digest of what its index files contain, wherever they are."""
        facts = (self.settings, self.names, self.sizes, self.versions)
        heads = self.entries["head_crc"].tobytes()
        return hashlib.sha256(repr(facts).encode() + heads).hexdigest()[:32]

    def file(self, shard: int) -> Path:
        """The index file of a shard."""
        return index_file(self.path.parent, self.names[shard])

    def has_shard(self, number: int, shard: Shard, size_and_time: tuple[int, int]) -> bool:
        """Whether a shard and its index file are as they were."""
        entry = self.entries[number]
        return (self.sizes[number], self.versions[number]) == (shard.size, shard.version) and (
            (entry["file_size"], entry["file_time"]) == size_and_time
        )


def index_file(home: Path, name: str) -> Path:
    """Where the index of a shard is in a folder of indexes."""
    return home / f"{name}.index"


def _check_specs(entries: np.ndarray) -> None:
    """Raise ValueError if an entry describes columns outside its file, or of another length."""
    specs, size = entries["columns"], entries["file_size"][:, None]
    if np.any(specs["dtype"] > STEPS) or np.any(specs["offset"] < 0):
        raise ValueError("a column is malformed")
    if np.any(specs["count"] < 0) or np.any(specs["count"] >= 2**53):
        raise ValueError("a column has no such length")
    if np.any(specs["offset"] + specs["count"] * WIDTHS[specs["dtype"]] > size):
        raise ValueError("a column ends after its file")
    for number, of in enumerate(COLUMNS.values()):
        if of == "bytes" and np.any(specs["dtype"][:, number] != BYTES):
            raise ValueError("a text is none")
        if of != "bytes" and np.any(specs["count"][:, number] != entries[of]):
            raise ValueError(f"a column of {of} has another length")
