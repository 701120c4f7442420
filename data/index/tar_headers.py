"""The members of a tar file by byte offset, read from its headers alone, however hostile they are.

Knows ustar, GNU long names, and the PAX keywords `path` and `size`. Python's `tarfile` would follow
negative sizes in circles, hold a header of any size in memory, and nest as deep as the file says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    """A member. problem: why it is no file that can be read, or empty."""

    name: str
    offset: int
    size: int
    problem: str = ""


def tar_members(read: Callable[[int, int], bytes], num_bytes: int) -> Iterator[TarMember]:
    """The members of a tar file of this size, in order.

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
    """A number of a header: digits between spaces and zeros, or binary if the first bit is set."""
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
    """Records of the form `<length> <key>=<value>` and a line break; length is of all of it."""
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
