"""The data that layouts and one rank are compared on: small, but with all that may go wrong.

Noise of several sizes in chats, in tar shards like any other data. Every step has samples with
several items, with one and with none, items of every modality in one sample, a microbatch without
any item, and one with a single item, which leaves all but one encoder lane empty. Several data
sources take turns within a step, even in the middle of a microbatch.

With generators, answers have several items, one or none, of two sizes, with or without words, and
with or without items to read.
"""

import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from webdataset.writer import TarWriter

from data.modalities.image_files import png_bytes
from data.modalities.images import TargetImages
from data.modalities.processor import Media, Part
from data.order import SampleOrder
from data.text.digits import conversation, write_tokenizer

_ITEMS = (2, 0, 1, 3, 0, 1)  # items of a modality in a microbatch's samples, before shuffling
_QUESTIONS = ("read the digits", "what is this ?", "there are digits in order .")
_MAX_ANSWER = 6  # words
_BETWEEN = "then"  # two items in an answer
_TEMPLATE_TOKENS = 6  # of a question and an answer: where each begins and ends, and whose it is
# The same for items in answers; the first sample also has items to read.
_DRAWN_ITEMS = (1, 0, 2, 1, 0, 3)
_DRAWN_SIZES = ((2, 3), (4, 3))  # columns and lines of tokens
_EMPTY, _SINGLE = 1, 2  # microbatches of a step without items, and with one
_ONLY_DRAWN, _ONLY_READ = 3, 4  # microbatches: one item, no words in answers; no items in answers
_SEEDS = 1000  # seeds to try; a tenth is enough for any weights in use
_TURN = 3.5  # microbatches per turn of a source: the two above, one more, and part of a fourth

# For parity: width and height of each sample's pictures in pixels. Two samples without pictures
# stand together, so that one microbatch is text only.
_PICTURES = (((61, 37), (140, 90)), (), ((97, 203),), ((28, 28), (45, 131), (33, 71)), (), ())
_PICTURE_QUESTIONS = ("what digits are these ?", "what comes after 3 ?", "read the digit .")


@dataclass(frozen=True)
class Item:
    """An item of one file. media: the type of its content part."""

    media: str
    suffix: str
    content: bytes


@dataclass(frozen=True)
class Items:
    """The items of an encoder. media: the type of their content parts. files: makes their files."""

    media: str
    placeholder: str
    files: Media[Any]

    def random(self, rng: np.random.Generator) -> Item:
        return Item(self.media, self.files.suffixes[0], self.files.random_file(rng))


@dataclass(frozen=True)
class Outputs:
    """The items of a generator. media: type of their parts in answers. files: their reader."""

    media: str
    files: TargetImages

    def random(self, rng: np.random.Generator) -> Item:
        columns, lines = _DRAWN_SIZES[int(rng.integers(len(_DRAWN_SIZES)))]
        shape = lines * self.files.patch_size, columns * self.files.patch_size, 3
        return Item(self.media, "png", png_bytes(rng.integers(0, 256, shape, dtype=np.uint8)))


@dataclass(frozen=True)
class Sample:
    """A question about items, and its answer. drawn: items in the answer, with text between."""

    items: tuple[Item, ...]
    question: str
    answer: str
    drawn: tuple[Item, ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        asked, reply = conversation([i.media for i in self.items], self.question, self.answer)
        parts = [*reply["content"]] if self.answer else []
        for number, item in enumerate(self.drawn):
            # The prompt of an item is the text between the previous item and it.
            parts += [{"type": "text", "text": _BETWEEN}] if number else []
            parts.append({"type": item.media})
        return [asked, {**reply, "content": parts or reply["content"]}]


@dataclass(frozen=True)
class Workload:
    """The parameters of the data; equal workloads have equal files.

    items: that encoders read. outputs: that generators make.
    weights: of the data sources. tokens: of a packed sequence, if samples are packed by tokens.
    lanes: packed sequences in a microbatch, in that case.
    """

    items: tuple[Items, ...]
    outputs: tuple[Outputs, ...]
    steps: int
    microbatches: int
    samples_per_microbatch: int
    weights: tuple[float, ...] = (1.0,)
    tokens: int | None = None
    lanes: int = 1

    @property
    def name(self) -> str:
        """A folder name, different for every workload."""
        items = [(i.media, i.placeholder, i.files.fingerprint()) for i in self.items]
        sizes = (self.steps, self.microbatches, self.samples_per_microbatch, self.weights)
        sizes += (self.tokens, self.lanes)
        items += [(o.media, o.files.fingerprint()) for o in self.outputs]
        return f"data_{hashlib.sha256(repr((items, sizes)).encode()).hexdigest()[:16]}"

    @property
    def shards(self) -> list[str]:
        return [f"source{source}-00000.tar" for source in range(len(self.weights))]

    @property
    def block(self) -> int:
        """The samples of a source that stay together; of a single source, all samples."""
        if len(self.weights) == 1:
            return self.steps * self._samples_per_step
        return int(_TURN * self.samples_per_microbatch)

    def seed(self, first: int) -> int:
        """Return the first seed from ``first`` on that mixes the sources in a microbatch.

        With it, unequal weights draw from other sources than equal weights would.
        """
        if len(self.weights) == 1:
            return first
        positions = np.arange(self._samples_per_step)
        num_samples = [self._samples_per_source] * len(self.weights)
        even = (1.0,) * len(self.weights)
        for seed in range(first, first + _SEEDS):
            drawn, evenly = (
                SampleOrder(num_samples, weights, seed, self.block).at(positions)[0]
                for weights in (self.weights, even)
            )
            by_microbatch = drawn.reshape(self.microbatches, -1)
            mixes = (by_microbatch != by_microbatch[:, :1]).any()
            if mixes and (self.weights == even or (drawn != evenly).any()):
                return seed
        raise AssertionError(f"no seed from {first} on mixes sources of {self.weights}")

    @property
    def _samples_per_step(self) -> int:
        return self.microbatches * self.samples_per_microbatch

    @property
    def _samples_per_source(self) -> int:
        """Enough for all steps, in whole blocks."""
        return -(-self.steps * self._samples_per_step // self.block) * self.block

    def samples(self, source: int = 0) -> list[Sample]:
        """Return the samples of a source; a block begins with microbatches of every kind."""
        rng = np.random.default_rng(source + len(self.weights) - 1)
        microbatches = self.microbatches if len(self.weights) == 1 else math.ceil(_TURN)
        samples: list[Sample] = []
        while len(samples) < self._samples_per_source:
            block: list[Sample] = []
            for microbatch in range(microbatches):
                # Samples as long as a packed sequence cost most, so they run together. There are
                # two microbatches of them: without items, and with one in its last sample.
                num_full = {_EMPTY: 2 * self.lanes - 1, _SINGLE: 1}.get(microbatch, 0)
                read, drawn = self._counts(microbatch, rng)
                block += [
                    self._sample(read[:, n], drawn[:, n], rng, n < num_full, microbatch)
                    for n in range(self.samples_per_microbatch)
                ]
            samples += block[: self.block]
        return samples

    def _counts(self, microbatch: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (modalities, samples) items to read and to draw in a microbatch's samples."""
        size = self.samples_per_microbatch
        read, drawn = (np.zeros((len(k), size), np.int64) for k in (self.items, self.outputs))
        if microbatch == _EMPTY:
            return read, drawn
        if microbatch == _SINGLE:
            read[:1, 0] = drawn[:1, 0] = 1
            return read, drawn
        for row in read if microbatch != _ONLY_DRAWN or not self.outputs else ():
            row[:] = rng.permutation(np.resize(_ITEMS, size))
        if microbatch == 0:  # however it is shuffled, the first sample has items of every modality
            for row in read:
                row[[0, row.argmax()]] = row[[row.argmax(), 0]]
        if microbatch != _ONLY_READ:
            drawn[:] = 1 if microbatch == _ONLY_DRAWN else np.resize(_DRAWN_ITEMS, size)
        return read, drawn

    def _sample(
        self,
        counts: np.ndarray,
        drawn_counts: np.ndarray,
        rng: np.random.Generator,
        is_full: bool,
        microbatch: int,
    ) -> Sample:
        """Return a sample with these items of each modality, to read and to draw.

        is_full: whether it has ``tokens``, if samples are packed by tokens.
        """
        pairs = zip(self.items, counts, strict=True)
        items = [kind.random(rng) for kind, count in pairs for _ in range(count)]
        digits = rng.integers(0, 10, int(rng.integers(1, _MAX_ANSWER + 1)))
        shuffled = tuple(items[i] for i in rng.permutation(len(items)))
        question = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))]
        pairs = zip(self.outputs, drawn_counts, strict=True)
        drawn = tuple(kind.random(rng) for kind, count in pairs for _ in range(count))
        if drawn and microbatch == _ONLY_DRAWN:
            digits = digits[:0]
        if is_full and self.tokens is not None:
            item_tokens = sum(_num_tokens(self.items[0].files, item) for item in items)
            item_tokens += sum(_num_tokens(self.outputs[0].files, item) for item in drawn)
            words = self.tokens - item_tokens - len(digits) - _TEMPLATE_TOKENS
            question = " ".join(np.resize(question.split(), words).tolist())
        return Sample(shuffled, question, " ".join(str(digit) for digit in digits), drawn)

    def write(self, directory: Path) -> None:
        """Write the shards and ``tokenizer/``, unless they exist."""
        if (directory / self.shards[-1]).exists():
            return
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory / "tokenizer", {i.media: i.placeholder for i in self.items})
        for source, shard in enumerate(self.shards):
            write_shard(directory / shard, self.samples(source))


def _num_tokens(files: Media[Any], item: Item) -> int:
    """Return the tokens of an item of one file in the chat, with the two around it."""
    plan = files.plan(Part(files.probe(io.BytesIO(item.content))))
    return plan.num_items * plan.num_rows + 2


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """Write a webdataset shard of these samples."""
    with TarWriter(str(path), encoder=False) as tar:
        for number, sample in enumerate(samples):
            members: dict[str, Any] = {"__key__": f"sample{number:04d}"}
            members["json"] = json.dumps({"messages": sample.messages}).encode()
            for position, item in enumerate((*sample.items, *sample.drawn)):
                members[f"{position}.{item.suffix}"] = item.content
            tar.write(members)


def picture_samples(count: int) -> list[Sample]:
    """Return chats with several pictures, with one and with none; each noise is new."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(count):
        digits = rng.integers(0, 10, int(rng.integers(1, _MAX_ANSWER + 1)))
        noise, items = np.random.default_rng(number), []
        for width, height in _PICTURES[number % len(_PICTURES)]:
            pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
            items.append(Item("image", "png", png_bytes(pixels)))
        question = _PICTURE_QUESTIONS[number % len(_PICTURE_QUESTIONS)]
        samples.append(Sample(tuple(items), question, " ".join(str(digit) for digit in digits)))
    return samples
