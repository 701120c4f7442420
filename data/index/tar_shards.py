"""Webdataset tar shards: the samples in one file, by byte offset.

A sample is the members that share a name up to the first dot of its last part: `<key>.json` and its
items `<key>.0.<suffix>`, `<key>.1.<suffix>`, ... in order of mention, whatever their media. Members
are stored uncompressed, so that any of them can be read later by one seek. Nothing is ever
unpacked; even so, a name that leaves its folder (`../x.json`) makes a sample unusable.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import IO, cast

from data.index.block_cache import BlockCache
from data.index.shards import Shard, ShardChangedError, ShardFile, ShardStream

_TAR_BLOCK = 512
_MAX_HEADER = 2**20  # bytes that the headers of one member may take
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
}


@dataclass(frozen=True)
class Member:
    """One file inside a shard: `size` bytes from byte `offset` of the tar file."""

    offset: int
    size: int


@dataclass
class RawSample:
    """The members of one sample, not read yet. `problem`: why it cannot be used, or empty."""

    key: str
    json: Member | None = None
    items: dict[int, Member] = field(default_factory=dict)
    problem: str = ""


class _Headers:
    """A shard as tarfile reads it. A damaged header may not ask for all of it."""

    def __init__(self, stream: ShardStream) -> None:
        self.seek, self.tell, self._read = stream.seek, stream.tell, stream.read
        self.left = _MAX_HEADER

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.left:
            raise tarfile.ReadError(f"a header of more than {_MAX_HEADER} bytes")
        self.left -= size
        return self._read(size)


def scan_shard(
    shard: Shard | str, suffixes: Collection[str], cache: BlockCache | None = None
) -> Iterator[RawSample]:
    """The samples of a shard in the order of their first members; only headers are read.

    suffixes: of items' names, in lower case and without a dot; other members are no items. cache:
    of `ShardFile`.
    Raises ValueError when the file is compressed, damaged or truncated, changes or cannot be read.
    """
    path = shard if isinstance(shard, str) else shard.path
    samples: dict[str, RawSample] = {}
    item_name = re.compile(rf"(\d+)\.(?:{'|'.join(map(re.escape, suffixes))})", re.IGNORECASE)
    try:
        stream = ShardFile(shard, cache).stream()
        headers, end = _Headers(stream), 0
        # "r:" refuses compressed files, inside which a byte offset would mean nothing.
        with tarfile.open(fileobj=cast(IO[bytes], headers), mode="r:") as tar:
            for member in tar:
                _add_member(samples, member, item_name)
                # tarfile keeps every header; a large shard would hold millions.
                tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                if member.size < 0 or not end < tar.offset <= stream.size:
                    raise tarfile.ReadError(f"{member.name!r} has no end inside the file")
                headers.left, end = _MAX_HEADER, tar.offset
        # tarfile stops quietly at a damaged header; a whole file has a block of zeros there.
        stream.seek(end)
        if stream.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
            raise tarfile.ReadError(f"no end mark at byte {end}")
    except ShardChangedError:
        raise
    except OSError as error:
        raise ValueError(f"shard {path} cannot be read: {error}") from error
    # What tarfile raises for numbers and names that are none.
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    yield from samples.values()


def _add_member(
    samples: dict[str, RawSample], member: tarfile.TarInfo, item_name: re.Pattern[str]
) -> None:
    folder, slash, name = member.name.rpartition("/")
    stem, dot, suffix = name.partition(".")
    if not dot or not stem:  # not a sample's member: a README, or a hidden file of some archiver
        return
    item = item_name.fullmatch(suffix)
    kind = _KINDS.get(member.type, "a sparse file" if member.issparse() else "")
    if kind and not item and suffix != "json":
        return
    key = folder + slash + stem
    sample = samples.setdefault(key, RawSample(key))
    if key.startswith("/") or ".." in folder.split("/") or not key.isprintable():
        sample.problem = "the name leaves the folder of the shard, or has control characters"
    elif kind or not member.isfile():
        sample.problem = f"{name} is {kind or 'of an unknown kind'}: need the file itself"
    place = Member(member.offset_data, member.size)
    if suffix == "json":
        if sample.json is not None:
            sample.problem = "two .json members: keys need to be unique inside a shard"
        sample.json = place
    elif item:
        if int(item[1]) in sample.items:
            sample.problem = f"two items number {item[1]}: keys need to be unique inside a shard"
        sample.items[int(item[1])] = place


def _damaged(path: str, reason: str) -> ValueError:
    return ValueError(
        f"shard {path} is not a whole uncompressed tar file ({reason}): it is truncated, damaged "
        "or compressed; copy it again or prepare it again"
    )
