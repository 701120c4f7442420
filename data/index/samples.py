"""The global index of a set of shards: everything the batches are planned from, without decoding.

Built once per set of shards (build.py; store.py keeps it beside them).

A content part takes files and becomes items: see processor.py. The index knows both.

Letters: `n` samples, `m` items of all samples, in order of mention; the
items of sample i are item_start[i] .. item_start[i + 1] - 1. `f` files of all samples, in order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from data.index.shards import Shard, describe_shard, pattern_root
from data.media.processor import Media, Part
from data.text.chat import ChatTokenizer

Processors = Mapping[str, Media[Any]]  # by name

INDEX_VERSION = 5  # raise it whenever the arrays, their meaning or what is left out change
_SHOWN = 10  # bad samples named in one message


@dataclass(frozen=True)
class SkippedSample:
    """A sample that cannot be used, and why."""

    shard: str
    key: str
    reason: str


@dataclass(frozen=True)
class Index:
    """All samples of a set of shards; see the header of this file."""

    shards: tuple[str, ...]  # paths
    media: tuple[str, ...]  # names, sorted
    keys: np.ndarray  # (n,) str
    shard: np.ndarray  # (n,) int32, into shards
    json_offset: np.ndarray  # (n,) int64, byte in the shard
    json_size: np.ndarray  # (n,) int64, bytes
    token_length: np.ndarray  # (n,) int32, items expanded
    loss_tokens: np.ndarray  # (n,) int32
    item_start: np.ndarray  # (n + 1,) int64, into the item arrays
    item_media: np.ndarray  # (m,) int32, into media
    item_number: np.ndarray  # (m,) int32, among the items of its part
    item_file: np.ndarray  # (m,) int64, first file of its part
    item_frames: np.ndarray  # (m,) int32, files of its part
    item_fps: np.ndarray  # (m,) float64, frames per second
    item_size_0: np.ndarray  # (m,) int64, of each file of its part: the first number of its Size
    item_size_1: np.ndarray  # (m,) int64, the second
    item_rows: np.ndarray  # (m,) int32, placeholder tokens
    item_placeholder: np.ndarray  # (m,) int32, first placeholder inside its sample's tokens
    item_cost: np.ndarray  # (m,) int64, see PartPlan.cost
    file_offset: np.ndarray  # (f,) int64, byte in the shard
    file_size: np.ndarray  # (f,) int64, bytes
    skipped: tuple[SkippedSample, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.keys)

    def column(self, name: str, numbers: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The entries of a column for these samples, items or files, whichever it is of."""
        return getattr(self, name)[numbers]

    def key(self, sample: int) -> str:
        """The name of a sample, unique in its shard."""
        return str(self.keys[sample])

    def shard_of(self, sample: int) -> str:
        """The path of a sample's shard."""
        return self.shards[int(self.shard[sample])]

    @cached_property
    def states(self) -> tuple[Shard, ...]:
        """What the shards have to be. Raises OSError."""
        return tuple(map(describe_shard, self.shards))

    @property
    def num_items(self) -> int:
        """Items of all samples together."""
        return len(self.item_media)

    def sample_of_item(self, item: int) -> int:
        """The sample that an item belongs to."""
        return int(np.searchsorted(self.item_start, item, side="right")) - 1

    def part(self, item: int) -> Part:
        """The content part that an item belongs to."""
        return Part(
            size=(int(self.item_size_0[item]), int(self.item_size_1[item])),
            frames=int(self.item_frames[item]),
            fps=float(self.item_fps[item]),
        )

    def items_of_sample(self, sample: int) -> range:
        """Its items, in order."""
        return range(int(self.item_start[sample]), int(self.item_start[sample + 1]))

    def parts_of_sample(self, sample: int) -> list[int]:
        """The first item of each of its content parts, in order."""
        return [item for item in self.items_of_sample(sample) if self.item_number[item] == 0]

    def files_of_sample(self, sample: int) -> range:
        """Its files, in order."""
        items = self.items_of_sample(sample)
        if not items:
            return range(0)
        return range(self.files_of_part(items[0])[0], self.files_of_part(items[-1])[-1] + 1)

    def files_of_part(self, item: int) -> range:
        """The files of the part that an item belongs to."""
        first = int(self.item_file[item])
        return range(first, first + int(self.item_frames[item]))


# dtypes of the arrays, for building and for loading: one entry per array field of Index.
SAMPLE_DTYPES = {
    "shard": np.int32,
    "json_offset": np.int64,
    "json_size": np.int64,
    "token_length": np.int32,
    "loss_tokens": np.int32,
}
ITEM_DTYPES = {
    "item_media": np.int32,
    "item_number": np.int32,
    "item_file": np.int64,
    "item_frames": np.int32,
    "item_fps": np.float64,
    "item_size_0": np.int64,
    "item_size_1": np.int64,
    "item_rows": np.int32,
    "item_placeholder": np.int32,
    "item_cost": np.int64,
}
FILE_DTYPES = {"file_offset": np.int64, "file_size": np.int64}
DTYPES = SAMPLE_DTYPES | ITEM_DTYPES | FILE_DTYPES


def make_index(
    shards: Sequence[str],
    media: Sequence[str],
    keys: Sequence[str],
    item_counts: Sequence[int] | np.ndarray,
    columns: dict[str, list[float]] | dict[str, np.ndarray],
    skipped: Sequence[SkippedSample],
    fingerprint: str,
) -> Index:
    """An Index from columns of any type of number; item_counts (n,) are the items per sample."""
    item_start = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum(np.asarray(item_counts, dtype=np.int64), out=item_start[1:])
    arrays = {name: np.asarray(columns[name], dtype=dtype) for name, dtype in DTYPES.items()}
    return Index(
        shards=tuple(shards),
        media=tuple(media),
        keys=np.array(keys, dtype=str),
        item_start=item_start,
        skipped=tuple(skipped),
        fingerprint=fingerprint,
        **arrays,
    )


def index_fingerprint(
    pattern: str, shards: Sequence[Shard], chat: ChatTokenizer, processors: Processors
) -> str:
    """Hex digest of all that an index depends on: tokenizer, template, processors, shards.

    Shards count by name and size, not by path, so that a data folder can be moved.
    """
    root = pattern_root(pattern)
    files = [(os.path.relpath(shard.path, root), shard.size) for shard in shards]
    by_media = sorted((media, one.fingerprint()) for media, one in processors.items())
    parts = (INDEX_VERSION, chat.fingerprint(), by_media, files)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def check_lengths(index: Index, sequence_length: int) -> None:
    """Raise ValueError when samples are longer than `sequence_length` tokens.

    They are never truncated: a cut item has fewer placeholders than rows.
    """
    too_long = np.flatnonzero(index.token_length > sequence_length)
    if len(too_long):
        named = _named(index, too_long, index.token_length, "tokens")
        raise ValueError(
            f"{len(too_long)} of {len(index)} samples are longer than sequence_length "
            f"{sequence_length}; the longest has {index.token_length.max()} tokens:\n  "
            f"{listed(named, len(too_long))}\nraise data.sequence_length, let an encoder's "
            "items have fewer rows, or leave them out of the shards (samples are never truncated)"
        )


def check_rows(index: Index, rows_per_microbatch: int | None) -> None:
    """Raise ValueError when samples have more rows than a microbatch may have (None: any)."""
    if rows_per_microbatch is None:
        return
    before = np.concatenate(([0], np.cumsum(index.item_rows, dtype=np.int64)))
    rows = np.diff(before[index.item_start])
    too_many = np.flatnonzero(rows > rows_per_microbatch)
    if len(too_many):
        named = _named(index, too_many, rows, "rows")
        raise ValueError(
            f"{len(too_many)} of {len(index)} samples have more rows than rows_per_microbatch "
            f"{rows_per_microbatch}; the most are {rows.max()}:\n  "
            f"{listed(named, len(too_many))}\nraise data.rows_per_microbatch, let an encoder's "
            "items have fewer rows, or leave them out of the shards"
        )


def _named(index: Index, samples: np.ndarray, size: np.ndarray, what: str) -> list[str]:
    """A line for each of the first of these samples. size: of every sample, in ``what``."""
    return [
        f"{index.shards[index.shard[i]]}: {index.keys[i]}: {size[i]} {what}"
        for i in samples[:_SHOWN]
    ]


def listed(lines: list[str], total: int | None = None) -> str:
    """The first ten of ``total`` lines about bad samples, and how many more there are."""
    total = len(lines) if total is None else total
    shown = lines[:_SHOWN]
    return "\n  ".join(shown) + (
        f"\n  ... and {total - len(shown)} more" if total > len(shown) else ""
    )


_OTHER_FIELDS = {"shards", "media", "skipped", "fingerprint"}
_ARRAY_FIELDS = {field.name for field in fields(Index)} - _OTHER_FIELDS
assert {"keys", "item_start", *DTYPES} == _ARRAY_FIELDS
