"""Small digits data and a writer of hand-made shards, for all tests of data/."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.index.build import build_here
from data.index.samples import Index, Processors, settings_fingerprint
from data.index.store import survey
from data.modalities.images import ImageProcessor
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from examples.digits.scans import prepare_digits

WriteShard = Callable[[Path, Mapping[str, bytes]], Path]
Ask = Callable[..., bytes]
MakeImage = Callable[..., bytes]
IndexOf = Callable[..., Index]


def build_index(pattern: str, chat: ChatTokenizer, processors: Processors) -> Index:
    """An index in a temporary folder, which lives as long as the index."""
    folder = tempfile.TemporaryDirectory(prefix="mimo-index-")
    settings = (
        pattern,
        settings_fingerprint(chat, processors),
        sorted(processors),
        Path(folder.name),
    )
    build_here(survey(*settings).tasks, chat, processors)
    index = survey(*settings).open()
    weakref.finalize(index, folder.cleanup)
    return index


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_digits(
        tmp_path_factory.mktemp("data") / "digits", num_train=96, num_validation=70, num_test=12
    )


@pytest.fixture(scope="session")
def chat(digits: Path) -> ChatTokenizer:
    return ChatTokenizer(digits / "tokenizer")


@pytest.fixture(scope="session")
def processor() -> ImageProcessor:
    return ImageProcessor(min_pixels=28 * 28)


@pytest.fixture(scope="session")
def processors(processor: ImageProcessor) -> Processors:
    return {"image": processor}


@pytest.fixture(scope="session")
def two_media_chat(digits: Path) -> ChatTokenizer:
    return ChatTokenizer(
        digits / "tokenizer",
        {"video": MediaText("<|video_pad|>"), "image": MediaText("<|image_pad|>")},
    )


@pytest.fixture(scope="session")
def two_media_processors(processor: ImageProcessor) -> Processors:
    """Videos are cut into patches of half the size: four times the rows."""
    return {"video": ImageProcessor(patch_size=7, min_pixels=28 * 28), "image": processor}


@pytest.fixture
def write_shard() -> WriteShard:
    """Writes members, by name, into an uncompressed tar file."""

    def write(path: Path, members: Mapping[str, bytes]) -> Path:
        with tarfile.open(path, "w") as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return path

    return write


@pytest.fixture
def index_of(
    tmp_path: Path, write_shard: WriteShard, chat: ChatTokenizer, processors: Processors
) -> IndexOf:
    """Writes members into a.tar and indexes it."""

    def make(
        members: Mapping[str, bytes],
        tokenizer: ChatTokenizer = chat,
        media: Processors = processors,
    ) -> Index:
        return build_index(str(write_shard(tmp_path / "a.tar", members)), tokenizer, media)

    return make


@pytest.fixture
def ask() -> Ask:
    """The JSON of a sample with so many images, or items of the given media."""

    def make(items: int | Sequence[str] = 0, answer: str = "3 7") -> bytes:
        media = ["image"] * items if isinstance(items, int) else items
        content: list[dict[str, Any]] = [{"type": one} for one in media]
        messages = [
            {"role": "user", "content": [*content, {"type": "text", "text": "read the digits ."}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        return json.dumps({"messages": messages}).encode()

    return make


@pytest.fixture
def make_image() -> MakeImage:
    """The bytes of an image of noise."""

    def make(width: int = 28, height: int = 28, file_format: str = "PNG", **options: Any) -> bytes:
        noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3))
        buffer = io.BytesIO()
        Image.fromarray(noise.astype(np.uint8)).save(buffer, file_format, **options)
        return buffer.getvalue()

    return make
