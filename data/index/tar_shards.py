"""Webdataset tar shards: the samples in one file, by byte offset.

A sample is the members that share a name up to the first dot of its last part: `<key>.json` and its
items `<key>.0.<suffix>`, `<key>.1.<suffix>`, ... in order of mention, whatever their media. Members
are stored uncompressed, so that any of them can be read later by one seek. Nothing is ever
unpacked; even so, a name that leaves its folder (`../x.json`) makes a sample unusable.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from data.index.shards import Shard, ShardFile
from data.index.tar_headers import TarError, TarMember, tar_members

# What is read of one sample at a time: a hostile shard must not fill the memory.
MAX_JSON_BYTES = 2**24
MAX_ITEM_BYTES = 2**29


@dataclass
class RawSample:
    """The members of one sample, not read yet. `problem`: why it cannot be used, or empty."""

    key: str
    json: TarMember | None = None
    items: dict[int, TarMember] = field(default_factory=dict)
    problem: str = ""


def scan_shard(shard: Shard | str, suffixes: Collection[str]) -> Iterator[RawSample]:
    """The samples of a shard in the order of their first members; only headers are read.

    suffixes: of items' names, in lower case and without a dot; other members are no items.
    Raises ValueError when the file is compressed, damaged or truncated, changes or cannot be read.
    """
    path = shard if isinstance(shard, str) else shard.path
    samples: dict[str, RawSample] = {}
    item_name = re.compile(
        rf"([0-9]{{1,9}})\.(?:{'|'.join(map(re.escape, suffixes))})", re.IGNORECASE
    )
    try:
        stream = ShardFile(shard).stream()

        def read(offset: int, size: int) -> bytes:
            stream.seek(offset)
            return stream.read(size)

        for member in tar_members(read, stream.size):
            _add_member(samples, member, item_name)
    except OSError as error:
        raise ValueError(f"shard {path} cannot be read: {error}") from error
    except TarError as error:
        raise ValueError(
            f"shard {path} is not a whole uncompressed tar file ({error}): it is truncated, "
            "damaged or compressed; copy it again or prepare it again"
        ) from error
    yield from samples.values()


def _add_member(
    samples: dict[str, RawSample], member: TarMember, item_name: re.Pattern[str]
) -> None:
    folder, slash, name = member.name.rpartition("/")
    stem, dot, suffix = name.partition(".")
    if not dot or not stem:  # not a sample's member: a README, or a hidden file of some archiver
        return
    item = item_name.fullmatch(suffix)
    if member.problem and not item and suffix != "json":
        return
    key = folder + slash + stem
    # What cannot be printed must not reach a terminal or a log in any message either.
    shown = key if key.isprintable() else ascii(key)[1:-1]
    sample = samples.setdefault(key, RawSample(shown))
    if key.startswith("/") or ".." in folder.split("/") or not key.isprintable():
        sample.problem = "the name leaves the folder of the shard, or has control characters"
    most = MAX_JSON_BYTES if suffix == "json" else MAX_ITEM_BYTES
    problem = member.problem or (
        f"has {member.size} bytes, at most {most} are allowed" if member.size > most else ""
    )
    if problem and (item or suffix == "json"):
        sample.problem = f"{name} {problem}"
    if suffix == "json":
        if sample.json is not None:
            sample.problem = "two .json members: keys need to be unique inside a shard"
        sample.json = member
    elif item:
        if int(item[1]) in sample.items:
            sample.problem = f"two items number {item[1]}: keys need to be unique inside a shard"
        sample.items[int(item[1])] = member
