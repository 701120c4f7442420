"""Random bytes, and valid files that are flipped, cut and spliced, raise only what is documented.

Every reader of what a stranger wrote gets them: tar files, samples' JSON, image and sound headers.
Memory is bounded: no read is larger than the file, and none is larger than documented.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from data.index.build import parse_messages
from data.index.reader import SampleReader, UnreadableSample
from data.index.samples import Processors
from data.index.tar_shards import TarError, tar_members
from data.modalities.audio import AudioClips
from data.modalities.image_files import image_size, open_image
from data.modalities.images import ImageProcessor
from data.modalities.processor import Part
from data.text.chat import ChatTokenizer
from data.text.messages import MessagesError, PlaceholderError, UnknownMediaError
from tests.data import damaged
from tests.data.conftest import build_index

QUICK = settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LARGEST_READ = 2**20
EXTREMES = [b"\0" * 4, b"\xff" * 4, b"\x80\0\0\0", b"\x7f\xff\xff\xff", b"7777", b"9"]

TARS = [
    damaged.member("a.json", damaged.chat()) + damaged.END,
    damaged.pax(path="é/" * 40 + "x.json") + damaged.member("x", damaged.chat()) + damaged.END,
    *(make() + damaged.END for make in damaged.ODD.values() if len(make()) < 10_000),
    damaged.sparse_header() + bytes(504) + b"\1" + bytes(1500) + damaged.END,
]
TEXTS = [
    damaged.chat(),
    damaged.about("image", "video"),
    damaged.chat(question=b'[{"type": "image", "frames": 2, "fps": 1.5}]'),
    damaged.chat().decode().encode("utf-16"),
]
IMAGES = [damaged.saved(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")] + [
    damaged.many_scans(2),
    damaged.webp_of(28, 28),
    damaged.saved("JPEG", exif=damaged.HOSTILE_EXIF),
    damaged.png(8, 8, damaged.chunk(b"zTXt", b"a\0\0x\x9c\3\0\0\0\0\1"), behind=b"\0\0\0\1eXIf?"),
]
SOUNDS = [damaged.wav(), damaged.wav(channels=2, rate=44_100)]


@st.composite
def mutated(draw: st.DrawFn, files: list[bytes]) -> bytes:
    """Random bytes, or one of the files with bits flipped, numbers replaced, cut or spliced."""
    data = bytearray(draw(st.one_of(st.sampled_from(files), st.binary(max_size=2000))))
    places = st.integers(0, max(len(data) - 1, 0))
    for _ in range(draw(st.integers(1, 8))):
        here, there = draw(places), draw(places)
        match draw(st.sampled_from(["flip", "number", "cut", "splice", "double"])):
            case "flip":
                data[here : here + 1] = bytes([draw(st.integers(0, 255))])
            case "number":
                new = draw(st.sampled_from(EXTREMES))
                data[here : here + len(new)] = new
            case "cut":
                del data[min(here, there) : max(here, there)]
            case "splice":
                other = draw(st.sampled_from(files))
                data[here:here] = other[there : there + 700]
            case "double":
                data[here:here] = data[min(here, there) : max(here, there)]
    return bytes(data[: 2**16])


def checksummed(data: bytes) -> bytes:
    """The same with right checksums where a header may be: else nothing is read after a change."""
    blocks = bytearray(data)
    for start in range(0, len(blocks) - 511, 512):
        if blocks[start + 257 : start + 262] == b"ustar":
            blocks[start + 148 : start + 156] = b" " * 8
            total = sum(blocks[start : start + 512])
            blocks[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(blocks)


class BoundedReads(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 <= size <= LARGEST_READ
        return super().read(size)


def _tar(data: bytes) -> None:
    for file in (data, checksummed(data)):
        with suppress(TarError):
            members = list(tar_members(BoundedReads(file)))
            assert all(0 <= m.offset <= m.offset + m.size <= len(file) for m in members)


def _image(data: bytes) -> None:
    with suppress(ValueError):
        size = image_size(data)
        assert open_image(data).size == size


def _sound(data: bytes) -> None:
    clips = AudioClips()
    with suppress(ValueError):
        size = clips.probe(io.BytesIO(data))
        assert clips.size_of(clips.decode(data)) == size
        clips.plan(Part(size))


FUZZED: dict[str, tuple[list[bytes], Callable[[bytes], None]]] = {
    "tar": (TARS, _tar),
    "image": (IMAGES, _image),
    "sound": (SOUNDS, _sound),
}


@pytest.mark.parametrize("kind", FUZZED)
def test_a_fuzzed_file_raises_only_what_is_documented(kind: str):
    files, check = FUZZED[kind]
    seed(20)(QUICK(given(data=mutated(files))(lambda data: check(data))))()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "frames", "fps", "tools"]), inner
        )
    ),
    max_leaves=12,
)


def _encodes(chat: ChatTokenizer, messages: object) -> None:
    with suppress(MessagesError, PlaceholderError, UnknownMediaError):
        found = chat.mentions(messages, "k")  # pyright: ignore[reportArgumentType]
        chat.encode(messages, [2] * len(found), "k")  # pyright: ignore[reportArgumentType]


@seed(21)
@QUICK
@given(data=mutated(TEXTS), messages=st.lists(JSON, max_size=4) | JSON)
def test_fuzzed_texts_and_messages_raise_only_what_is_documented(
    two_media_chat: ChatTokenizer, data: bytes, messages: object
):
    _encodes(two_media_chat, messages)
    try:
        parsed = parse_messages(data)
    except ValueError:
        return
    _encodes(two_media_chat, parsed)


@seed(22)
@settings(QUICK, max_examples=40)
@given(data=mutated(TARS[:1]), file=mutated(IMAGES), text=mutated(TEXTS))
def test_a_fuzzed_shard_is_indexed_and_read_or_refused(
    two_media_chat: ChatTokenizer,
    processor: ImageProcessor,
    tmp_path: Path,
    data: bytes,
    file: bytes,
    text: bytes,
):
    processors: Processors = {"image": processor, "video": processor}
    path = tmp_path / "a.tar"
    samples = damaged.member("f.json", text) + damaged.member("f.0.png", file)
    path.write_bytes(samples + checksummed(data))
    try:
        index = build_index(str(path), two_media_chat, processors)
    except ValueError:
        return
    reader = SampleReader(index, two_media_chat, processors)
    for number in range(len(index)):
        try:
            reader.sample(number)
            [reader.patches(item) for item in index.items_of_sample(number)]
        except UnreadableSample:
            continue
