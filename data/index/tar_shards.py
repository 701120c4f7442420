"""Webdataset tar shards: the samples in one file, by byte offset.

A sample is the members that share a name up to the first dot of its last part: `<key>.json` and its
items `<key>.0.<suffix>`, `<key>.1.<suffix>`, ... in order of mention. Nothing is ever unpacked.
"""

import re
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from data.index.shards import Shard, ShardFile

# What is read of one sample at a time: a hostile shard must not fill the memory.
MAX_JSON_BYTES = 2**24
MAX_ITEM_BYTES = 2**29
_MAX_HEADER = 2**20  # bytes, with long names


class TarError(ValueError):
    """The file is no tar file, or is damaged or truncated."""


@dataclass(frozen=True)
class TarMember:
    """A member."""

    name: str
    offset: int
    size: int
    problem: str = ""  # the reason why it cannot be read as a file


@dataclass
class RawSample:
    """The members of one sample, not read yet. problem: why it is unusable, or empty."""

    key: str
    json: TarMember | None = None
    items: dict[int, TarMember] = field(default_factory=dict)
    problem: str = ""


def scan_shard(shard: Shard, suffixes: Collection[str]) -> Iterator[RawSample]:
    """Yield the samples of a shard in the order of their first members; read only headers.

    suffixes: of items' names, in lower case and without a dot; other members are no items.
    Raises ValueError when the file is compressed, damaged or truncated, changes or cannot be read.
    """
    samples: dict[str, RawSample] = {}
    item_name = re.compile(
        rf"([0-9]{{1,9}})\.(?:{'|'.join(map(re.escape, suffixes))})", re.IGNORECASE
    )
    try:
        for member in tar_members(ShardFile(shard).stream()):
            _add_member(samples, member, item_name)
    except OSError as error:
        raise ValueError(f"shard {shard.path} cannot be read: {error}") from error
    except TarError as error:
        raise ValueError(
            f"shard {shard.path} is not a whole uncompressed tar file ({error}): it is truncated, "
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


def tar_members(file: Any) -> Iterator[TarMember]:
    """Yield the members in order, in bounded memory. Raises TarError, also without an end mark."""

    def read(size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise TarError(f"a header of {size} bytes, at most {_MAX_HEADER} are allowed")
        return file.read(size)

    headers: Any = SimpleNamespace(seek=file.seek, tell=file.tell, read=read)
    try:
        with tarfile.open(fileobj=headers, mode="r:", encoding="utf-8") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # else all stay in memory  # pyright: ignore
                if tar.offset < member.offset_data:
                    raise TarError(f"a negative size at byte {member.offset}")
                yield TarMember(member.name, member.offset_data, member.size, _problem(member))
            file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise TarError(f"neither a header nor an end mark at byte {tar.offset}")
    except (TarError, OSError):
        raise
    except Exception as error:  # of any type, as headers may be hostile
        raise TarError(f"{type(error).__name__}: {error}") from error


def _problem(member: tarfile.TarInfo) -> str:
    is_sparse = any(key.startswith("GNU.sparse.") for key in member.pax_headers)
    if is_sparse or member.issparse():
        return "is a sparse file: need the file itself"
    if member.isreg():
        return ""
    kind = "a link" if member.linkname else "a folder, a device or a pipe"
    return f"is {kind}: need the file itself"
