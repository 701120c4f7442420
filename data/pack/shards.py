"""Packs rows and their files into shards, which appear once all are written.

Equal rows give equal bytes.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.index.tar_shards import MAX_JSON_BYTES
from data.modalities.audio import AudioClips
from data.modalities.image_files import image_size
from data.pack.rows import Row, find_files, read_rows
from data.text.forms import Embedded, parse_messages, read_chat
from data.text.messages import ROLES, mentions, short_text

BAD_SAMPLES = "bad_samples.jsonl"
_SHARD = "shard-{:06d}.tar"
_OURS = re.compile(r"shard-\d{6,}\.tar|bad_samples\.jsonl")
_UNFINISHED = ".packing"  # folder of the shards until all are written
_MAX_FILE = 256 * 2**20  # bytes
_MAX_REASON = 1000  # characters
_ENOUGH_ROWS = 1000  # before a share of bad ones says anything
_TAR_BLOCK = 512
_KINDS = {  # of files, by how they begin
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"RIFF....WEBP": "webp",
    b"RIFF....WAVE": "wav",
}


@dataclass(frozen=True)
class ShardSize:
    """A shard ends before it would have more samples, or more bytes. None: any number."""

    samples: int | None = None
    bytes: int | None = 512 * 2**20

    @classmethod
    def parse(cls, text: str) -> ShardSize:
        """From `2000`, a number of samples, or `512MiB`. Raises ValueError."""
        found = re.fullmatch(r"([1-9]\d{0,8})(MiB)?", text)
        if not found:
            raise ValueError(f"--shard-size {text!r}: need samples, as 2000, or a size, as 512MiB")
        number = int(found[1])
        return cls(None, number * 2**20) if found[2] else cls(number, None)


@dataclass
class Packed:
    """What was packed. first_bad: where the first row that was left out is, and why."""

    samples: int = 0
    files: int = 0
    shards: int = 0
    bad: int = 0
    first_bad: str = ""


def pack(
    source: str,
    out: Path,
    media_root: Path | None = None,
    size: ShardSize = ShardSize(),
    max_bad_fraction: float = 0.01,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Write the rows of JSON, JSON Lines or Parquet files as shards into the folder `out`.

    media_root: the folder that files are named in, outside of which none is read; default: that of
    `source`. A row that cannot be used is left out and listed in `out`/bad_samples.jsonl.
    overwrite: replace what a former call wrote. progress(done, total) counts thousandths of files.

    Raises ValueError for a folder that is not empty, a source that cannot be read on, or too many
    bad rows. Then no shard is added or replaced, and only the list of bad rows is left.
    """
    files, folder = find_files(source)
    media = MediaFolder(folder if media_root is None else media_root)
    out.mkdir(parents=True, exist_ok=True)
    if not overwrite and {path.name for path in out.iterdir()} - {BAD_SAMPLES, _UNFINISHED}:
        raise ValueError(f"{out} is not empty: give another folder, or --overwrite")
    packed, rows = Packed(), 0
    with _all_or_nothing(out) as folder, _Writer(folder, size, packed) as writer:
        for number, file in enumerate(files):
            for row in read_rows(file):
                try:
                    sample = _sample(row, f"{rows:09d}", media)
                except (ValueError, TypeError, RecursionError) as error:
                    _list_bad(folder, row, str(error), packed)
                else:
                    packed.files += len(sample) - 2
                    writer.write(sample)
                rows += 1
                if packed.bad > max_bad_fraction * max(rows, _ENOUGH_ROWS):
                    raise _too_many(packed, rows, max_bad_fraction, out)
                if progress is not None:
                    progress(int(1000 * (number + row.done)), 1000 * len(files))
        if packed.bad > max_bad_fraction * rows or not packed.samples:
            raise _too_many(packed, rows, max_bad_fraction, out)
    return packed


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """A folder whose files replace those of a former call in ``out`` at the end.

    After an error only the list of bad rows does.
    """
    folder = out / _UNFINISHED
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed
    folder.mkdir()
    try:
        yield folder
        former = [path for path in out.iterdir() if _OURS.fullmatch(path.name)]
        # Catalogs of indexes would ask for shards that are no longer there.
        for path in (*former, *out.glob(".index/*/*.catalog")):
            path.unlink()
        for path in sorted(folder.iterdir()):
            path.replace(out / path.name)
    except BaseException:
        if (bad := folder / BAD_SAMPLES).exists():
            bad.replace(out / BAD_SAMPLES)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _too_many(packed: Packed, rows: int, limit: float, out: Path) -> ValueError:
    listed = f", the first {packed.first_bad} (all are in {out / BAD_SAMPLES})"
    return ValueError(
        f"{packed.bad} of {rows} rows cannot be used{listed if packed.bad else ''}; need at least "
        f"one that can, and at most a share of {limit:g}: correct them, or raise --max-bad-fraction"
    )


def _list_bad(out: Path, row: Row, reason: str, packed: Packed) -> None:
    packed.bad += 1
    reason = reason[:_MAX_REASON]
    packed.first_bad = packed.first_bad or f"{row.file}, row {row.number}: {reason}"
    with (out / BAD_SAMPLES).open("a", encoding="utf-8") as file:
        line = {"file": row.file, "row": row.number, "reason": reason}
        file.write(json.dumps(line) + "\n")


def _sample(row: Row, key: str, media: MediaFolder) -> dict[str, str | bytes]:
    """A row for the tar writer, in our form.

    Raises ValueError, RecursionError, and TypeError for bytes inside a message.
    """
    if row.problem:
        raise ValueError(row.problem)
    chat = read_chat(row.document)
    mentioned = mentions(chat.messages, key)
    unknown = [message["role"] for message in chat.messages if message["role"] not in ROLES]
    if unknown:
        raise ValueError(f"the role {short_text(unknown[0])} is unknown; use {', '.join(ROLES)}")
    if chat.left:
        raise ValueError(f"it has files that no message mentions ({', '.join(chat.left)})")
    kinds = [one.media for one in mentioned for _ in range(one.frames)]
    tools = chat.messages[0].pop("tools", None)
    document = {"messages": chat.messages} | ({"tools": tools} if tools else {})
    sample: dict[str, str | bytes] = {"__key__": key}
    for number, (kind, given) in enumerate(zip(kinds, chat.files, strict=True)):
        try:
            suffix, data = media.read(kind, given)
        except ValueError as error:
            raise ValueError(f"file {number}: {error}") from error
        sample[f"{number}.{suffix}"] = data
    sample["json"] = text = json.dumps(document, ensure_ascii=False).encode()
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"its chat has {len(text)} bytes, at most {MAX_JSON_BYTES} are read")
    parse_messages(text)  # what no reader would take is not packed
    return sample


class MediaFolder:
    """The folder that rows name files in; nothing outside of it is read."""

    def __init__(self, root: Path) -> None:
        self.root, self._real = root, os.path.realpath(root)
        if not os.path.isdir(self._real):
            raise ValueError(f"the media root {root} is no folder: correct --media-root")

    def read(self, kind: str, given: Any) -> tuple[str, bytes]:
        """Suffix and bytes of a file as a row names it, or has it. Raises ValueError."""
        if isinstance(given, Mapping):  # Hugging Face's: {"bytes": ..., "path": ...}
            given = given.get("path") if given.get("bytes") is None else given["bytes"]
        if isinstance(given, Embedded):
            if len(given.data) > _MAX_FILE * 4 // 3:
                raise ValueError(f"has more than {_MAX_FILE >> 20} MiB")
            try:
                given = base64.b64decode(given.data, validate=True)
            except ValueError as error:
                raise ValueError(f"is not Base64: {error}") from error
        data = given if isinstance(given, bytes) else self._of_path(given)
        if len(data) > _MAX_FILE:
            raise ValueError(f"has more than {_MAX_FILE >> 20} MiB")
        AudioClips().probe(io.BytesIO(data)) if kind == "audio" else image_size(data)
        found = (name for start, name in _KINDS.items() if re.match(start, data, re.DOTALL))
        return next(found), data

    def _of_path(self, given: object) -> bytes:
        if not isinstance(given, str) or not given:
            raise ValueError("the row does not say which file it is")
        if re.match(r"[a-z][a-z0-9+.-]*://", given, re.IGNORECASE):
            raise ValueError(
                f"{given[:200]!r} is a URL: nothing is downloaded; fetch the files first"
            )
        parts = re.split(r"[/\\]", given)
        if os.path.isabs(given) or ".." in parts or not given.isprintable() or ":" in parts[0]:
            raise ValueError(f"{given[:200]!r}: need a path inside --media-root, without `..`")
        path = os.path.realpath(os.path.join(self._real, given))
        if os.path.commonpath([path, self._real]) != self._real:
            raise ValueError(f"{given!r} is a link that leaves the media root")
        if not os.path.isfile(path):
            raise ValueError(
                f"{given!r} is no file in {self.root}; --media-root names the folder of the files"
            )
        try:
            with open(path, "rb") as file:
                return file.read(_MAX_FILE + 1)
        except OSError as error:
            raise ValueError(f"{given!r} cannot be read: {error}") from error


class _Writer:
    """Writes numbered shards into a folder. packed: counts samples and shards."""

    def __init__(self, folder: Path, size: ShardSize, packed: Packed) -> None:
        self._folder, self._size, self._packed = folder, size, packed
        self._tar: Any = None
        self._samples = self._bytes = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def write(self, sample: dict[str, str | bytes]) -> None:
        from webdataset.writer import TarWriter  # here: it imports torch

        members = [value for value in sample.values() if isinstance(value, bytes)]
        size = sum(_TAR_BLOCK - -len(one) // _TAR_BLOCK * _TAR_BLOCK for one in members)
        limits = ((self._samples + 1, self._size.samples), (self._bytes + size, self._size.bytes))
        if self._samples and any(limit and value > limit for value, limit in limits):
            self._end()
        if self._tar is None:
            path = self._folder / _SHARD.format(self._packed.shards)
            # Fixed owner and time: equal rows give equal bytes.
            self._tar = TarWriter(str(path), encoder=False, mtime=0, user="data", group="data")
            self._packed.shards += 1
        self._tar.write(sample)
        self._samples, self._bytes = self._samples + 1, self._bytes + size
        self._packed.samples += 1

    def _end(self) -> None:
        if self._tar is not None:
            self._tar.close()
        self._tar, self._samples, self._bytes = None, 0, 0
