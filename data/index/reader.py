"""Read single samples and items of an index by byte offset, and decode only these."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from data.index.remote import BlockCache, is_remote
from data.index.samples import Index, Processors, SkippedSample
from data.index.shards import ShardFile
from data.modalities.processor import Media, Part, PartPlan
from data.text.chat import ChatTokenizer, EncodedSample
from data.text.forms import parse_messages

_MAX_OPEN_SHARDS = 256  # files; a URL takes no descriptor, but a request to look at it
_MAX_OPEN_URLS = 2**16
_MAX_PLANS = 4096
_PART_COLUMNS = ("item_media", "item_size_0", "item_size_1", "item_frames", "item_fps")


class UnreadableSample(Exception):
    """A sample is corrupt, or differs from its index. item: number of the bad file; None: text."""

    def __init__(self, shard: str, key: str, item: int | None, reason: str) -> None:
        self.sample, self.reason = SkippedSample(shard, key, reason, item), reason
        super().__init__(str(self.sample))

    def __reduce__(self) -> tuple[Any, ...]:
        return UnreadableSample, (self.sample.shard, self.sample.key, self.sample.item, self.reason)


class SampleReader:
    """Samples and items of an index. Safe to use from several threads at once.

    Keeps the files of up to 256 shards open, and one decoded file. Every method that reads a shard
    also raises ShardChangedError. cache: keeps blocks of remote shards.
    """

    def __init__(
        self,
        index: Index,
        chat: ChatTokenizer,
        processors: Processors,
        cache: BlockCache | None = None,
    ) -> None:
        self.index, self.chat, self.processors, self.cache = index, chat, processors, cache
        most = _MAX_OPEN_URLS if is_remote(index.catalog.root) else _MAX_OPEN_SHARDS
        # No cache refers to the reader, so its files are closed with it.
        self._shard = lru_cache(most)(lambda number: ShardFile(index.state(number), cache))
        by_number = [processors[name] for name in index.media]

        def plan(media: int, width: int, height: int, frames: int, fps: float) -> PartPlan:
            return by_number[media].plan(Part((width, height), frames, fps))

        self._plan = lru_cache(_MAX_PLANS)(plan)  # one of a long video
        self._kept: tuple[int, Any] | None = None  # the last file with several items, decoded

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what another process needs to open the shards itself."""
        return SampleReader, (self.index, self.chat, self.processors, self.cache)

    def messages(self, sample: int) -> list[dict[str, object]]:
        """Return the chat messages of a sample's JSON. Raises UnreadableSample."""
        data = self.read(sample, None)
        try:
            return parse_messages(data)
        except ValueError as error:
            raise self._unreadable(sample, None, str(error)) from error

    def sample(self, sample: int) -> EncodedSample:
        """Tokenize a sample. Raises UnreadableSample, also when it differs from the index."""
        index = self.index
        numbers = index.items_of_sample(sample)
        items = slice(numbers.start, numbers.stop)
        messages, key = self.messages(sample), index.key(sample)
        plans = self.plans(np.array(index.parts_of_sample(sample), int))
        texts, rows = [plan.text for plan in plans], [r for p in plans for r in p.rows_of_items]
        try:
            encoded = self.chat.encode(messages, rows, key, texts)
        except (ValueError, RecursionError) as error:
            raise self._unreadable(sample, None, str(error)) from error
        actual = (
            len(encoded.input_ids),
            np.count_nonzero(encoded.loss_mask),
            encoded.item_offsets.tolist(),
            encoded.item_rows.tolist(),
        )
        expected = (
            int(index.column("token_length", sample)),
            int(index.column("loss_tokens", sample)),
            index.column("item_placeholder", items).tolist(),
            index.column("item_rows", items).tolist(),
        )
        if actual != expected:
            raise self._unreadable(
                sample,
                None,
                f"tokens, loss tokens, item offsets and rows are {actual}, the index says "
                f"{expected}: the shard or the tokenizer changed since it was built; run `mimo "
                "data index`",
            )
        return encoded

    def media(self, item: int) -> Media[Any]:
        return self.processors[self.index.media[int(self.index.column("item_media", item))]]

    def decoded(self, item: int, file: int) -> Any:
        """Decode a file of an item's part. Raises UnreadableSample, also if its size changed."""
        kept = self._kept  # another thread may replace it
        if kept is not None and kept[0] == file:
            return kept[1]
        sample, media = self.index.sample_of_item(item), self.media(item)
        data = self.read(sample, file)
        try:
            decoded = media.decode(data)
        except ValueError as error:
            raise self._unreadable(sample, file, str(error)) from error
        size, expected = media.size_of(decoded), self.index.part(item).size
        if size != expected:
            raise self._unreadable(
                sample,
                file,
                f"it has {media.size_text(size)}, the index says {media.size_text(expected)}: the "
                "shard changed since it was built; run `mimo data index`",
            )
        if self.plan(item).num_items > 1:  # such as crops, which come one after the other
            self._kept = (file, decoded)
        return decoded

    def patches(self, item: int) -> np.ndarray:
        """Return the patches (P, W) of an item. Raises UnreadableSample."""
        part, media = self.index.part(item), self.media(item)
        number, files = int(self.index.column("item_number", item)), self.index.files_of_part(item)
        decoded = [self.decoded(item, files[file]) for file in media.item_files(part, number)]
        try:
            return media.item_patches(decoded, part, number)
        except ValueError as error:
            sample = self.index.sample_of_item(item)
            raise self._unreadable(sample, files[0], str(error)) from error

    def plan(self, item: int) -> PartPlan:
        return self.plans(np.array([item]))[0]

    def plans(self, items: np.ndarray) -> list[PartPlan]:
        """Plan the parts of many items, from the index alone."""
        columns = [self.index.column(name, items).tolist() for name in _PART_COLUMNS]
        return [self._plan(*values) for values in zip(*columns, strict=True)]

    def read(self, sample: int, file: int | None) -> bytes:
        """Return a file of a sample, not decoded, or its JSON. Raises UnreadableSample."""
        what, number = ("json", sample) if file is None else ("file", file)
        offset = int(self.index.column(f"{what}_offset", number))
        size = int(self.index.column(f"{what}_size", number))
        try:
            data = self._shard(int(self.index.column("shard", sample))).read(offset, size)
        except OSError as error:
            raise self._unreadable(sample, file, f"the shard cannot be read: {error}") from error
        if len(data) != size:
            raise self._unreadable(
                sample, file, f"the shard ends {size - len(data)} bytes too early: it was truncated"
            )
        return data

    def _unreadable(self, sample: int, file: int | None, reason: str) -> UnreadableSample:
        """Return the error to raise; raise ShardChangedError if that is the cause."""
        index = self.index
        # If the shard was rewritten, all its samples are wrong, not only this one.
        with suppress(OSError):
            self._shard(int(index.column("shard", sample))).check()
        item = None if file is None else file - index.files_of_sample(sample).start
        return UnreadableSample(index.shard_of(sample), index.key(sample), item, reason)


def plans_of_items(
    readers: Sequence[SampleReader], source: np.ndarray, item: np.ndarray
) -> list[PartPlan]:
    """Plan the parts of items, in order; source, item: (m,)."""
    plans: list[PartPlan] = []
    for number in np.flatnonzero(np.bincount(source)).tolist():
        plans += readers[number].plans(item[source == number])
    return [plans[i] for i in np.argsort(np.argsort(source, kind="stable"))]
