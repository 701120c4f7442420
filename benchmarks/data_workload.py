"""What all loaders of `benchmarks.data` read: JPEGs like photos, a tokenizer, an index."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from benchmarks.train_workload import chat, write_shard
from data.index.reader import SampleReader
from data.index.store import load_or_build_index
from data.modalities.images import ImageProcessor
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from mimo.checkpoint.hf.tiny import build_tokenizer

FAMILY, PLACEHOLDER, BATCH = "qwen2_5_vl", "<|image_pad|>", 8  # samples that are packed together
_WORDS = 60  # of a sample's text
_DISTINCT = 4  # photos of each size; samples take turns with them
_OCTAVES, _COLOUR_FROM = range(1, 9), 5  # details of 2 to 256 pixels; larger ones have colours
_ROUGHNESS, _CONTRAST, _GRAIN, _QUALITY = 0.6, 45, 6, 95  # 3.5 bits a pixel, as cameras write

Size = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """What a loader hands over for one microbatch.

    keys: of its samples. input_ids: (T,) of all. tokens, patches: of each sample. pixels: (P, W).
    others: whatever else goes to the device.
    """

    keys: list[str]
    input_ids: Tensor
    tokens: list[int]
    pixels: Tensor
    patches: list[int]
    others: list[Tensor]

    @property
    def num_bytes(self) -> int:
        """Of all that goes to the device."""
        return sum(own.nbytes for own in (self.input_ids, self.pixels, *self.others))

    def samples(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Each sample's key, token ids and pixels."""
        yield from zip(
            self.keys,
            self.input_ids.split(self.tokens),
            self.pixels.split(self.patches),
            strict=True,
        )


@dataclass(frozen=True)
class Workload:
    """A folder with shards and their index: one sample in ``BATCH`` has the first size.

    num_shards: each has equally many whole batches, so that workers have equal parts.
    """

    directory: Path
    sizes: tuple[Size, Size]
    num_samples: int
    num_shards: int

    def __str__(self) -> str:
        """Its images, in words."""
        one, other = (f"{width} × {height}" for width, height in self.sizes)
        return other if one == other else f"{other}, one in {BATCH} {one}"

    @property
    def num_batches(self) -> int:
        """Of a pass."""
        return self.num_samples // BATCH

    @property
    def tokenizer(self) -> Path:
        """In Hugging Face format."""
        return self.directory / "tokenizer"

    @property
    def shards(self) -> list[Path]:
        """All of them."""
        return [self.directory / f"{number:05d}.tar" for number in range(self.num_shards)]

    def write(self) -> float:
        """Write everything; returns the mean bytes of an image."""
        rng = np.random.default_rng(0)
        self.directory.mkdir(parents=True)
        build_tokenizer(FAMILY).save_pretrained(str(self.tokenizer))
        photos = {size: [_photo(*size, rng) for _ in range(_DISTINCT)] for size in set(self.sizes)}
        samples: list[dict[str, Any]] = []
        for number in range(self.num_samples):
            of_size = photos[self.sizes[0 if number % BATCH == 0 else 1]]
            image = of_size[number // BATCH % len(of_size)]
            text = chat(_WORDS, 1, rng)
            samples.append({"__key__": f"sample{number:06d}", "json": text, "0.jpg": image})
        each = self.num_samples // self.num_shards
        for number, path in enumerate(self.shards):
            write_shard(path, samples[number * each : (number + 1) * each])
        self.reader()  # writes the index
        return float(np.mean([len(sample["0.jpg"]) for sample in samples]))

    def reader(self) -> SampleReader:
        """Ours; its processor's defaults are the limits of Qwen2.5-VL."""
        tokens = ChatTokenizer(self.tokenizer, {"image": MediaText(PLACEHOLDER)})
        media = {"image": ImageProcessor()}
        index = load_or_build_index(str(self.directory / "*.tar"), tokens, media)
        return SampleReader(index, tokens, media)


def _photo(width: int, height: int, rng: np.random.Generator) -> bytes:
    """A JPEG of smooth shapes of all sizes, some with colours, and the grain of a sensor."""
    total = np.zeros((height, width, 3), np.float32)
    for octave in _OCTAVES:
        cell = 2**octave
        own = [(slice(None), 1.0)]  # channels, and how much they get
        if octave >= _COLOUR_FROM:
            own += [(slice(0, 1), 0.3), (slice(2, 3), 0.3)]
        for channels, weight in own:
            shape = height // cell + 2, width // cell + 2
            coarse = Image.fromarray(rng.standard_normal(shape, np.float32))
            fine = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
            total[..., channels] += weight * cell**_ROUGHNESS * fine[..., None]
    total *= _CONTRAST / total.std()
    total += 128 + _GRAIN * rng.standard_normal((height, width, 1), np.float32)
    buffer = io.BytesIO()
    pixels = total.clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
