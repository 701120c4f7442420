"""Index shards: tokenize every sample, read every item's header."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from data.index.samples import Processors, listed
from data.index.shard_index import COLUMNS, write_shard_index
from data.index.shards import Shard, ShardChangedError, ShardFile, ShardStream
from data.index.tar_shards import RawSample, TarMember, scan_shard
from data.modalities.processor import Media, Part, PartPlan, ProcessorError
from data.text.chat import ChatTokenizer, ItemRows
from data.text.forms import parse_messages
from data.text.messages import Mention, PlaceholderError, UnknownMediaError
from data.text.outputs import split_outputs

Progress = Callable[[int, int], None]

_PROGRESS_EVERY = 256  # samples


@dataclass(frozen=True)
class IndexTask:
    """A shard to index, the file to write, and the fingerprint of the settings."""

    shard: Shard
    file: Path
    settings: str


@dataclass
class Problems:
    """Problems that kept shards from being indexed."""

    lines: dict[str, list[str]] = field(default_factory=dict)  # by kind
    causes: list[OSError] = field(default_factory=list)  # one for each shard not readable

    def add(self, kind: str, line: str, cause: BaseException | None = None) -> None:
        self.merge(Problems({kind: [line]}, [cause] if isinstance(cause, OSError) else []))

    def merge(self, other: "Problems") -> None:
        for kind, lines in other.lines.items():
            self.lines.setdefault(kind, []).extend(lines)
        self.causes += other.causes

    def raise_any(self, processors: Processors) -> None:
        """Raise ValueError if there are any problems, from their OSError if all have the same."""
        if not self.lines:
            return
        media, made = split_outputs(sorted(processors))
        suffixes = ", ".join(_suffixes(processors)) or "none"
        makers, example = "", [*media, *made, "..."][0]
        if made:
            makers = f", and the generators make {', '.join(made)} in an assistant's message"
        remedies = {
            "unknown": (
                "samples have items of a modality that no encoder takes (shard: key: modality)",
                f"the encoders take {', '.join(media) or 'none'}{makers}; give one of them this "
                "modality, or correct or leave out these samples",
            ),
            "mismatched": (
                "samples have more or fewer placeholders than items (shard: key: placeholders / "
                "items)",
                f'need one content part such as {{"type": "{example}"}} per item, or one with '
                '"frames": 8 for 8 items, and files named <key>.0.<suffix>, <key>.1.<suffix>, ... '
                f"in order of mention (suffixes: {suffixes}); correct these "
                "samples or leave them out of the shards",
            ),
            "processor": (
                "samples have items that their processor contradicts itself about (shard: key: "
                "reason)",
                "use a version of transformers whose processor agrees with its model",
            ),
        }
        texts = [
            f"{len(self.lines[kind])} {what}:\n  {listed(self.lines[kind])}\n{fix}"
            for kind, (what, fix) in remedies.items()
            if kind in self.lines
        ]
        if "shard" in self.lines:
            texts.append(listed(self.lines["shard"]))
        alike = len({error.errno for error in self.causes}) == 1
        alike = alike and len(self.causes) == sum(map(len, self.lines.values()))
        raise ValueError("\n".join(texts)) from self.causes[0] if alike else None


def build_here(
    tasks: Sequence[IndexTask],
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
) -> None:
    """Index shards, one after the other; `progress(done, total)` counts their bytes.

    Raises ValueError when a shard is damaged or has samples that would be misread (see Problems);
    the other shards are still indexed.
    """
    index_shards(tasks, chat, processors, progress).raise_any(processors)


def index_shards(
    tasks: Sequence[IndexTask],
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
) -> Problems:
    """Index shards one after the other in this process, and return the problems."""
    problems, done, total = Problems(), 0, sum(task.shard.size for task in tasks)
    for task in tasks:

        def show(position: int, before: int = done) -> None:
            if progress is not None:
                progress(before + position, total)

        problems.merge(index_shard(task, chat, processors, show))
        done += task.shard.size
        show(0, done)
    return problems


def index_shard(
    task: IndexTask, chat: ChatTokenizer, processors: Processors, progress: Callable[[int], None]
) -> Problems:
    """Tokenize every sample of a shard, read every item's header, and write its index file.

    An unusable sample is left out, with its reason. processors: of the same modalities as the
    placeholders and outputs of `chat`. progress(position): bytes of the shard that are done.
    Returns the problems; with any, no file is written. Raises OSError when it cannot be written.
    """
    texts = sorted([*chat.placeholders, *chat.outputs])
    assert sorted(processors) == texts, "every modality has its tokens"
    path, problems, text_tokens = task.shard.path, Problems(), 0
    columns: dict[str, array[Any]] = {
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
                sample, items, files = _read_sample(raw, file, chat, processors)
            except PlaceholderError as error:
                line = f"{path}: {error.key}: {error.placeholders} / {error.items}"
                problems.add("mismatched", line)
            except UnknownMediaError as error:
                problems.add("unknown", f"{path}: {error.key}: {_short(error.media)}")
            except ProcessorError as error:
                problems.add("processor", f"{path}: {raw.key}: {error}")
            except ShardChangedError:
                raise
            except (ValueError, RecursionError) as error:
                skipped.append((raw.key, _short(str(error))))
            else:
                keys += raw.key.encode()
                text_tokens += int(sample.pop("text_tokens"))
                sample |= {"item_start": len(columns["item_rows"]), "key_end": len(keys)}
                first_file = len(columns["file_size"])
                for item in items:
                    item["item_file"] += first_file
                for row in (sample, *items, *files):
                    for name, value in row.items():
                        columns[name].append(value)
    except (ValueError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        problems.add("shard", str(error), cause)
    if not problems.lines:
        arrays = {name: np.array(values) for name, values in columns.items()}
        arrays["keys"] = np.frombuffer(bytes(keys), np.uint8)
        write_shard_index(task.file, task.settings, task.shard, arrays, skipped, text_tokens)
    return problems


def _suffixes(processors: Processors) -> list[str]:
    return sorted({suffix for modality in processors.values() for suffix in modality.suffixes})


_Row = dict[str, float]  # a number for each column of a sample, an item or a file


def _read_sample(
    raw: RawSample, file: ShardStream, chat: ChatTokenizer, processors: Processors
) -> tuple[_Row, list[_Row], list[_Row]]:
    """Read a sample, its items and its files; `item_file` counts from the sample's first file.

    The row of the sample also has `text_tokens`, which no column stores.

    Raises ValueError or RecursionError for an unusable sample, PlaceholderError and
    UnknownMediaError for one that would be misread.
    """
    if raw.problem or raw.json is None:
        raise ValueError(raw.problem or "no .json member")
    if sorted(raw.items) != list(range(len(raw.items))):
        raise ValueError(f"items are numbered {sorted(raw.items)}, need 0, 1, 2, ...")
    file.seek(raw.json.offset)
    messages = parse_messages(file.read(raw.json.size))
    mentioned = chat.mentions(messages, raw.key)
    num_files = sum(mention.frames for mention in mentioned)
    if num_files != len(raw.items):
        raise PlaceholderError(raw.key, num_files, len(raw.items))
    members = [raw.items[number] for number in range(num_files)]
    items: list[_Row] = []
    texts: list[str] = []
    rows: list[ItemRows] = []
    first = num_padding = 0
    for mention in mentioned:
        part, plan = _read_part(mention, first, members, file, processors[mention.media])
        columns = {
            "item_media": sorted(processors).index(mention.media),
            "item_file": first,
            "item_frames": part.frames,
            "item_fps": part.fps,
            "item_size_0": part.size[0],
            "item_size_1": part.size[1],
            "item_cost": plan.cost,
        }
        items += [{**columns, "item_number": number} for number in range(plan.num_items)]
        texts.append(plan.text)
        rows += plan.rows_of_items
        num_padding += plan.num_rows if plan.is_output else 0
        first += mention.frames
    encoded = chat.encode(messages, rows, raw.key, texts)
    loss_tokens = int(np.count_nonzero(encoded.loss_mask))
    if loss_tokens == 0:
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        raise ValueError(
            f"no message of the assistant, so nothing to learn (its roles are {roles})"
        )
    # Not by `strict`: its ValueError would make the sample a bad one.
    assert len(items) == len(encoded.item_offsets), f"{raw.key}: an item without a place"
    for item, offset, count in zip(items, encoded.item_offsets, encoded.item_rows, strict=True):
        item |= {"item_placeholder": int(offset), "item_rows": int(count)}
    standing = sum(sum(count) if isinstance(count, tuple) else count for count in rows)
    unknown = encoded.input_ids.tolist().count(chat.unknown_token_id)
    if chat.unknown_token_id == chat.pad_token_id:
        unknown -= num_padding
    sample: _Row = {
        "json_offset": raw.json.offset,
        "json_size": raw.json.size,
        "token_length": len(encoded.input_ids),
        "loss_tokens": loss_tokens,
        "text_tokens": len(encoded.input_ids) - standing,
        "unknown_tokens": unknown,
    }
    files: list[_Row] = [{"file_offset": m.offset, "file_size": m.size} for m in members]
    return sample, items, files


def _read_part(
    mention: Mention, first: int, members: Sequence[TarMember], file: ShardStream, media: Media[Any]
) -> tuple[Part, PartPlan]:
    """Read a part, whose files must have one size. first: number of its first file."""
    number, sizes = first, []
    try:
        for number in range(first, first + mention.frames):
            member = file.member(members[number].offset, members[number].size)
            sizes.append(media.probe(cast(BinaryIO, member)))
            if sizes[-1] != sizes[0]:
                raise ValueError(
                    f"a file of {media.size_text(sizes[-1])} in a {mention.media} that begins with "
                    f"one of {media.size_text(sizes[0])}: need files of one size"
                )
        number, part = first, Part(sizes[0], mention.frames, mention.fps)
        return part, media.plan(part)
    except (ShardChangedError, ProcessorError):
        raise
    except ValueError as error:
        raise ValueError(f"item {number}: {error}") from error


def _short(text: str) -> str:
    """Make a text from a sample printable and at most 1000 characters long."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:1000])
