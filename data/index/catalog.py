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

from data.index.columns import ColumnFile, damaged, write_columns
from data.index.shard_index import ENTRY
from data.index.shards import Shard


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
    def read(cls, path: Path, root: str) -> Catalog:
        """A catalog as it was written. Raises OSError, DamagedFileError."""
        file = ColumnFile(path)
        file.check()
        names, sizes, versions = map(tuple, json.loads(file.values("shards").tobytes()))
        if any(os.path.isabs(name) or ".." in name.split("/") for name in names):
            raise damaged(path, "it names files of other folders")
        media, entries = tuple(file.facts["media"]), file.values("entries").view(ENTRY)
        return cls(path, root, file.facts["settings"], media, names, sizes, versions, entries)

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

    def has_shard(self, number: int, shard: Shard) -> bool:
        """Whether a shard and its index file are as they were."""
        try:
            status = self.file(number).stat()
        except OSError:
            return False
        entry = self.entries[number]
        return (self.sizes[number], self.versions[number]) == (shard.size, shard.version) and (
            (entry["file_size"], entry["file_time"]) == (status.st_size, status.st_mtime_ns)
        )


def index_file(home: Path, name: str) -> Path:
    """Where the index of a shard is in a folder of indexes."""
    return home / f"{name}.index"
