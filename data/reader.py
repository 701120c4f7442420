"""Reading single samples and items of an index by byte offset; only what is asked is decoded."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import numpy as np

from data.chat import ChatTokenizer, EncodedSample
from data.images import open_image
from data.index import Index, Processors
from data.index_build import count_loss_tokens, parse_messages
from data.processor import ItemProcessor

_MAX_OPEN_SHARDS = 256


class UnreadableSample(Exception):
    """A sample that cannot be used: corrupt, or no longer what the index says.

    item: its number in the index, or None when the text is at fault.
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
        self._open_shards: OrderedDict[int, _Shard] = OrderedDict()

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
        items = slice(int(index.item_start[sample]), int(index.item_start[sample + 1]))
        messages, key = self.messages(sample), str(index.keys[sample])
        try:
            encoded = self.chat.encode(messages, index.item_rows[items].tolist(), key)
            media = self.chat.media_of_items(messages, key)
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
            [index.media[number] for number in index.item_media[items]],
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

    def processor(self, item: int) -> ItemProcessor:
        """The processor of the item's media."""
        return self.processors[self.index.media[self.index.item_media[item]]]

    def item_bytes(self, item: int) -> bytes:
        """The undecoded file of an item. Raises UnreadableSample."""
        index = self.index
        sample = index.sample_of_item(item)
        return self._read(sample, item, int(index.item_offset[item]), int(index.item_size[item]))

    def patches(self, item: int) -> np.ndarray:
        """float32 (P, C): the patches of an item, see ItemProcessor.patches.

        Raises UnreadableSample when it cannot be decoded or its size differs from the index.
        """
        data = self.item_bytes(item)
        sample = self.index.sample_of_item(item)
        try:
            image = open_image(data)
        except ValueError as error:
            raise self._unreadable(sample, item, str(error)) from error
        expected = self._size(item)
        if image.size != expected:
            raise self._unreadable(
                sample,
                item,
                f"the image is {image.size[0]} x {image.size[1]} pixels, the index says "
                f"{expected[0]} x {expected[1]}: the shard changed since it was built; delete the "
                "index folder",
            )
        try:
            return self.processor(item).patches(image)
        except (OSError, ValueError) as error:  # a colour mode that Pillow cannot convert
            raise self._unreadable(sample, item, str(error)) from error

    def grid(self, item: int) -> tuple[int, int, int]:
        """(t, h, w) in patches of an item, from the index alone."""
        return self.processor(item).grid(*self._size(item))

    def row_grid(self, item: int) -> tuple[int, int, int]:
        """(t, h, w) in rows of an item, from the index alone."""
        return self.processor(item).row_grid(*self._size(item))

    def close(self) -> None:
        """Close all files. The reader can still be used: it opens them again."""
        with self._lock:
            self._open_shards.clear()

    def _size(self, item: int) -> tuple[int, int]:
        return int(self.index.item_width[item]), int(self.index.item_height[item])

    def _read(self, sample: int, item: int | None, offset: int, size: int) -> bytes:
        try:
            data = self._shard(int(self.index.shard[sample])).read(offset, size)
        except OSError as error:
            raise self._unreadable(sample, item, f"the shard cannot be read: {error}") from error
        if len(data) != size:
            raise self._unreadable(
                sample, item, f"the shard ends {size - len(data)} bytes too early: it was truncated"
            )
        return data

    def _shard(self, number: int) -> _Shard:
        with self._lock:
            shard = self._open_shards.get(number)
            if shard is None:
                shard = self._open_shards[number] = _Shard(self.index.shards[number])
            self._open_shards.move_to_end(number)
            while len(self._open_shards) > _MAX_OPEN_SHARDS:
                self._open_shards.popitem(last=False)
            return shard

    def _unreadable(self, sample: int, item: int | None, reason: str) -> UnreadableSample:
        index = self.index
        return UnreadableSample(
            index.shards[index.shard[sample]], str(index.keys[sample]), item, reason
        )


class _Shard:
    """An open file that closes itself once nobody uses it.

    Another thread may still be reading from it when it is pushed out of the cache.
    """

    def __init__(self, path: str) -> None:
        self._file = -1  # so that __del__ works when open() fails
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the end of the file; shares no file position."""
        parts: list[bytes] = []
        while size > 0:
            part = os.pread(self._file, size, offset)  # may return less than asked on network disks
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
