"""Builds the index of a set of shards: tokenizes every sample, reads every item's header."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

import numpy as np

from data.chat import ChatTokenizer, EncodedSample
from data.images import image_size
from data.index import (
    ITEM_DTYPES,
    SAMPLE_DTYPES,
    Index,
    Processors,
    SkippedSample,
    index_fingerprint,
    listed,
    make_index,
)
from data.messages import MessagesError, PlaceholderError, UnknownMediaError
from data.processor import ItemProcessor
from data.tar_shards import Member, MemberFile, RawSample, match_shards, scan_shard

Progress = Callable[[int, int], None]

_PROGRESS_EVERY = 256  # samples


def build_index(
    pattern: str, chat: ChatTokenizer, processors: Processors, progress: Progress | None = None
) -> Index:
    """Scan all shards that `pattern` names: tokenize every sample, read every item's header.

    A sample with malformed JSON or messages, missing items or unreadable headers is left out and
    listed in `skipped`. processors: of the same media as the placeholders of `chat`.
    progress(done, total) counts bytes of shards.

    Raises ValueError when no shard matches, a shard is damaged, the template cannot be used, or any
    sample has an item of an unknown media or more or fewer placeholders than items (all of them are
    counted, 10 are named).
    """
    media = sorted(processors)
    assert media == sorted(chat.placeholders), "every media has a placeholder and a processor"
    shards = match_shards(pattern)
    fingerprint = index_fingerprint(pattern, shards, chat, processors)
    total_bytes = sum(os.path.getsize(path) for path in shards)
    keys: list[str] = []
    item_counts: list[int] = []
    columns: dict[str, list[int]] = {name: [] for name in (*SAMPLE_DTYPES, *ITEM_DTYPES)}
    skipped: list[SkippedSample] = []
    mismatched: list[str] = []
    unknown: list[str] = []
    bytes_before = 0
    for number, path in enumerate(shards):
        with open(path, "rb") as file:
            for count, raw in enumerate(scan_shard(path)):
                try:
                    read = _read_sample(raw, file, chat, processors, media)
                except PlaceholderError as error:
                    mismatched.append(f"{path}: {error.key}: {error.placeholders} / {error.items}")
                    continue
                except UnknownMediaError as error:
                    unknown.append(f"{path}: {error.key}: {error.media}")
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
    problems = []
    if unknown:
        problems.append(
            f"{len(unknown)} samples have items of a media that no encoder takes (shard: key: "
            f"media):\n  {listed(unknown)}\nthe encoders take {', '.join(media) or 'none'}; give "
            "one of them this media, or correct or leave out these samples"
        )
    if mismatched:
        problems.append(
            f"{len(mismatched)} samples have more or fewer placeholders than items (shard: key: "
            f"placeholders / items):\n  {listed(mismatched)}\n"
            'need one content part such as {"type": "image"} per item, and items named '
            "<key>.0.png, <key>.1.png, ... in order of mention; correct these samples or leave "
            "them out of the shards"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return make_index(shards, media, keys, item_counts, columns, skipped, fingerprint)


class _Unusable(Exception):
    """A sample that is skipped; the text is the reason."""


@dataclass(frozen=True)
class _ReadSample:
    sample: dict[str, int]
    items: list[dict[str, int]]


def _read_sample(
    raw: RawSample,
    file: IO[bytes],
    chat: ChatTokenizer,
    processors: Processors,
    media: Sequence[str],
) -> _ReadSample:
    if raw.problem:
        raise _Unusable(raw.problem)
    if raw.json is None:
        raise _Unusable("no .json member")
    if sorted(raw.items) != list(range(len(raw.items))):
        raise _Unusable(f"items are numbered {sorted(raw.items)}, need 0, 1, 2, ...")
    file.seek(raw.json.offset)
    try:
        messages = parse_messages(file.read(raw.json.size))
    except ValueError as error:
        raise _Unusable(str(error)) from error
    try:
        mentioned = chat.media_of_items(messages, raw.key)
        if len(mentioned) != len(raw.items):
            raise PlaceholderError(raw.key, len(mentioned), len(raw.items))
        items = [
            _read_item(number, raw.items[number], file, processors[one])
            for number, one in enumerate(mentioned)
        ]
        encoded = chat.encode(messages, [item["item_rows"] for item in items], raw.key)
    except MessagesError as error:
        raise _Unusable(str(error)) from error
    for item, one, offset in zip(items, mentioned, encoded.item_offsets, strict=True):
        item |= {"item_media": media.index(one), "item_placeholder": int(offset)}
    sample = {
        "json_offset": raw.json.offset,
        "json_size": raw.json.size,
        "token_length": len(encoded.input_ids),
        "loss_tokens": count_loss_tokens(encoded),
    }
    return _ReadSample(sample, items)


def _read_item(
    number: int, member: Member, file: IO[bytes], processor: ItemProcessor
) -> dict[str, int]:
    try:
        width, height = image_size(cast(BinaryIO, MemberFile(file, member)))
        rows, cost = processor.num_tokens(width, height), processor.cost(width, height)
    except ValueError as error:
        raise _Unusable(f"item {number}: {error}") from error
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
