"""The global index of a set of shards: everything the batches are planned from, without decoding.

Built once per set of shards (index_store.py keeps it beside them). Letters: `n` samples, `m` items
(images) of all samples, in order; the items of sample i are item_start[i] .. item_start[i + 1] - 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import IO, BinaryIO, cast

import numpy as np

from data.chat import ChatTokenizer, EncodedSample, MessagesError, PlaceholderError
from data.images import ImageProcessor, image_size
from data.tar_shards import Member, MemberFile, RawSample, match_shards, pattern_root, scan_shard

Progress = Callable[[int, int], None]

INDEX_VERSION = 1  # raise it whenever the arrays or their meaning change
_SHOWN = 10  # bad samples named in one message
_PROGRESS_EVERY = 256  # samples


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
    keys: np.ndarray  # (n,) str
    shard: np.ndarray  # (n,) int32, into shards
    json_offset: np.ndarray  # (n,) int64, byte in the shard
    json_size: np.ndarray  # (n,) int64, bytes
    token_length: np.ndarray  # (n,) int32, images expanded
    loss_tokens: np.ndarray  # (n,) int32
    item_start: np.ndarray  # (n + 1,) int64, into the item arrays
    item_offset: np.ndarray  # (m,) int64, byte in the shard
    item_size: np.ndarray  # (m,) int64, bytes
    item_width: np.ndarray  # (m,) int32, pixels, before resizing
    item_height: np.ndarray  # (m,) int32, pixels, before resizing
    item_rows: np.ndarray  # (m,) int32, placeholder tokens
    item_placeholder: np.ndarray  # (m,) int32, first placeholder inside its sample's tokens
    item_cost: np.ndarray  # (m,) int64, see ImageProcessor.cost
    skipped: tuple[SkippedSample, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_items(self) -> int:
        """Images of all samples together."""
        return len(self.item_offset)

    def sample_of_item(self, item: int) -> int:
        """The sample that an item belongs to."""
        return int(np.searchsorted(self.item_start, item, side="right")) - 1


# dtypes of the arrays, for building and for loading: one entry per array field of Index.
SAMPLE_DTYPES = {
    "shard": np.int32,
    "json_offset": np.int64,
    "json_size": np.int64,
    "token_length": np.int32,
    "loss_tokens": np.int32,
}
ITEM_DTYPES = {
    "item_offset": np.int64,
    "item_size": np.int64,
    "item_width": np.int32,
    "item_height": np.int32,
    "item_rows": np.int32,
    "item_placeholder": np.int32,
    "item_cost": np.int64,
}


def make_index(
    shards: Sequence[str],
    keys: Sequence[str],
    item_counts: Sequence[int] | np.ndarray,
    columns: dict[str, list[int]] | dict[str, np.ndarray],
    skipped: Sequence[SkippedSample],
    fingerprint: str,
) -> Index:
    """An Index from columns of any integer type; item_counts (n,) are the images per sample."""
    item_start = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum(np.asarray(item_counts, dtype=np.int64), out=item_start[1:])
    arrays = {name: np.asarray(columns[name], dtype=dtype) for name, dtype in SAMPLE_DTYPES.items()}
    arrays |= {name: np.asarray(columns[name], dtype=dtype) for name, dtype in ITEM_DTYPES.items()}
    return Index(
        shards=tuple(shards),
        keys=np.array(keys, dtype=str),
        item_start=item_start,
        skipped=tuple(skipped),
        fingerprint=fingerprint,
        **arrays,
    )


def index_fingerprint(
    pattern: str, shards: Sequence[str], chat: ChatTokenizer, processor: ImageProcessor
) -> str:
    """Hex digest of all that an index depends on: tokenizer, template, processor, shards.

    Shards count by name and size, not by path, so that a data folder can be moved.
    """
    root = pattern_root(pattern)
    files = [(os.path.relpath(path, root), os.path.getsize(path)) for path in shards]
    parts = (INDEX_VERSION, chat.fingerprint(), processor.fingerprint(), files)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def build_index(
    pattern: str, chat: ChatTokenizer, processor: ImageProcessor, progress: Progress | None = None
) -> Index:
    """Scan all shards that `pattern` names: tokenize every sample, read every image's header.

    A sample with malformed JSON or messages, missing images or unreadable image headers is left out
    and listed in `skipped`. progress(done, total) counts bytes of shards.

    Raises ValueError when no shard matches, a shard is damaged, the template cannot be used, or any
    sample has more or fewer image placeholders than images (all of them are counted, 10 are named).
    """
    shards = match_shards(pattern)
    fingerprint = index_fingerprint(pattern, shards, chat, processor)
    total_bytes = sum(os.path.getsize(path) for path in shards)
    keys: list[str] = []
    item_counts: list[int] = []
    columns: dict[str, list[int]] = {name: [] for name in (*SAMPLE_DTYPES, *ITEM_DTYPES)}
    skipped: list[SkippedSample] = []
    mismatched: list[str] = []
    bytes_before = 0
    for number, path in enumerate(shards):
        with open(path, "rb") as file:
            for count, raw in enumerate(scan_shard(path)):
                try:
                    read = _read_sample(raw, file, chat, processor)
                except PlaceholderError as error:
                    mismatched.append(f"{path}: {error.key}: {error.placeholders} / {error.images}")
                    continue
                except _Unusable as error:
                    skipped.append(SkippedSample(path, raw.key, str(error)))
                    continue
                keys.append(raw.key)
                item_counts.append(len(read.items))
                _append(columns, {"shard": number, **read.sample})
                for item in read.items:
                    _append(columns, item)
                if progress is not None and count % _PROGRESS_EVERY == 0:
                    progress(bytes_before + read.sample["json_offset"], total_bytes)
        bytes_before += os.path.getsize(path)
        if progress is not None:
            progress(bytes_before, total_bytes)
    if mismatched:
        raise ValueError(
            f"{len(mismatched)} samples have more or fewer image placeholders than images (shard: "
            f"key: placeholders / images):\n  {_listed(mismatched)}\n"
            'need one content part {"type": "image"} per image, and images named <key>.0.png, '
            "<key>.1.png, ...; correct these samples or leave them out of the shards"
        )
    return make_index(shards, keys, item_counts, columns, skipped, fingerprint)


def check_lengths(index: Index, sequence_length: int) -> None:
    """Raise ValueError when samples are longer than `sequence_length` tokens.

    They are never truncated: a cut image has fewer placeholders than rows.
    """
    too_long = np.flatnonzero(index.token_length > sequence_length)
    if len(too_long):
        named = [
            f"{index.shards[index.shard[i]]}: {index.keys[i]}: {index.token_length[i]} tokens"
            for i in too_long[:_SHOWN]
        ]
        raise ValueError(
            f"{len(too_long)} of {len(index)} samples are longer than sequence_length "
            f"{sequence_length}; the longest has {index.token_length.max()} tokens:\n  "
            f"{_listed(named, len(too_long))}\nraise data.sequence_length, lower max_pixels of the "
            "image processor, or leave them out of the shards (samples are never truncated)"
        )


class _Unusable(Exception):
    """A sample that is skipped; the text is the reason."""


@dataclass(frozen=True)
class _ReadSample:
    sample: dict[str, int]
    items: list[dict[str, int]]


def _read_sample(
    raw: RawSample, file: IO[bytes], chat: ChatTokenizer, processor: ImageProcessor
) -> _ReadSample:
    if raw.problem:
        raise _Unusable(raw.problem)
    if raw.json is None:
        raise _Unusable("no .json member")
    if sorted(raw.images) != list(range(len(raw.images))):
        raise _Unusable(f"images are numbered {sorted(raw.images)}, need 0, 1, 2, ...")
    file.seek(raw.json.offset)
    try:
        messages = parse_messages(file.read(raw.json.size))
    except ValueError as error:
        raise _Unusable(str(error)) from error
    items = [
        _read_item(number, raw.images[number], file, processor) for number in range(len(raw.images))
    ]
    try:
        encoded = chat.encode(messages, [item["item_rows"] for item in items], raw.key)
    except MessagesError as error:
        raise _Unusable(str(error)) from error
    for item, offset in zip(items, encoded.image_offsets, strict=True):
        item["item_placeholder"] = int(offset)
    sample = {
        "json_offset": raw.json.offset,
        "json_size": raw.json.size,
        "token_length": len(encoded.input_ids),
        "loss_tokens": count_loss_tokens(encoded),
    }
    return _ReadSample(sample, items)


def _read_item(
    number: int, member: Member, file: IO[bytes], processor: ImageProcessor
) -> dict[str, int]:
    try:
        width, height = image_size(cast(BinaryIO, MemberFile(file, member)))
        rows, cost = processor.num_tokens(width, height), processor.cost(width, height)
    except ValueError as error:
        raise _Unusable(f"image {number}: {error}") from error
    return {
        "item_offset": member.offset,
        "item_size": member.size,
        "item_width": width,
        "item_height": height,
        "item_rows": rows,
        "item_cost": cost,
    }


def parse_messages(data: bytes) -> list[dict[str, object]]:
    """The messages of a sample's JSON member; their form is checked when they are encoded.

    Raises ValueError when it is not a JSON object with `messages`.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {error}") from error
    if not isinstance(document, dict) or "messages" not in document:
        raise ValueError('the JSON member needs to be an object with "messages"')
    return document["messages"]


def count_loss_tokens(sample: EncodedSample) -> int:
    """Tokens of a sample that the loss counts."""
    return int(np.count_nonzero(sample.loss_mask))


def _append(columns: dict[str, list[int]], values: dict[str, int]) -> None:
    for name, value in values.items():
        columns[name].append(value)


def _listed(lines: list[str], total: int | None = None) -> str:
    total = len(lines) if total is None else total
    shown = lines[:_SHOWN]
    return "\n  ".join(shown) + (
        f"\n  ... and {total - len(shown)} more" if total > len(shown) else ""
    )


_ARRAY_FIELDS = {field.name for field in fields(Index)} - {"shards", "skipped", "fingerprint"}
assert {"keys", "item_start", *SAMPLE_DTYPES, *ITEM_DTYPES} == _ARRAY_FIELDS
