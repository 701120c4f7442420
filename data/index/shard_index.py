"""The index of one shard, a file of columns, and the catalog of those of a source.

An index is complete in itself. It says which version of the shard it is of and which settings it
was made with, so nothing else needs to be asked whether it is current. Numbers of items and files
count from the shard's first. A catalog is a cache of the headers, to open a source by one read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data.index.columns import SPEC, ColumnFile, damaged, write_columns
from data.index.shards import Shard

COLUMNS = {  # what it has an entry for
    "json_offset": "samples",  # byte in the shard
    "json_size": "samples",  # bytes
    "token_length": "samples",  # items expanded
    "loss_tokens": "samples",
    "unknown_tokens": "samples",  # that stand for text which the tokenizer does not know
    "item_start": "samples",  # first item
    "key_end": "samples",  # byte in keys
    "item_media": "items",  # into the media, sorted by name
    "item_number": "items",  # among the items of its part
    "item_file": "items",  # first file of its part
    "item_frames": "items",  # files of its part
    "item_fps": "items",  # frames per second
    "item_size_0": "items",  # of each file of its part: the first number of its Size
    "item_size_1": "items",  # the second
    "item_rows": "items",  # placeholder tokens
    "item_placeholder": "items",  # first placeholder inside its sample's tokens
    "item_cost": "items",  # see PartPlan.cost
    "file_offset": "files",  # byte in the shard
    "file_size": "files",  # bytes
    "keys": "bytes",  # all keys, one after another
    "skipped": "bytes",  # JSON: [key, reason] of each sample that cannot be used
}
NAMES = tuple(COLUMNS)

_COUNTS = (
    *("samples", "items", "files", "skipped", "most_tokens", "most_rows"),
    *("text_tokens", "unknown_tokens"),
)
ENTRY = np.dtype(  # all that a catalog knows of a shard's index
    [
        *((name, "<i8") for name in (*_COUNTS, "file_size", "file_time", "head_size")),
        ("head_crc", "<u4"),
        ("columns", SPEC, (len(NAMES),)),
    ]
)


def write_shard_index(
    path: Path,
    settings: str,
    shard: Shard,
    columns: Mapping[str, np.ndarray],
    skipped: Sequence[tuple[str, str]],
) -> None:
    """Write the index of a shard.

    settings: fingerprint. columns: all of COLUMNS but `skipped`. skipped: keys and reasons.
    Raises OSError.
    """
    starts, rows = columns["item_start"], columns["item_rows"]
    before = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
    rows = np.diff(before[np.append(starts, len(rows))])
    facts = {
        "settings": settings,
        "shard_size": shard.size,
        "shard_version": shard.version,
        "samples": len(starts),
        "items": len(columns["item_rows"]),
        "files": len(columns["file_size"]),
        "skipped": len(skipped),
        "most_tokens": int(columns["token_length"].max(initial=0)),
        "most_rows": int(rows.max(initial=0)),
        "text_tokens": int(columns["token_length"].sum() - before[-1]),
        "unknown_tokens": int(columns["unknown_tokens"].sum()),
    }
    text = json.dumps(skipped).encode() if skipped else b""
    columns = {**columns, "skipped": np.frombuffer(text, np.uint8)}
    write_columns(path, facts, {name: columns[name] for name in NAMES})


def read_entry(path: Path, settings: str, shard: Shard) -> np.void | None:
    """(ENTRY) the index of a shard, its checksums compared; None if it is of another version of it.

    Raises OSError if there is none, DamagedFileError.
    """
    file = ColumnFile(path)
    facts = file.facts
    made_of = (facts["settings"], facts["shard_size"], facts["shard_version"])
    if made_of != (settings, shard.size, shard.version):
        return None
    file.check()
    entry = np.zeros(1, ENTRY)[0]
    for name in _COUNTS:
        entry[name] = facts[name]
    for number, name in enumerate(NAMES):
        entry["columns"][number] = file.specs[name]
    entry["file_size"], entry["file_time"] = len(file.bytes), path.stat().st_mtime_ns
    entry["head_size"], entry["head_crc"] = file.head_size, file.head_crc
    return entry


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
