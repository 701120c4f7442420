"""Webdataset tar shards: the samples in one file, by byte offset.

A sample is the members that share a name up to the first dot of its last part: `<key>.json` and its
items `<key>.0.<suffix>`, `<key>.1.<suffix>`, ... in order of mention, stored uncompressed. Nothing
is ever unpacked; even so, a name that leaves its folder (`../x.json`) makes a sample unusable.

Headers may be hostile: Python's `tarfile` would follow negative sizes in circles, hold a header of
any size in memory, and nest as deep as the file says. Known are ustar, GNU long names, and the PAX
keywords `path` and `size`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from data.index.shards import Shard, ShardFile

# What is read of one sample at a time: a hostile shard must not fill the memory.
MAX_JSON_BYTES = 2**24
MAX_ITEM_BYTES = 2**29
_BLOCK = 512
_MAX_EXTENSION = 2**20  # bytes of a long name, or of a PAX header
_NO_FILES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_REGULAR = (b"0", b"\0", b"7")
_GLOBAL = b"g"


class TarError(ValueError):
    """The file is no tar file, or is damaged or truncated."""


@dataclass(frozen=True)
class TarMember:
    """A member. problem: the reason why it cannot be read as a file, or empty."""

    name: str
    offset: int
    size: int
    problem: str = ""


@dataclass
class RawSample:
    """The members of one sample, not read yet. problem: why it is unusable, or empty."""

    key: str
    json: TarMember | None = None
    items: dict[int, TarMember] = field(default_factory=dict)
    problem: str = ""


def scan_shard(shard: Shard | str, suffixes: Collection[str]) -> Iterator[RawSample]:
    """Yield the samples of a shard in the order of their first members; read only headers.

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


# ------------------------------------------------------------------------------ headers


def tar_members(read: Callable[[int, int], bytes], num_bytes: int) -> Iterator[TarMember]:
    """Yield the members of a tar file of this size, in order.

    read(offset, size): the bytes there, fewer at the end. Memory is bounded, and time by the number
    of headers. Raises TarError, also when there is no end mark.
    """
    position, extended, problem = 0, dict[bytes, bytes](), ""
    while (block := read(position, _BLOCK)) != bytes(_BLOCK):
        if len(block) < _BLOCK:
            raise TarError(f"no end mark at byte {position}")
        check = _number(block[148:156], position)
        if check != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            raise TarError(f"no header at byte {position}")
        kind, offset = block[156:157], position + _BLOCK
        size = _number(block[124:136], position)
        if kind in b"LKxXg":
            if size > _MAX_EXTENSION and kind != _GLOBAL:
                problem = f"has a header of {size} bytes, at most {_MAX_EXTENSION} are allowed"
            elif kind == b"L":
                extended[b"path"] = read(offset, size).split(b"\0", 1)[0]
            elif kind in b"xX":
                extended |= _pax_records(read(offset, size), position)
        else:
            more = kind == b"S" and block[482] != 0  # further blocks that list the file's parts
            while more:
                part = read(offset, _BLOCK)
                more, offset = len(part) == _BLOCK and part[504] != 0, offset + _BLOCK
            if b"size" in extended:
                size = _number(extended[b"size"], position, base=10)
            name = extended.get(b"GNU.sparse.name") or extended.get(b"path") or _name(block)
            is_sparse = any(key.startswith(b"GNU.sparse.") for key in extended)
            stands_for = b"S" if is_sparse else b"5" if name.endswith(b"/") else kind
            if stands_for not in _REGULAR and not problem:
                what = _NO_FILES.get(stands_for, "of an unknown kind")
                problem = f"is {what}: need the file itself"
            size = 0 if kind in b"123456" else size
            path = name.rstrip(b"/").decode("utf-8", "surrogateescape")
            yield TarMember(path, offset, size, problem)
            extended, problem = {}, ""
        position = offset + -(-size // _BLOCK) * _BLOCK
        if position > num_bytes:
            raise TarError(f"the member at byte {offset} ends after the file, with {size} bytes")
    if extended or problem:
        raise TarError(f"a long name or PAX header of no member before byte {position}")


def _number(field: bytes, position: int, base: int = 8) -> int:
    """Parse a number of a header: digits between spaces and zeros, or binary after a set bit."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    if len(digits) > 20 or digits.strip(b"0123456789"[:base]):
        raise TarError(f"no number in the header at byte {position}")
    return int(digits or b"0", base)


def _name(block: bytes) -> bytes:
    name, prefix = block[:100].split(b"\0", 1)[0], block[345:500].split(b"\0", 1)[0]
    # GNU's format keeps other things in the place of the prefix.
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _pax_records(data: bytes, position: int) -> dict[bytes, bytes]:
    """Parse records `<length> <key>=<value>` and a line break; the length counts all of it."""
    records, start = dict[bytes, bytes](), 0
    while start < len(data) and data[start]:
        space = data.find(b" ", start, start + 8)
        digits = data[start : max(space, start)]
        end = start + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end <= space + 1 or not equals or data[end - 1 : end] != b"\n":
            raise TarError(f"a damaged PAX header at byte {position}")
        records[key], start = value, end
    return records
