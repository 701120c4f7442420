"""The data that layouts and one rank are compared on: small, but never a toy.

Noise images of several sizes in chats with answers of several lengths, in tar shards like any
other data, and a tokenizer that has a placeholder for each media. In every step there are samples
with several items, with one and with none, items of every media in one sample, a microbatch
without any item, and one with a single item, which leaves all but one encoder lane empty.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.digits_text import write_tokenizer

SHARD = "train-00000.tar"
_SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))  # width and height of an item, in rows
_ITEMS = (2, 0, 1, 3, 0, 1)  # items of a media in a microbatch's samples, before shuffling
_QUESTIONS = ("read the digits", "what is this ?", "there are digits in order .")
_MAX_ANSWER = 6  # words
_EMPTY, _SINGLE = 1, 2  # microbatches of a step without items, and with one


@dataclass(frozen=True)
class Media:
    """Items of one encoder. ``row_pixels``: the side of a square image that makes one row."""

    name: str
    placeholder: str
    row_pixels: int


@dataclass(frozen=True)
class Item:
    """An image of noise, sizes in pixels."""

    media: str
    width: int
    height: int


@dataclass(frozen=True)
class Sample:
    """A question about items, and its answer."""

    items: tuple[Item, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Workload:
    """What the data depends on; equal workloads are equal files."""

    media: tuple[Media, ...]
    steps: int
    microbatches: int
    samples_per_microbatch: int

    @property
    def name(self) -> str:
        """A folder name, another one for any other workload."""
        return f"data_{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"

    def samples(self) -> list[Sample]:
        """All samples of all steps, in order."""
        rng = np.random.default_rng(0)
        found = []
        for _ in range(self.steps):
            for microbatch in range(self.microbatches):
                counts = self._item_counts(microbatch, rng)
                found += [self._sample(own, rng) for own in counts.T.tolist()]
        return found

    def _item_counts(self, microbatch: int, rng: np.random.Generator) -> np.ndarray:
        """(media, samples): items of each media in each sample of one microbatch."""
        counts = np.zeros((len(self.media), self.samples_per_microbatch), np.int64)
        if microbatch == _EMPTY or not self.media:
            return counts
        if microbatch == _SINGLE:
            counts[0, 0] = 1
            return counts
        pattern = np.resize(_ITEMS, self.samples_per_microbatch)
        for own in counts:
            own[:] = rng.permutation(pattern)
        if microbatch == 0:  # whatever the shuffling: one sample with items of every media
            for own in counts:
                own[[0, own.argmax()]] = own[[own.argmax(), 0]]
        return counts

    def _sample(self, counts: Sequence[int], rng: np.random.Generator) -> Sample:
        items = []
        for media, count in zip(self.media, counts, strict=True):
            for _ in range(count):
                width, height = _SIZES[int(rng.integers(len(_SIZES)))]
                side = media.row_pixels
                items.append(Item(media.name, width * side, height * side))
        digits = rng.integers(0, 10, int(rng.integers(1, _MAX_ANSWER + 1)))
        return Sample(
            items=tuple(items[i] for i in rng.permutation(len(items))),
            question=_QUESTIONS[int(rng.integers(len(_QUESTIONS)))],
            answer=" ".join(str(digit) for digit in digits),
        )

    def write(self, directory: Path) -> None:
        """Write the shard and ``tokenizer/``; does nothing when they are there."""
        if (directory / SHARD).exists():
            return
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(
            directory / "tokenizer", {media.name: media.placeholder for media in self.media}
        )
        write_shard(directory / SHARD, self.samples())


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """A webdataset shard of these samples, with noise for pixels."""
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            content: list[dict[str, str]] = [{"type": item.media} for item in sample.items]
            content.append({"type": "text", "text": sample.question})
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [{"type": "text", "text": sample.answer}]},
            ]
            document = json.dumps({"messages": messages}).encode()
            _add(tar, f"sample{number:04d}.json", document)
            for position, item in enumerate(sample.items):
                pixels = rng.integers(0, 256, (item.height, item.width), dtype=np.uint8)
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG")
                _add(tar, f"sample{number:04d}.{position}.png", buffer.getvalue())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
