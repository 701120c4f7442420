"""The rows of JSON, JSON Lines and Parquet files, one after the other in bounded memory."""

from __future__ import annotations

import codecs
import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data.index.shards import pattern_root
from data.text.forms import unique_keys

_MAX_ROW = 64 * 2**20  # bytes of JSON, or characters of an element
_CHUNK = 2**20
_BATCH = 16  # rows of Parquet that are in memory, beside the row group they come from
_SUFFIXES = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    """number: in its file, from 1; of JSON Lines, the line. problem: why there is no document.

    done: how far this is in its file, as a share of its bytes or rows.
    """

    file: str
    number: int
    document: Any
    done: float
    problem: str = ""


def find_files(source: str) -> tuple[list[str], Path]:
    """The files that a path, a folder of Parquet files or a glob pattern names, and their folder.

    Raises ValueError when there are none, or some are of another kind.
    """
    path = Path(source)
    if path.is_dir():
        files, folder = [str(one) for one in path.rglob("*.parquet")], path
    else:
        found = [source] if path.is_file() else glob.glob(source, recursive=True)
        files, folder = [one for one in found if os.path.isfile(one)], Path(pattern_root(source))
    wrong = [one for one in files if not one.lower().endswith(_SUFFIXES)]
    if wrong or not files:
        raise ValueError(
            f"{wrong[0] if wrong else source!r}: need a file or pattern that ends with "
            f"{', '.join(_SUFFIXES)}, or a folder with Parquet files"
        )
    return sorted(files), folder


def read_rows(file: str) -> Iterator[Row]:
    """The rows of a file. Raises ValueError where it cannot be read any further."""
    try:
        if file.lower().endswith(".parquet"):
            yield from _of_parquet(file)
            return
        size = max(os.path.getsize(file), 1)
        with open(file, "rb") as opened:
            if opened.read(3) != b"\xef\xbb\xbf":  # a byte order mark
                opened.seek(0)
            start = opened.tell()
            is_array = opened.read(4096).lstrip()[:1] == b"["
            opened.seek(start)
            yield from (_of_array if is_array else _of_lines)(opened, file, size)
    except OSError as error:  # pyarrow's own errors are OSError or ValueError
        raise ValueError(f"{file} cannot be read: {error}") from error


def _of_lines(opened: IO[bytes], file: str, size: int) -> Iterator[Row]:
    number = 0
    while line := opened.readline(_MAX_ROW + 1):
        number += 1
        too_long = len(line) > _MAX_ROW
        while too_long and line and not line.endswith(b"\n"):
            line = opened.readline(_MAX_ROW)
        document, problem = None, f"has more than {_MAX_ROW >> 20} MiB" if too_long else ""
        if not too_long:
            if not line.strip():
                continue
            try:
                document = json.loads(line, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                problem = f"malformed JSON: {error}"
        yield Row(file, number, document, opened.tell() / size, problem)


def _of_array(opened: IO[bytes], file: str, size: int) -> Iterator[Row]:
    """The elements of an array; of the file, hardly more than one of them is in memory."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    text, number, ended = "", 0, False
    problems: list[str] = []  # of the element, which ends where it ends all the same

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return unique_keys(pairs)
        except ValueError as error:
            problems.append(str(error))
            return {}

    scan = json.JSONDecoder(object_pairs_hook=read_object).raw_decode

    def more(least: int) -> None:
        nonlocal text, ended
        data = opened.read(least)
        ended = not data
        text = (text + decode(data, ended)).lstrip()

    def fail(problem: object) -> ValueError:
        return ValueError(f"{file}, after element {number}: {problem}; nothing after it was read")

    try:
        while True:
            while not text and not ended:
                more(_CHUNK)
            if text[:1] == "]" and number:
                return
            if text[:1] != ("," if number else "["):
                raise fail("no comma or end of the array")
            text = text[1:].lstrip()
            while True:
                if not number and text[:1] == "]":
                    return
                problems.clear()
                try:
                    document, end = scan(text) if text else (None, 0)
                except json.JSONDecodeError as error:
                    if ended or len(text) > _MAX_ROW:
                        raise fail(f"malformed JSON or too large a row ({error})") from error
                    end = 0
                if end and (end < len(text) or ended):
                    break
                if ended:
                    raise fail("the file is cut off")
                more(max(_CHUNK, len(text)))
            number, text = number + 1, text[end:].lstrip()
            yield Row(file, number, document, opened.tell() / size, "; ".join(problems[:1]))
    except (UnicodeDecodeError, RecursionError) as error:
        raise fail(error) from error


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
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file}, after row {number}: it cannot be read: {error}") from error
