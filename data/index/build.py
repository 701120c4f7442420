"""Indexes shards: tokenizes every sample, reads every item's header."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from data.index.samples import Processors, listed
from data.index.shard_index import COLUMNS, write_shard_index
from data.index.shards import Shard, ShardFile, ShardStream
from data.index.tar_shards import Member, RawSample, scan_shard
from data.media.processor import Media, Part, PartPlan
from data.text.chat import ChatTokenizer, EncodedSample
from data.text.forms import parse_messages
from data.text.messages import Mention, MessagesError, PlaceholderError, UnknownMediaError

Progress = Callable[[int, int], None]

_PROGRESS_EVERY = 256  # samples
_NAMED = 10  # samples of a kind of problem that are kept by name


@dataclass(frozen=True)
class IndexTask:
    """A shard to index, the file to write, and the fingerprint of the settings."""

    shard: Shard
    file: Path
    settings: str


@dataclass
class Problems:
    """What kept shards from being indexed: how many there are of each kind, and the first ones."""

    counts: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, line: str) -> None:
        """One more."""
        self.merge(Problems({kind: 1}, {kind: [line]}))

    def merge(self, other: Problems) -> None:
        """Those of other shards."""
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            self.lines[kind] = (self.lines.get(kind, []) + other.lines[kind])[:_NAMED]

    def text(self, chat: ChatTokenizer, processors: Processors) -> str:
        """What to tell the user; empty if there are none."""
        media = sorted(processors)
        suffixes = ", ".join(_suffixes(processors)) or "none"
        remedies = {
            "unknown": (
                "samples have items of a media that no encoder takes (shard: key: media)",
                f"the encoders take {', '.join(media) or 'none'}; give one of them this media, or "
                "correct or leave out these samples",
            ),
            "mismatched": (
                "samples have more or fewer placeholders than items (shard: key: placeholders / "
                "items)",
                f'need one content part such as {{"type": "{(media or ["..."])[0]}"}} per item, or '
                'one with "frames": 8 for 8 items, and files named <key>.0.<suffix>, '
                f"<key>.1.<suffix>, ... in order of mention (suffixes: {suffixes}); correct these "
                "samples or leave them out of the shards",
            ),
        }
        found = [
            f"{self.counts[kind]} {what}:\n  {listed(self.lines[kind], self.counts[kind])}\n{fix}"
            for kind, (what, fix) in remedies.items()
            if kind in self.counts
        ]
        if "shard" in self.counts:
            found.append(listed(self.lines["shard"], self.counts["shard"]))
        return "\n".join(found)


def build_here(
    tasks: Sequence[IndexTask],
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
) -> None:
    """Index shards, one after the other; `progress(done, total)` counts their bytes.

    Raises ValueError when a shard is damaged or has samples that would be misread (see Problems);
    the other shards are indexed all the same.
    """
    problems, done, total = Problems(), 0, sum(task.shard.size for task in tasks)
    for task in tasks:

        def show(position: int, before: int = done) -> None:
            if progress is not None:
                progress(before + position, total)

        problems.merge(index_shard(task, chat, processors, show))
        done += task.shard.size
        show(task.shard.size)
    if text := problems.text(chat, processors):
        raise ValueError(text)


def index_shard(
    task: IndexTask,
    chat: ChatTokenizer,
    processors: Processors,
    progress: Callable[[int], None] = lambda position: None,
) -> Problems:
    """Tokenize every sample of a shard, read every item's header, and write its index file.

    A sample with malformed JSON or messages, no answer, missing items or unreadable headers is left
    out, with its reason. processors: of the same media as the placeholders of `chat`.
    progress(position) now and then: bytes of the shard that are done.

    Returns its problems; with any, no file is written. Raises OSError when that cannot be.
    """
    media = sorted(processors)
    assert media == sorted(chat.placeholders), "every media has a placeholder and a processor"
    path, problems = task.shard.path, Problems()
    columns = {
        name: array("d" if name == "item_fps" else "q")
        for name, of in COLUMNS.items()
        if of != "bytes"
    }
    keys, skipped = bytearray(), list[tuple[str, str]]()
    try:
        file = ShardFile(task.shard).stream()
        for count, raw in enumerate(scan_shard(task.shard, _suffixes(processors))):
            if count % _PROGRESS_EVERY == 0 and raw.json is not None:
                progress(raw.json.offset)
            try:
                read = _read_sample(raw, file, chat, processors, media)
            except PlaceholderError as error:
                line = f"{path}: {error.key}: {error.placeholders} / {error.items}"
                problems.add("mismatched", line)
                continue
            except UnknownMediaError as error:
                problems.add("unknown", f"{path}: {error.key}: {_short(error.media)}")
                continue
            except _Unusable as error:
                skipped.append((raw.key, _short(str(error))))
                continue
            keys += raw.key.encode()
            first_item, first_file = len(columns["item_rows"]), len(columns["file_size"])
            place = {"item_start": first_item, "key_end": len(keys)}
            _append(columns, [place | read.sample])
            items = [one | {"item_file": first_file + one["item_file"]} for one in read.items]
            _append(columns, items)
            _append(columns, read.files)
    except (ValueError, OSError) as error:
        problems.add("shard", str(error))
    if not problems.counts:
        arrays: dict[str, np.ndarray] = {
            name: np.array(values, np.float64 if name == "item_fps" else np.int64)
            for name, values in columns.items()
        }
        arrays["keys"] = np.frombuffer(bytes(keys), np.uint8)
        write_shard_index(task.file, task.settings, task.shard, arrays, skipped)
    return problems


def _suffixes(processors: Processors) -> list[str]:
    """Of the names of items."""
    return sorted({suffix for one in processors.values() for suffix in one.suffixes})


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
    file: ShardStream,
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
    except (MessagesError, RecursionError) as error:
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
    file: ShardStream,
    media: Media[Any],
) -> Part:
    """The sizes of a part's files, which all need to be the same."""
    sizes = []
    for number in files:
        try:
            member = file.member(members[number].offset, members[number].size)
            sizes.append(media.probe(cast(BinaryIO, member)))
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


def _short(text: str) -> str:
    """A text that may be a sample's own in a message: printable, and not pages of it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:1000])


def count_loss_tokens(sample: EncodedSample) -> int:
    """Tokens of a sample that the loss counts."""
    return int(np.count_nonzero(sample.loss_mask))


def _append(columns: Mapping[str, array[Any]], rows: Iterable[Mapping[str, float]]) -> None:
    for row in rows:
        for name, value in row.items():
            columns[name].append(value)
