"""Builds the index of a set of shards: tokenizes every sample, reads every item's header."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

import numpy as np

from data.index.samples import (
    DTYPES,
    Index,
    Processors,
    SkippedSample,
    index_fingerprint,
    listed,
    make_index,
)
from data.index.shards import find_shards
from data.index.tar_shards import Member, MemberFile, RawSample, scan_shard
from data.media.processor import Media, Part, PartPlan
from data.text.chat import ChatTokenizer, EncodedSample
from data.text.forms import parse_messages
from data.text.messages import Mention, MessagesError, PlaceholderError, UnknownMediaError

Progress = Callable[[int, int], None]

_PROGRESS_EVERY = 256  # samples


def build_index(
    pattern: str, chat: ChatTokenizer, processors: Processors, progress: Progress | None = None
) -> Index:
    """Scan all shards that `pattern` names: tokenize every sample, read every item's header.

    A sample with malformed JSON or messages, no answer, missing items or unreadable headers is left
    out and listed in `skipped`. processors: of the same media as the placeholders of `chat`.
    progress(done, total) counts bytes of shards.

    Raises ValueError when no shard matches, a shard is damaged, the template cannot be used, or any
    sample has an item of an unknown media or more or fewer placeholders than items (all of them are
    counted, 10 are named).
    """
    media = sorted(processors)
    assert media == sorted(chat.placeholders), "every media has a placeholder and a processor"
    shards = find_shards(pattern)
    suffixes = sorted({suffix for one in processors.values() for suffix in one.suffixes})
    fingerprint = index_fingerprint(pattern, shards, chat, processors)
    total_bytes = sum(shard.size for shard in shards)
    keys: list[str] = []
    item_counts: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in DTYPES}
    skipped: list[SkippedSample] = []
    mismatched: list[str] = []
    unknown: list[str] = []
    bytes_before = 0
    for number, shard in enumerate(shards):
        path = shard.path
        with open(path, "rb") as file:
            for count, raw in enumerate(scan_shard(path, suffixes)):
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
                first_file = len(columns["file_offset"])
                for item in read.items:
                    _append(columns, item | {"item_file": first_file + item["item_file"]})
                for file_of_sample in read.files:
                    _append(columns, file_of_sample)
                if progress is not None and count % _PROGRESS_EVERY == 0:
                    progress(bytes_before + read.sample["json_offset"], total_bytes)
        bytes_before += shard.size
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
            f'need one content part such as {{"type": "{(media or ["..."])[0]}"}} per item, or one '
            'with "frames": 8 for 8 items, and files named <key>.0.<suffix>, <key>.1.<suffix>, ... '
            f"in order of mention (suffixes: {', '.join(suffixes) or 'none'}); correct these "
            "samples or leave them out of the shards"
        )
    if problems:
        raise ValueError("\n".join(problems))
    return make_index(
        [shard.path for shard in shards], media, keys, item_counts, columns, skipped, fingerprint
    )


class _Unusable(Exception):
    """A sample that is skipped; the text is the reason."""


@dataclass(frozen=True)
class _ReadSample:
    """Columns of one sample; `item_file` counts from its own first file."""

    sample: dict[str, int]
    items: list[dict[str, float]]
    files: list[dict[str, float]]


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
        mentioned = chat.mentions(messages, raw.key)
        num_files = sum(one.frames for one in mentioned)
        if num_files != len(raw.items):
            raise PlaceholderError(raw.key, num_files, len(raw.items))
        items: list[dict[str, float]] = []
        texts: list[str] = []
        first = 0
        for one in mentioned:
            files = range(first, first + one.frames)
            part = _read_part(one, files, raw.items, file, processors[one.media])
            try:
                plan = processors[one.media].plan(part)
            except ValueError as error:
                raise _Unusable(f"item {first}: {error}") from error
            number = media.index(one.media)
            items += [_item(part, plan, first, number, k) for k in range(plan.num_items)]
            texts.append(plan.text)
            first += one.frames
        rows = [int(item["item_rows"]) for item in items]
        encoded = chat.encode(messages, rows, raw.key, texts)
    except MessagesError as error:
        raise _Unusable(str(error)) from error
    loss_tokens = count_loss_tokens(encoded)
    if loss_tokens == 0:
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        raise _Unusable(f"no message of the assistant, so nothing to learn (its roles are {roles})")
    for item, offset in zip(items, encoded.item_offsets, strict=True):
        item["item_placeholder"] = int(offset)
    sample = {
        "json_offset": raw.json.offset,
        "json_size": raw.json.size,
        "token_length": len(encoded.input_ids),
        "loss_tokens": loss_tokens,
    }
    members = [raw.items[number] for number in range(num_files)]
    return _ReadSample(
        sample, items, [{"file_offset": one.offset, "file_size": one.size} for one in members]
    )


def _read_part(
    mention: Mention,
    files: range,
    members: Mapping[int, Member],
    file: IO[bytes],
    media: Media[Any],
) -> Part:
    """The sizes of a part's files, which all need to be the same."""
    sizes = []
    for number in files:
        try:
            sizes.append(media.probe(cast(BinaryIO, MemberFile(file, members[number]))))
        except ValueError as error:
            raise _Unusable(f"item {number}: {error}") from error
        if sizes[-1] != sizes[0]:
            raise _Unusable(
                f"item {number}: a file of {media.size_text(sizes[-1])} in a {mention.media} that "
                f"begins with one of {media.size_text(sizes[0])}: need files of one size"
            )
    return Part(sizes[0], mention.frames, mention.fps)


def _item(part: Part, plan: PartPlan, first_file: int, media: int, number: int) -> dict[str, float]:
    """Columns of the number-th item of a part, except its placeholder."""
    return {
        "item_media": media,
        "item_number": number,
        "item_file": first_file,
        "item_frames": part.frames,
        "item_fps": part.fps,
        "item_size_0": part.size[0],
        "item_size_1": part.size[1],
        "item_rows": plan.num_rows,
        "item_cost": plan.cost,
    }


def count_loss_tokens(sample: EncodedSample) -> int:
    """Tokens of a sample that the loss counts."""
    return int(np.count_nonzero(sample.loss_mask))


def _append(columns: dict[str, list[float]], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        columns[name].append(value)
