"""Convert JSON, JSON Lines and Parquet with their files into shards, all or none.

Equal rows give equal bytes.
"""

import base64
import codecs
import glob
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data.index.shards import pattern_root
from data.index.tar_shards import MAX_JSON_BYTES
from data.modalities.audio import AudioClips
from data.modalities.image_files import image_size
from data.text.forms import Embedded, parse_messages, read_chat
from data.text.messages import ROLES, mentions, short_text

_BATCH = 16  # rows of Parquet that are in memory, beside the row group they come from
_SUFFIXES = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    """A row of a file."""

    file: str
    number: int  # in its file, from 1; the line in JSON Lines
    document: Any
    done: float  # share of the file's bytes or rows up to this one
    problem: str = ""  # the reason for no document


def find_files(source: str) -> tuple[list[str], Path]:
    """Return the files that a path, folder or glob names, and their folder. Raises ValueError."""
    path = Path(source)
    if path.is_dir():
        files, folder = [str(file) for file in path.rglob("*.parquet")], path
    else:
        matches = [source] if path.is_file() else glob.glob(source, recursive=True)
        files, folder = list(filter(os.path.isfile, matches)), Path(pattern_root(source))
    wrong = [file for file in files if not file.lower().endswith(_SUFFIXES)]
    if wrong or not files:
        raise ValueError(
            f"{wrong[0] if wrong else source!r}: need a file or pattern that ends with "
            f"{', '.join(_SUFFIXES)}, or a folder with Parquet files"
        )
    return sorted(files), folder


def read_rows(file: str) -> Iterator[Row]:
    """Yield the rows of a file. Raises ValueError where reading fails."""
    try:
        if file.lower().endswith(".parquet"):
            yield from _of_parquet(file)
            return
        with open(file, "rb") as opened:
            is_array = opened.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
            opened.seek(0)
            if not is_array:
                yield from _of_lines(opened, file)
                return
            documents = json.load(opened)
            for number, document in enumerate(documents, 1):
                yield Row(file, number, document, number / len(documents))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _of_lines(opened: IO[bytes], file: str) -> Iterator[Row]:
    size, done = os.path.getsize(file), 0
    for number, line in enumerate(opened, 1):
        done += len(line)
        if not line.strip():
            continue
        document, problem = None, ""
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"malformed JSON: {error}"
        yield Row(file, number, document, done / size, problem)


def _of_parquet(file: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            rows = max(opened.metadata.num_rows, 1)
            for batch in opened.iter_batches(batch_size=_BATCH, use_threads=False):
                for document in batch.to_pylist():
                    number += 1
                    yield Row(file, number, document, number / rows)
    except pyarrow.ArrowException as error:
        raise ValueError(f"after row {number}: {error}") from error


BAD_SAMPLES = "bad_samples.jsonl"
_OURS = re.compile(r"shard-\d{6,}\.tar|bad_samples\.jsonl")
_UNFINISHED = ".packing"  # folder of the shards until all are written
_MAX_FILE = 256 * 2**20  # bytes
_MAX_REASON = 1000  # characters
_ENOUGH_ROWS = 1000  # before a share of bad ones says anything
_KINDS = {  # of files, by how they begin
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"RIFF....WEBP": "webp",
    b"RIFF....WAVE": "wav",
}


def parse_shard_size(text: str) -> dict[str, int]:
    """Parse `2000` (samples) or `512MiB` into an argument of `pack`. Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d{0,8})(MiB)?", text)
    if not match:
        raise ValueError(f"--shard-size {text!r}: need samples, as 2000, or a size, as 512MiB")
    number = int(match[1])
    return {"max_bytes": number * 2**20} if match[2] else {"max_samples": number}


@dataclass
class Packed:
    """Counts of a call."""

    samples: int = 0
    files: int = 0
    shards: int = 0
    bad: int = 0
    first_bad: str = ""  # place of the first omitted row, and the reason


def pack(
    source: str,
    out: Path,
    media_root: Path | None = None,
    max_bad_fraction: float = 0.01,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    max_samples: int = sys.maxsize,
    max_bytes: int = sys.maxsize,
) -> Packed:
    """Write the rows of JSON, JSON Lines or Parquet files as shards into the folder `out`.

    media_root: the folder of the files, outside of which none is read; default: that of `source`.
    An unusable row is left out and listed in `out`/bad_samples.jsonl. overwrite: replace the shards
    of an earlier call. progress(done, total) counts thousandths of files. A shard ends once it has
    ``max_samples``, or members of ``max_bytes``. Raises ValueError for a folder that is not empty,
    an unreadable source, or too many bad rows; then only the list of bad rows is written.
    """
    from webdataset.writer import ShardWriter  # late: it imports torch

    files, source_folder = find_files(source)
    root = os.path.realpath(source_folder if media_root is None else media_root)
    if not os.path.isdir(root):
        raise ValueError(f"the media root {media_root} is no folder: correct --media-root")
    out.mkdir(parents=True, exist_ok=True)
    if not overwrite and {path.name for path in out.iterdir()} - {BAD_SAMPLES, _UNFINISHED}:
        raise ValueError(f"{out} is not empty: give another folder, or --overwrite")
    packed, rows = Packed(), 0
    # Fixed owner and time: equal rows give equal bytes.
    fixed = {"encoder": False, "mtime": 0, "user": "data", "group": "data", "verbose": 0}
    with (
        _all_or_nothing(out) as folder,
        ShardWriter(f"{folder}/shard-%06d.tar", max_samples, max_bytes, **fixed) as writer,
    ):
        for number, file in enumerate(files):
            for row in read_rows(file):
                try:
                    sample = _sample(row, f"{rows:09d}", root)
                except (ValueError, TypeError, RecursionError) as error:
                    _list_bad(folder, row, str(error), packed)
                else:
                    packed.files += len(sample) - 2
                    packed.samples += 1
                    writer.write(sample)
                rows += 1
                if packed.bad > max_bad_fraction * max(rows, _ENOUGH_ROWS):
                    raise _too_many(packed, rows, max_bad_fraction, out)
                if progress is not None:
                    progress(int(1000 * (number + row.done)), 1000 * len(files))
        if packed.bad > max_bad_fraction * rows or not packed.samples:
            raise _too_many(packed, rows, max_bad_fraction, out)
        packed.shards = writer.shard
    return packed


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a folder whose files replace those of an earlier call at the end, unless it fails."""
    folder = out / _UNFINISHED
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed call
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
        file.write(json.dumps({"file": row.file, "row": row.number, "reason": reason}) + "\n")


def _sample(row: Row, key: str, root: str) -> dict[str, str | bytes]:
    """Convert a row for the tar writer. Raises ValueError, RecursionError, TypeError."""
    if row.problem:
        raise ValueError(row.problem)
    chat = read_chat(row.document)
    mentioned = mentions(chat.messages, key)
    unknown = [message["role"] for message in chat.messages if message["role"] not in ROLES]
    if unknown:
        raise ValueError(f"the role {short_text(unknown[0])} is unknown; use {', '.join(ROLES)}")
    if chat.left:
        raise ValueError(f"it has files that no message mentions ({', '.join(chat.left)})")
    kinds = [mention.media for mention in mentioned for _ in range(mention.frames)]
    tools = chat.messages[0].pop("tools", None)
    document = {"messages": chat.messages} | ({"tools": tools} if tools else {})
    sample: dict[str, str | bytes] = {"__key__": key}
    for number, (kind, file) in enumerate(zip(kinds, chat.files, strict=True)):
        try:
            suffix, data = _read_file(root, kind, file)
        except ValueError as error:
            raise ValueError(f"file {number}: {error}") from error
        sample[f"{number}.{suffix}"] = data
    sample["json"] = text = json.dumps(document, ensure_ascii=False).encode()
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"its chat has {len(text)} bytes, at most {MAX_JSON_BYTES} are read")
    parse_messages(text)  # raises what a reader would raise
    return sample


def _read_file(root: str, kind: str, value: Any) -> tuple[str, bytes]:
    """Return suffix and bytes of a file that a row names or contains. Raises ValueError."""
    if isinstance(value, Mapping):  # Hugging Face's: {"bytes": ..., "path": ...}
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, Embedded):
        try:
            value = base64.b64decode(value.data, validate=True)
        except ValueError as error:
            raise ValueError(f"is not Base64: {error}") from error
    data = value if isinstance(value, bytes) else _read_path(root, value)
    if len(data) > _MAX_FILE:
        raise ValueError(f"has more than {_MAX_FILE >> 20} MiB")
    AudioClips().probe(io.BytesIO(data)) if kind == "audio" else image_size(data)
    suffixes = (name for start, name in _KINDS.items() if re.match(start, data, re.DOTALL))
    return next(suffixes), data


def _read_path(root: str, name: object) -> bytes:
    if not isinstance(name, str) or not name:
        raise ValueError("the row does not say which file it is")
    if re.match(r"[a-z][a-z0-9+.-]*://", name, re.IGNORECASE):
        raise ValueError(f"{name[:200]!r} is a URL: nothing is downloaded; fetch the files first")
    path = os.path.realpath(os.path.join(root, name))
    if os.path.commonpath([path, root]) != root:
        raise ValueError(f"{name!r} is outside of the media root: need a path inside of it")
    if not os.path.isfile(path):
        raise ValueError(
            f"{name!r} is no file in {root}; --media-root names the folder of the files"
        )
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ValueError(f"{name!r} cannot be read: {error}") from error
