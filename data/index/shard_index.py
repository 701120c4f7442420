"""The index of one shard: a file of columns, complete in itself.

It says which version of the shard it is of and which settings it was made with, so nothing else
needs to be asked whether it is current. Numbers of items and files count from the shard's first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from data.index.columns import BYTES, SPEC, ColumnFile, DamagedFileError, write_columns
from data.index.shards import Shard

COLUMNS = {  # what it has an entry for
    "json_offset": "samples",  # byte in the shard
    "json_size": "samples",  # bytes
    "token_length": "samples",  # items expanded
    "loss_tokens": "samples",
    "item_start": "samples",  # first item
    "key_end": "samples",  # byte in keys
    "item_media": "items",  # into the media, sorted by name
    "item_number": "items",  # among the items of its part
    "item_file": "items",  # first file of its part
    "item_frames": "items",  # files of its part
    "item_fps": "items",  # frames per second
    "item_size_0": "items",  # of each file of its part: the first number of its Size
    "item_size_1": "items",  # the second
    "item_rows": "items",  # placeholder tokens
    "item_placeholder": "items",  # first placeholder inside its sample's tokens
    "item_cost": "items",  # see PartPlan.cost
    "file_offset": "files",  # byte in the shard
    "file_size": "files",  # bytes
    "keys": "bytes",  # all keys, one after another
    "skipped": "bytes",  # JSON: [key, reason] of each sample that cannot be used
}
NAMES = tuple(COLUMNS)

ENTRY = np.dtype(  # all that a catalog knows of a shard's index
    [
        *((of, "<i8") for of in ("samples", "items", "files", "skipped")),
        *((most, "<i8") for most in ("most_tokens", "most_rows")),
        *((of_file, "<i8") for of_file in ("file_size", "file_time", "head_size")),
        ("head_crc", "<u4"),
        ("columns", SPEC, (len(NAMES),)),
    ]
)
_COUNTS = ("samples", "items", "files", "skipped", "most_tokens", "most_rows")
_BLOCK = 512  # bytes of a tar file that a sample or a file takes at least
_PIECE = 2**16  # entries looked at together
_MAX_ITEMS = 2**12  # that a file may become


def write_shard_index(
    path: Path,
    settings: str,
    shard: Shard,
    columns: Mapping[str, np.ndarray],
    skipped: Sequence[tuple[str, str]],
) -> None:
    """Write the index of a shard.

    settings: fingerprint. columns: all of COLUMNS but `skipped`. skipped: keys and reasons.
    Raises OSError.
    """
    starts, rows = columns["item_start"], columns["item_rows"]
    before = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
    rows = np.diff(before[np.append(starts, len(rows))])
    facts = {
        "settings": settings,
        "shard_size": shard.size,
        "shard_version": shard.version,
        "samples": len(starts),
        "items": len(columns["item_rows"]),
        "files": len(columns["file_size"]),
        "skipped": len(skipped),
        "most_tokens": int(columns["token_length"].max(initial=0)),
        "most_rows": int(rows.max(initial=0)),
    }
    text = json.dumps(skipped).encode() if skipped else b""
    columns = {**columns, "skipped": np.frombuffer(text, np.uint8)}
    write_columns(path, facts, {name: columns[name] for name in NAMES})


def read_entry(path: Path, settings: str, shard: Shard, num_media: int) -> np.void | None:
    """(ENTRY) the index of a shard, all of it checked; None if it is of another version of it.

    Raises OSError if there is none, DamagedFileError.
    """
    file = ColumnFile(path)
    facts = file.facts
    made_of = (facts.get("settings"), facts.get("shard_size"), facts.get("shard_version"))
    if made_of != (settings, shard.size, shard.version):
        return None
    file.check()
    entry = np.zeros(1, ENTRY)[0]
    try:
        for name in _COUNTS:
            if type(facts[name]) is not int or not 0 <= facts[name] < 2**53:
                raise ValueError(f"{name} is {facts[name]!r}")
            entry[name] = facts[name]
        for number, (name, of) in enumerate(COLUMNS.items()):
            spec = file.specs[name]
            if of == "bytes" and spec["dtype"] != BYTES:
                raise ValueError(f"{name} is no text")
            if of != "bytes" and spec["count"] != facts[of]:
                raise ValueError(f"{spec['count']} entries of {name} for {facts[of]} {of}")
            entry["columns"][number] = spec
        _check_values(file, shard, num_media)
    except (KeyError, ValueError) as error:
        raise DamagedFileError(path, str(error)) from error
    status = path.stat()
    entry["file_size"], entry["file_time"] = len(file.bytes), status.st_mtime_ns
    entry["head_size"], entry["head_crc"] = file.head_size, file.head_crc
    return entry


def _check_values(file: ColumnFile, shard: Shard, num_media: int) -> None:
    """Raise ValueError for numbers that would lead out of the file or of the shard."""
    facts = file.facts
    samples, items, files = facts["samples"], facts["items"], facts["files"]
    if max(samples, files) * _BLOCK > shard.size or items > files * _MAX_ITEMS:
        raise ValueError(f"{samples} samples, {files} files, {items} items in {shard.size} bytes")
    _check_ascending(file, "item_start", items)
    _check_ascending(file, "key_end", int(file.specs["keys"]["count"]))
    for name, most in {
        "token_length": facts["most_tokens"],
        "loss_tokens": facts["most_tokens"],
        "item_rows": facts["most_rows"],
        "item_placeholder": facts["most_tokens"],
        "item_media": num_media - 1,
    }.items():
        _check_most(file, (name,), most)
    _check_most(file, ("json_offset", "json_size"), shard.size)
    _check_most(file, ("file_offset", "file_size"), shard.size)
    _check_most(file, ("item_file", "item_frames"), files)
    if items and file.values("item_start", 0, 1)[0] != 0:
        raise ValueError("item_start does not begin with 0")
    skipped = json.loads(file.values("skipped").tobytes() or b"[]")
    if len(skipped) != facts["skipped"] or not all(
        len(one) == 2 and all(isinstance(text, str) for text in one) for one in skipped
    ):
        raise ValueError("skipped samples are malformed")


def _pieces(file: ColumnFile, name: str) -> Iterator[np.ndarray]:
    for start in range(0, int(file.specs[name]["count"]), _PIECE):
        yield file.values(name, start, start + _PIECE).astype(np.float64)


def _check_most(file: ColumnFile, names: Sequence[str], most: int) -> None:
    """The sum of these columns is at most ``most``, and none is negative."""
    for pieces in zip(*(_pieces(file, name) for name in names), strict=True):
        if min(piece.min() for piece in pieces) < 0 or np.sum(pieces, axis=0).max() > most:
            raise ValueError(f"{' + '.join(names)} is outside 0..{most}")


def _check_ascending(file: ColumnFile, name: str, most: int) -> None:
    last = 0
    for piece in _pieces(file, name):
        if piece[0] < last or np.any(np.diff(piece) < 0) or piece[-1] > most:
            raise ValueError(f"{name} does not ascend to {most} at most")
        last = piece[-1]
