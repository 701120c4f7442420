"""Reads single samples and items of an index by byte offset; nothing else is decoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from data.index.build import count_loss_tokens
from data.index.samples import Index, Processors
from data.index.shards import ShardFile
from data.media.processor import Grid, Media, Part, PartPlan
from data.text.chat import ChatTokenizer, EncodedSample
from data.text.forms import parse_messages

_MAX_OPEN_SHARDS = 256
_MAX_PLANS = 4096


class UnreadableSample(Exception):
    """A sample that cannot be used: corrupt, or no longer what the index says.

    item: the number in the name of the file at fault, or None when it is the text.
    """

    def __init__(self, shard: str, key: str, item: int | None, reason: str) -> None:
        where = "" if item is None else f", item {item}"
        super().__init__(f"sample {key!r} of {shard}{where}: {reason}")
        self.shard, self.key, self.item, self.reason = shard, key, item, reason


class SampleReader:
    """Samples and items of an index. Safe to use from several threads at once.

    Keeps the files of up to 256 shards open.
    """

    def __init__(self, index: Index, chat: ChatTokenizer, processors: Processors) -> None:
        self.index, self.chat, self.processors = index, chat, processors
        self._lock = threading.Lock()
        self._open_shards: OrderedDict[int, ShardFile] = OrderedDict()
        self._plans: dict[tuple[str, Part], PartPlan] = {}  # one for all items of a long video

    def messages(self, sample: int) -> list[dict[str, object]]:
        """The chat messages of a sample, as they are in its JSON.

        Raises UnreadableSample.
        """
        index = self.index
        data = self._read(
            sample, None, int(index.json_offset[sample]), int(index.json_size[sample])
        )
        try:
            return parse_messages(data)
        except ValueError as error:
            raise self._unreadable(sample, None, str(error)) from error

    def sample(self, sample: int) -> EncodedSample:
        """Tokens, labels and loss mask of a sample; no item is read.

        Raises UnreadableSample when it cannot be encoded or differs from the index.
        """
        index = self.index
        own = index.items_of_sample(sample)
        items = slice(own.start, own.stop)
        messages, key = self.messages(sample), str(index.keys[sample])
        parts = index.parts_of_sample(sample)
        texts = [self._plan(item).text for item in parts]
        try:
            encoded = self.chat.encode(messages, index.item_rows[items].tolist(), key, texts)
            media = [one.media for one in self.chat.mentions(messages, key)]
        except ValueError as error:
            raise self._unreadable(sample, None, str(error)) from error
        got = (
            len(encoded.input_ids),
            count_loss_tokens(encoded),
            encoded.item_offsets.tolist(),
            media,
        )
        expected = (
            int(index.token_length[sample]),
            int(index.loss_tokens[sample]),
            index.item_placeholder[items].tolist(),
            [index.media[index.item_media[item]] for item in parts],
        )
        if got != expected:
            raise self._unreadable(
                sample,
                None,
                f"tokens, loss tokens, item offsets and media are {got}, the index says "
                f"{expected}: the shard or the tokenizer changed since it was built; delete the "
                "index folder",
            )
        return encoded

    def media(self, item: int) -> Media[Any]:
        """The media of an item."""
        return self.processors[self.index.media[self.index.item_media[item]]]

    def file_bytes(self, file: int, sample: int) -> bytes:
        """A file of a sample, not decoded. Raises UnreadableSample."""
        index = self.index
        return self._read(sample, file, int(index.file_offset[file]), int(index.file_size[file]))

    def decoded(self, item: int, file: int) -> Any:
        """A file of the part that an item belongs to, as its media decodes it.

        Raises UnreadableSample when it cannot be decoded or its size differs from the index.
        """
        sample, media = self.index.sample_of_item(item), self.media(item)
        data = self.file_bytes(file, sample)
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
                "shard changed since it was built; delete the index folder",
            )
        return decoded

    def patches(self, item: int) -> np.ndarray:
        """float32 (P, C): the patches of an item, see `Media.item_patches`. Raises as `decoded`."""
        part, media = self.index.part(item), self.media(item)
        number, files = int(self.index.item_number[item]), self.index.files_of_part(item)
        own = [self.decoded(item, files[file]) for file in media.item_files(part, number)]
        try:
            return media.item_patches(own, part, number)
        except ValueError as error:
            sample = self.index.sample_of_item(item)
            raise self._unreadable(sample, files[0], str(error)) from error

    def grid(self, item: int) -> Grid:
        """(t, h, w) in patches of an item, from the index alone."""
        return self._plan(item).grid

    def row_grid(self, item: int) -> Grid:
        """(t, h, w) in rows of an item, from the index alone."""
        return self._plan(item).row_grid

    def time_step(self, item: int) -> float:
        """Positions from one step in time of an item to the next, from the index alone."""
        return self._plan(item).time_step

    def close(self) -> None:
        """Close all files. The reader can still be used: it opens them again."""
        with self._lock:
            self._open_shards.clear()

    def _plan(self, item: int) -> PartPlan:
        part, media = self.index.part(item), self.index.media[self.index.item_media[item]]
        plan = self._plans.get((media, part))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[media, part] = self.processors[media].plan(part)
        return plan

    def _read(self, sample: int, file: int | None, offset: int, size: int) -> bytes:
        try:
            data = self._shard(int(self.index.shard[sample])).read(offset, size)
        except OSError as error:
            raise self._unreadable(sample, file, f"the shard cannot be read: {error}") from error
        if len(data) != size:
            raise self._unreadable(
                sample, file, f"the shard ends {size - len(data)} bytes too early: it was truncated"
            )
        return data

    def _shard(self, number: int) -> ShardFile:
        with self._lock:
            shard = self._open_shards.get(number)
            if shard is None:
                shard = self._open_shards[number] = ShardFile(self.index.shards[number])
            self._open_shards.move_to_end(number)
            while len(self._open_shards) > _MAX_OPEN_SHARDS:
                self._open_shards.popitem(last=False)
            return shard

    def _unreadable(self, sample: int, file: int | None, reason: str) -> UnreadableSample:
        index = self.index
        item = None if file is None else file - index.files_of_sample(sample).start
        return UnreadableSample(index.shard_of(sample), index.key(sample), item, reason)
