"""Damaged and hostile input: members of tar files, images, sounds and texts, built byte by byte."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data.modalities.audio import wav_bytes

END = bytes(1024)


def header(name: bytes, num_bytes: int, kind: bytes = b"0", **fields: bytes) -> bytes:
    """A ustar header. fields: of `size`, `checksum` and `link` as they are to stand there."""
    block = bytearray(512)
    block[:100] = name[:100].ljust(100, b"\0")
    block[100:124] = b"0000644\0" + b"0000000\0" * 2
    block[124:136] = fields.get("size", b"%011o\0" % num_bytes)
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[157:257] = fields.get("link", b"").ljust(100, b"\0")
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = fields.get("checksum", b"%06o\0 " % sum(block))
    return bytes(block)


def member(name: str | bytes, data: bytes, kind: bytes = b"0", **fields: bytes) -> bytes:
    raw = name if isinstance(name, bytes) else name.encode()
    return header(raw, len(data), kind, **fields) + data + bytes(-len(data) % 512)


def pax(**values: str) -> bytes:
    records = b""
    for key, value in values.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest)
        while len(str(length).encode() + rest) != length:
            length = len(str(length).encode() + rest)
        records += str(length).encode() + rest
    return member("pax", records, b"x")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *before: bytes, pixels: bytes = b"", behind: bytes = b"") -> bytes:
    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", pixels or zlib.compress(bytes((width + 1) * height)))
    return b"\x89PNG\r\n\x1a\n" + start + b"".join(before) + body + behind + chunk(b"IEND", b"")


def saved(file_format: str, width: int = 28, height: int = 28, **options: object) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, file_format, **options)  # pyright: ignore
    return buffer.getvalue()


def bomb(keyword: bytes) -> bytes:
    """100 MB of zeros, compressed, after what stands before them in a chunk."""
    return keyword + zlib.compress(bytes(10**8), 9)


def jpeg_of(width: int, height: int) -> bytes:
    data = saved("JPEG")
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is there again and again."""
    data = saved("JPEG", 64, 64, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def webp_of(width: int, height: int) -> bytes:
    sizes = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + sizes
    body += b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    frame = saved("WEBP")[12:]
    place = bytes(6) + struct.pack("<I", 27)[:3] * 2 + bytes(4)
    body += b"ANMF" + struct.pack("<I", len(place) + len(frame)) + place + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_of(width: int, height: int) -> bytes:
    data = saved("GIF")
    return data[:6] + struct.pack("<HH", width, height) + data[10:]


def bmp_of(width: int, height: int) -> bytes:
    data = saved("BMP")
    return data[:18] + struct.pack("<ii", width, height) + data[26:]


def wav(rate: int = 16_000, channels: int = 1, data_size: int | None = None) -> bytes:
    data = bytearray(wav_bytes(np.arange(4000, dtype=np.int16)))
    data[22:28] = struct.pack("<HI", channels, rate)
    if data_size is not None:
        data[40:44] = struct.pack("<I", data_size)
    return bytes(data)


# An IFD of 60,000 entries, the first a text of 4 GB far beyond the end; the next IFD is itself.
HOSTILE_EXIF = b"Exif\0\0MM\0*\0\0\0\x08\xea\x60" + struct.pack(
    ">HHIIHHIII", 274, 2, 2**32 - 1, 2**32 - 9, 273, 4, 2**31, 8, 8
)


def chat(*, question: object = "1 2", more: str = "") -> bytes:
    """The JSON of a sample; a question may also be JSON as it is to stand there."""
    asked = question.decode() if isinstance(question, bytes) else json.dumps(question)
    answer = '{"role": "assistant", "content": "3 7"}'
    return f'{{{more}"messages": [{{"role": "user", "content": {asked}}}, {answer}]}}'.encode()


def about(*media: str) -> bytes:
    return chat(question=[*({"type": one} for one in media), {"type": "text", "text": "read"}])


@dataclass(frozen=True)
class Bad:
    """A bad sample. members: of the tar file. reason: part of it. key: as it is named.

    decoded: whether it is found when its item is decoded, not by the index.
    """

    members: Callable[[], bytes]
    reason: str
    key: str = "bad"
    decoded: bool = False


def picture(make: Callable[[], bytes], reason: str, decoded: bool = False) -> Bad:
    def members() -> bytes:
        return member("bad.json", about("image")) + member("bad.0.png", make())

    return Bad(members, reason, decoded=decoded)


def text(make: Callable[[], bytes], reason: str) -> Bad:
    return Bad(lambda: member("bad.json", make()), reason)


def named(key: str | bytes, shown: str) -> Bad:
    raw = key if isinstance(key, bytes) else key.encode()
    return Bad(lambda: member(raw + b".json", chat()), "leaves the folder", shown)


BAD: dict[str, Bad] = {
    # ------------------------------------------------------------------ images
    "PNG that ends in its header": picture(lambda: saved("PNG")[:20], "header cannot be read"),
    "PNG of 60,000 x 60,000 pixels": picture(
        lambda: png(60_000, 60_000, pixels=zlib.compress(bytes(10**7))), "exceeds limit"
    ),
    "WebP of 16 million x 200 pixels": picture(lambda: webp_of(2**24 - 1, 200), "pixels"),
    "GIF of 65,535 x 65,535 pixels": picture(lambda: gif_of(65_535, 65_535), "exceeds limit"),
    "JPEG of 65,000 x 65,000 pixels": picture(lambda: jpeg_of(65_000, 65_000), "exceeds limit"),
    "BMP of 2 billion x 2 billion pixels": picture(lambda: bmp_of(2**31 - 1, 2**31 - 1), "pixels"),
    "JPEG of 600 scans": picture(lambda: many_scans(600), "more than 500 scans", True),
    "zipped text": picture(
        lambda: png(28, 28, chunk(b"zTXt", bomb(b"Comment\0\0"))), "header cannot be read"
    ),
    "zipped text in Unicode": picture(
        lambda: png(28, 28, chunk(b"iTXt", bomb(b"Comment\0\1\0\0\0"))), "header cannot be read"
    ),
    "zipped text behind the pixels": picture(
        lambda: png(28, 28, behind=chunk(b"zTXt", bomb(b"Raw profile type exif\0\0"))),
        "cannot be decoded",
        True,
    ),
    "zipped colour profile": picture(
        lambda: png(28, 28, chunk(b"iCCP", bomb(b"icc\0\0"))), "header cannot be read"
    ),
    "fewer pixels than its size says": picture(
        lambda: png(28, 28, pixels=zlib.compress(bytes(100))), "cannot be decoded", True
    ),
    "PNG that ends in its pixels": picture(
        lambda: saved("PNG", 200, 200)[:3000], "cannot be decoded", True
    ),
    "JPEG that ends in its pixels": picture(
        lambda: saved("JPEG", 200, 200)[:3000], "cannot be decoded", True
    ),
    # ------------------------------------------------------------------ texts
    "JSON that ends early": text(lambda: chat()[:-10], "malformed JSON"),
    "JSON of 200,000 levels": text(
        lambda: chat(question=b"[" * 200_000 + b"]" * 200_000), "malformed JSON"
    ),
    "JSON of 900 levels": text(lambda: chat(question=b"[" * 900 + b"]" * 900), "message 0"),
    "JSON of 17 MiB": text(lambda: chat(question="x" * 17 * 2**20), "at most 16777216 are allowed"),
    "JSON that is not UTF-8": text(lambda: chat().replace(b"3", b"\xff\xfe"), "malformed JSON"),
    "JSON with half a character": text(lambda: chat(question="\ud83d"), "lone surrogate"),
    "JSON with a number of 5,000 digits": text(
        lambda: chat(more=f'"n": {"1" * 5000}, '), "malformed JSON"
    ),
    "JSON of 5,000 messages": text(
        lambda: b'{"messages": [%s{}]}' % (b'{"role": "user", "content": ""},' * 5000),
        "5001 messages, at most 2048",
    ),
    # ------------------------------------------------------------------ members of the tar file
    "a name that leaves its folder": named("../bad", "../bad"),
    "a name from the root": named("/bad", "/bad"),
    "a name with an escape": named("bad\x1b[31m", "bad\\x1b[31m"),
    "a name that is not UTF-8": named(b"bad\xff", "bad\\udcff"),
    "a symbolic link as item": Bad(
        lambda: (
            member("bad.json", about("image")) + member("bad.0.png", b"", b"2", link=b"/etc/passwd")
        ),
        "bad.0.png is a link",
    ),
    "a hard link as text": Bad(
        lambda: member("bad.json", b"", b"1", link=b"good0.json"), "bad.json is a link"
    ),
    "a pipe as item": Bad(
        lambda: member("bad.json", about("image")) + member("bad.0.png", b"", b"6"),
        "bad.0.png is a folder, a device or a pipe",
    ),
    "a device as text": Bad(
        lambda: member("bad.json", b"", b"3"), "is a folder, a device or a pipe"
    ),
    "a folder as text": Bad(
        lambda: member("bad.json/", b"", b"5"), "is a folder, a device or a pipe"
    ),
    "a sparse text": Bad(lambda: member("bad.json", chat(), b"S"), "bad.json is a sparse file"),
    "a sparse text of PAX": Bad(
        lambda: (
            pax(**{"GNU.sparse.major": "1", "GNU.sparse.name": "bad.json"})
            + member("GNUSparseFile.0/x", b"1\n0\n")
        ),
        "bad.json is a sparse file",
    ),
    "two texts": Bad(lambda: member("bad.json", chat()) * 2, "two .json members"),
    "two items of a number": Bad(
        lambda: member("bad.json", about("image")) + member("bad.0.png", saved("PNG")) * 2,
        "two items number 0",
    ),
    "an item without a text": Bad(lambda: member("bad.0.png", saved("PNG")), "no .json member"),
    "items numbered from 1": Bad(
        lambda: member("bad.json", about("image")) + member("bad.1.png", saved("PNG")),
        "numbered [1], need 0",
    ),
}

# Odd, but good: each is the first question of a sample that has to arrive.
ODD: dict[str, Callable[[], bytes]] = {
    "JSON with a byte order mark": lambda: member("odd.json", b"\xef\xbb\xbf" + chat()),
    "JSON in UTF-16": lambda: member("odd.json", chat().decode().encode("utf-16")),
    "JSON with NaN among its other keys": lambda: member("odd.json", chat(more='"score": NaN, ')),
    "GNU's long name": lambda: (
        member("long", b"o/" * 300 + b"odd.json\0", b"L") + member("cut", chat())
    ),
    "PAX with path and size": lambda: (
        pax(path="ä/" * 100 + "odd.json", size=str(len(chat())))
        + member("cut", chat(), size=b"00000000000\0")
    ),
    "a prefix": lambda: _prefixed(),
    "a size in binary": lambda: member(
        "odd.json", chat(), size=b"\x80" + len(chat()).to_bytes(11, "big")
    ),
    "an image with 100 MB of pixels more than its size says": lambda: (
        member("odd.json", about("image")) + member("odd.0.png", png(28, 28, pixels=bomb(b"")))
    ),
    "an image with hostile EXIF": lambda: (
        member("odd.json", about("image")) + member("odd.0.jpg", saved("JPEG", exif=HOSTILE_EXIF))
    ),
    "an image with a colour profile of noise": lambda: (
        member("odd.json", about("image"))
        + member("odd.0.jpg", saved("JPEG", icc_profile=b"\xff\0" * 50_000))
    ),
    "a link that no sample has": lambda: (
        member("link.txt", b"", b"2", link=b"good0.json") + member("odd.json", chat())
    ),
}


def _prefixed() -> bytes:
    block = bytearray(header(b"odd.json", len(chat())))
    block[345:500] = b"folder/of".ljust(155, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + chat() + bytes(-len(chat()) % 512)


_TEXT = member("next.json", chat())
# The whole shard is refused: what would follow in it, nobody knows.
SHARDS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "compressed": lambda good: zlib.compress(good + END, wbits=31),
    "without an end mark": lambda good: good,
    "cut in a header": lambda good: good + _TEXT[:300],
    "cut in a member": lambda good: good + _TEXT[:530],
    "noise between members": lambda good: good + b"\x07" * 512 + good + END,
    "text between members": lambda good: good + b"hello " * 512 + good + END,
    "a wrong checksum": lambda good: good + member("x.json", chat(), checksum=b"000001\0 ") + END,
    "a negative size": lambda good: good + member("x", b"", size=b"\xff" * 10 + b"\xfc\0") + END,
    "a negative size of a sparse file": lambda good: (
        good + member("x", b"", b"S", size=b"\xff" * 10 + b"\xfc\0") + END
    ),
    "a size beyond the end": lambda good: good + member("x", b"", size=b"77777777777\0") + END,
    "a size of 2 to the 80": lambda good: good + member("x", b"", size=b"\x80\1" + bytes(10)) + END,
    "a negative size in PAX": lambda good: good + pax(size="-512") + _TEXT + END,
    "a size of 5,000 digits in PAX": lambda good: good + pax(size="9" * 5000) + _TEXT + END,
    "a size of words": lambda good: good + member("x", b"", size=b"manybytes!!\0") + END,
    "a header of 2 MiB": lambda good: good + pax(comment="x" * 2**21) + _TEXT + END,
    "a long name of a negative size": lambda good: (
        good + member("x", b"", b"L", size=b"\xff" * 10 + b"\xfc\0") + _TEXT + END
    ),
    "PAX with a record of no length": lambda good: (
        good + member("x", b"0 path=x\n", b"x") + _TEXT + END
    ),
    "a sparse file that goes on and on": lambda good: (
        good + sparse_header() + (bytes(504) + b"\1" + bytes(7)) * 2000
    ),
    "5,000 long names after one another": lambda good: good + member("x", b"name\0", b"L") * 5000,
}


def sparse_header() -> bytes:
    block = bytearray(header(b"x.json", 0, b"S"))
    block[482] = 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)
