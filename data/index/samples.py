"""The index of a source: everything the batches are planned from, without decoding.

A shard has a file of columns, a source one small catalog of these files (shard_index.py). `Index`
numbers the samples, items and files of all shards consecutively, and maps a shard's file on first
use: ranks of a machine share one copy. processor.py says how files become items.

Letters: `n` samples, `m` items, in order of mention, and `f` files of all shards; `S` shards.
"""

import hashlib
import json
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data.index.shard_index import COLUMNS, NAMES, STEPS, Catalog, damaged, map_file, stored
from data.index.shards import Shard
from data.modalities.processor import Media, Part
from data.text.chat import ChatTokenizer

Processors = Mapping[str, Media[Any]]  # by name

INDEX_VERSION = 7  # raise it whenever the columns, their meaning or what is left out change
ENOUGH = 200  # samples, before a share of them says something
_SHOWN = 10  # bad samples named in one message
_MAX_MAPPED = 2**14  # files at a time: Linux allows a process about four times as many mappings


@dataclass(frozen=True)
class SkippedSample:
    """An unusable sample and the reason."""

    shard: str
    key: str
    reason: str
    item: int | None = None  # the number in the name of the file at fault; None: the text

    def __str__(self) -> str:
        where = "" if self.item is None else f", item {self.item}"
        return f"sample {self.key!r} of {self.shard}{where}: {self.reason}"


class Index:
    """All samples of a source. Safe to use from several threads; pickled by the catalog's path.

    shards: paths. media: sorted names of modalities. num_items: of all samples together.
    most_tokens, most_rows: of any sample. num_skipped: samples that cannot be used.
    unknown_share: share of unknown tokens among the tokens of texts.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.shards, self.media = catalog.shards, catalog.media
        self._entries = entries = catalog.entries
        self._specs = entries["columns"]  # (S, C)
        self._starts = {  # int64 (S + 1,): the sum of the counts before each shard, and of all
            of: np.concatenate(([0], np.cumsum(entries[of], dtype=np.int64)))
            for of in ("samples", "items", "files")
        }
        self.num_items = int(self._starts["items"][-1])
        self.num_skipped = int(entries["skipped"].sum())
        self.most_tokens = int(entries["most_tokens"].max(initial=0))
        self.most_rows = int(entries["most_rows"].max(initial=0))
        text_tokens = int(entries["text_tokens"].sum())
        self.unknown_share = float(entries["unknown_tokens"].sum() / max(text_tokens, 1))
        self._bytes_of = lru_cache(_MAX_MAPPED)(partial(_map, catalog))
        self._checked = np.zeros(self._specs.shape, bool)

    def __len__(self) -> int:
        return int(self._starts["samples"][-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return open_index, (self.catalog.path, self.catalog.root, self.catalog.identity)

    # -------------------------------------------------------------------- columns

    def column(self, name: str, numbers: np.ndarray | slice | int = slice(None)) -> np.ndarray:
        """Return the entries of a column for these samples, items or files.

        numbers: any shape, which the result also has: int64, or float64 for `item_fps`. name: of
        `shard_index.COLUMNS`, or `shard` (n,), the shard of a sample; `item_start` has one entry
        more than samples. Raises DamagedFileError.
        """
        of = "samples" if name == "shard" else COLUMNS[name]
        starts = self._starts[of]
        total = int(starts[-1]) + (name == "item_start")
        if isinstance(numbers, slice):
            numbers = np.arange(*numbers.indices(total))
        numbers = np.asarray(numbers, np.int64)
        asked = numbers.reshape(-1)
        assert not len(asked) or 0 <= asked.min() <= asked.max() < total, f"{name} has {total}"
        entries = np.empty(len(asked), np.float64 if name == "item_fps" else np.int64)
        inside = asked < starts[-1]  # all but the end of item_start
        entries[~inside] = self.num_items
        asked = asked[inside]
        shard = np.searchsorted(starts, asked, side="right") - 1
        if name == "shard":
            entries[inside] = shard
        else:
            entries[inside] = self._gather(NAMES.index(name), shard, asked - starts[shard])
        if name in ("item_start", "item_file"):  # numbers of what a shard has itself
            before = self._starts["items" if name == "item_start" else "files"]
            entries[inside] += before[shard]
        return entries.reshape(numbers.shape)

    def _gather(self, column: int, shard: np.ndarray, local: np.ndarray) -> np.ndarray:
        """Return a column's entries at places in shards; shard, local: (k,)."""
        specs = self._specs[:, column]
        entries = specs["first"][shard] + specs["step"][shard] * local
        if np.all(specs["dtype"] == STEPS):
            return entries
        order = np.argsort(shard, kind="stable")
        cuts = np.flatnonzero(np.diff(shard[order])) + 1
        for places in np.split(order, cuts) if len(order) else ():
            number = int(shard[places[0]])
            if specs["dtype"][number] != STEPS:
                entries[places] = self._stored(number, column)[local[places]]
        return entries

    def _stored(self, shard: int, column: int) -> np.ndarray:
        """Return a column from the file of a shard; the first use compares its checksum."""
        spec = self._specs[shard, column]
        values = stored(self._bytes_of(shard), spec)
        if not self._checked[shard, column]:
            if zlib.crc32(values) != spec["crc"]:
                path = self.catalog.file(shard)
                raise damaged(path, f"the checksum of {NAMES[column]} differs")
            self._checked[shard, column] = True
        return values

    # ------------------------------------------------------------------------ single entries

    def _one(self, name: str, number: int) -> int:
        return int(self.column(name, number))

    def key(self, sample: int) -> str:
        """The name of a sample, unique in its shard."""
        shard = self._one("shard", sample)
        local = sample - int(self._starts["samples"][shard])
        start = self._one("key_end", sample - 1) if local else 0
        text = self._stored(shard, NAMES.index("keys"))[start : self._one("key_end", sample)]
        return text.tobytes().decode()

    def shard_of(self, sample: int) -> str:
        return self.shards[self._one("shard", sample)]

    def state(self, shard: int) -> Shard:
        catalog = self.catalog
        return Shard(self.shards[shard], catalog.sizes[shard], catalog.versions[shard])

    def sample_of_item(self, item: int) -> int:
        samples = self.samples_of_shard(bisect_right(self._starts["items"], item) - 1)
        after = bisect_right(samples, item, key=lambda sample: self._one("item_start", sample))
        return samples[after - 1]

    def part(self, item: int) -> Part:
        return Part(
            size=(self._one("item_size_0", item), self._one("item_size_1", item)),
            frames=self._one("item_frames", item),
            fps=float(self.column("item_fps", item)),
        )

    def items_of_sample(self, sample: int) -> range:
        return range(self._one("item_start", sample), self._one("item_start", sample + 1))

    def parts_of_sample(self, sample: int) -> list[int]:
        """The first item of each of its content parts, in order."""
        items = self.items_of_sample(sample)
        numbers = self.column("item_number", slice(items.start, items.stop))
        return [items.start + int(first) for first in np.flatnonzero(numbers == 0)]

    def files_of_sample(self, sample: int) -> range:
        items = self.items_of_sample(sample)
        if not items:
            return range(0)
        return range(self.files_of_part(items[0])[0], self.files_of_part(items[-1])[-1] + 1)

    def files_of_part(self, item: int) -> range:
        first = self._one("item_file", item)
        return range(first, first + self._one("item_frames", item))

    # ------------------------------------------------------------------------- by shard

    def samples_of_shard(self, shard: int) -> range:
        return range(*self._starts["samples"][shard : shard + 2].tolist())

    def skipped_samples(self) -> Iterator[SkippedSample]:
        for shard in np.flatnonzero(self._entries["skipped"]).tolist():
            text = self._stored(shard, NAMES.index("skipped")).tobytes()
            for key, reason in json.loads(text):
                yield SkippedSample(self.shards[shard], key, reason)

    def above(self, what: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples with more ``what`` ("tokens", "rows") than ``limit``, and how many."""
        samples, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for shard in np.flatnonzero(self._entries[f"most_{what}"] > limit).tolist():
            inside = self.samples_of_shard(shard)
            if what == "tokens":
                size = self.column("token_length", slice(inside.start, inside.stop))
            else:
                start = self.column("item_start", np.arange(inside.start, inside.stop + 1))
                rows = self.column("item_rows", slice(int(start[0]), int(start[-1])))
                size = np.diff(np.concatenate(([0], np.cumsum(rows)))[start - start[0]])
            over = np.flatnonzero(size > limit)
            samples.append(inside.start + over)
            sizes.append(size[over])
        return np.concatenate(samples), np.concatenate(sizes)


def _map(catalog: Catalog, shard: int) -> np.ndarray:
    """Map the index file of a shard: uint8 (bytes,)."""
    path, entry = catalog.file(shard), catalog.entries[shard]
    try:
        data = map_file(path)
    except OSError as error:
        raise damaged(path, str(error)) from error
    head = zlib.crc32(data[: entry["head_size"]])
    if (len(data), head) != (entry["file_size"], entry["head_crc"]):
        raise damaged(path, "it was replaced while it was in use")
    return data


def open_index(path: Path, root: str, identity: str) -> Index:
    """Open a catalog that another process has open. Raises DamagedFileError if it was replaced."""
    catalog = Catalog.read(path, root)
    if catalog.identity != identity:
        raise damaged(path, "it was replaced while it was in use")
    return Index(catalog)


def column(
    indexes: Sequence[Index], name: str, source: np.ndarray, number: np.ndarray
) -> np.ndarray:
    """Return the entries int64 (k,) of column ``name``; source, number: (k,)."""
    entries = np.empty(len(number), np.int64)
    for number_of_source in np.flatnonzero(np.bincount(source)).tolist():
        places = source == number_of_source
        entries[places] = indexes[number_of_source].column(name, number[places])
    return entries


def items_of_samples(
    indexes: Sequence[Index], source: np.ndarray, sample: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of samples, in order: item (m,) and item_sample (m,).

    source, sample: (n,). item: numbers in the source's index. item_sample: numbers below n.
    """
    first = column(indexes, "item_start", source, sample)
    count = column(indexes, "item_start", source, sample + 1) - first
    item_sample = np.repeat(np.arange(len(sample)), count)
    before = np.cumsum(count) - count
    return np.arange(len(item_sample)) + (first - before)[item_sample], item_sample


def settings_fingerprint(chat: ChatTokenizer, processors: Processors) -> str:
    """Return a hex digest of all that an index depends on besides its shards."""
    fingerprints = sorted((name, modality.fingerprint()) for name, modality in processors.items())
    parts = (INDEX_VERSION, chat.fingerprint(), fingerprints)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def check_sizes(index: Index, sequence_length: int, rows_per_microbatch: int | None) -> None:
    """Raise ValueError when samples have more tokens or rows than these (None: any number)."""
    for unit, most, limit, what in (
        ("tokens", index.most_tokens, sequence_length, "are longer than sequence_length"),
        ("rows", index.most_rows, rows_per_microbatch, "have more rows than rows_per_microbatch"),
    ):
        if limit is None or most <= limit:
            continue
        large, sizes = index.above(unit, limit)
        lines = [
            f"{index.shard_of(i)}: {index.key(i)}: {size} {unit}"
            for i, size in zip(large[:_SHOWN].tolist(), sizes[:_SHOWN].tolist(), strict=True)
        ]
        raise ValueError(
            f"{len(large)} of {len(index)} samples {what} {limit}; the most are {most} {unit}:\n  "
            f"{listed(lines, len(large))}\nraise data.{what.split()[-1]}, let an encoder's items "
            "have fewer rows, or leave them out of the shards (samples are never truncated)"
        )


def check_skipped(index: Index, max_fraction: float) -> None:
    """Raise ValueError when too large a share of the samples is unusable, of `ENOUGH` or more."""
    bad = index.num_skipped
    total = bad + len(index)
    if total >= ENOUGH and bad > max_fraction * total:
        by_shard = Counter(sample.shard for sample in index.skipped_samples())
        raise ValueError(
            f"{bad} of {total} samples are unusable, {bad / total:.2%}, above max_skipped_fraction "
            f"{max_fraction:g}; {worst_shards(by_shard)}; among them:\n  "
            f"{listed([*map(str, islice(index.skipped_samples(), _SHOWN))], bad)}\n"
            "mend these shards or leave them out, or raise data.max_skipped_fraction"
        )


def worst_shards(by_shard: Counter[str]) -> str:
    """Name the three shards with the most unusable samples."""
    worst = [f"{shard} ({count})" for shard, count in by_shard.most_common(3)]
    return f"the worst shards: {', '.join(worst)}"


def listed(lines: list[str], total: int | None = None) -> str:
    """Join the first ten of ``total`` lines about bad samples, with the number of the others."""
    total = len(lines) if total is None else total
    more = [f"... and {total - _SHOWN} more"] if total > _SHOWN else []
    return "\n  ".join([*lines[:_SHOWN], *more])
