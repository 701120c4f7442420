"""The rows of JSON, JSON Lines and Parquet files, one after the other."""

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

_MAX_LINE = 64 * 2**20  # bytes
_MAX_ARRAY = 2**30  # bytes
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
        with open(file, "rb") as opened:
            is_array = opened.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
            opened.seek(0)
            yield from (_of_array if is_array else _of_lines)(opened, file)
    except OSError as error:  # pyarrow's own errors are OSError or ValueError
        raise ValueError(f"{file} cannot be read: {error}") from error


def _of_lines(opened: IO[bytes], file: str) -> Iterator[Row]:
    size, number = os.path.getsize(file), 0
    while line := opened.readline(_MAX_LINE + 1):
        number += 1
        document, problem = None, ""
        if len(line) > _MAX_LINE:
            problem = f"has more than {_MAX_LINE >> 20} MiB"
            while line and not line.endswith(b"\n"):
                line = opened.readline(_MAX_LINE)
        elif not line.strip():
            continue
        else:
            try:
                document = json.loads(line, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                problem = f"malformed JSON: {error}"
        yield Row(file, number, document, opened.tell() / size, problem)


def _of_array(opened: IO[bytes], file: str) -> Iterator[Row]:
    """The elements of an array; the file is in memory as a text, and one element of it decoded.

    With its text, which takes up to four times its bytes, it has a limit.
    """
    if (size := os.path.getsize(file)) > _MAX_ARRAY:
        raise ValueError(
            f"{file}: an array of {size >> 20} MiB would have to be in memory as a whole, at most "
            f"{_MAX_ARRAY >> 20} are read; write one row to a line (JSON Lines), or several files"
        )
    number, problems = 0, list[str]()  # of an element, which ends where it ends all the same

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return unique_keys(pairs)
        except ValueError as error:
            problems.append(str(error))
            return {}

    decoder = json.JSONDecoder(object_pairs_hook=read_object)
    try:
        text = opened.read().decode("utf-8-sig")
        place, mark = _behind_space(text, 0), "["
        while text[place : place + 1] == mark:
            place = _behind_space(text, place + 1)
            if mark == "[" and text[place : place + 1] == "]":
                return
            problems.clear()
            document, place = decoder.raw_decode(text, place)
            number += 1
            yield Row(file, number, document, place / len(text), "; ".join(problems[:1]))
            place, mark = _behind_space(text, place), ","
        if text[place : place + 1] != "]":
            raise ValueError("no comma or end of the array")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file}, after element {number}: {error}; nothing after it was read"
        ) from error


def _behind_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


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
