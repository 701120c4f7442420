"""The data that layouts and one rank are compared on: small, but never a toy.

Noise of several sizes in chats, in tar shards like any other data. Every step has samples with
several items, with one and with none, items of every media in one sample, a microbatch without any
item, and one with a single item, which leaves all but one encoder lane empty. Several data sources
take turns within a step, even in the middle of a microbatch.
"""

from __future__ import annotations

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

from data.modalities.processor import Media, Part
from data.order import SampleOrder
from data.text.digits import conversation, write_tokenizer

_ITEMS = (2, 0, 1, 3, 0, 1)  # items of a media in a microbatch's samples, before shuffling
_QUESTIONS = ("read the digits", "what is this ?", "there are digits in order .")
_MAX_ANSWER = 6  # words
_TEMPLATE_TOKENS = 6  # of a question and an answer: where each begins and ends, and whose it is
_EMPTY, _SINGLE = 1, 2  # microbatches of a step without items, and with one
_SEEDS = 1000  # a tenth of these is enough for any weights in use
_TURN = 3.5  # microbatches per turn of a source: the two above, one more, and part of another


@dataclass(frozen=True)
class Items:
    """Items of one encoder. media: the type of their content parts. files: makes their files."""

    media: str
    placeholder: str
    files: Media[Any]


@dataclass(frozen=True)
class Item:
    """An item of one file. media: the type of its content part."""

    media: str
    suffix: str
    content: bytes


@dataclass(frozen=True)
class Sample:
    """A question about items, and its answer."""

    items: tuple[Item, ...]
    question: str
    answer: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat as it is stored."""
        return conversation([item.media for item in self.items], self.question, self.answer)


@dataclass(frozen=True)
class Workload:
    """What the data depends on; equal workloads have equal files.

    weights: of the data sources. tokens: of a packed sequence, if samples are packed by tokens;
    lanes: sequences of a microbatch, then.
    """

    items: tuple[Items, ...]
    steps: int
    microbatches: int
    samples_per_microbatch: int
    weights: tuple[float, ...] = (1.0,)
    tokens: int | None = None
    lanes: int = 1

    @property
    def name(self) -> str:
        """A folder name, different for every workload."""
        own = [(one.media, one.placeholder, one.files.fingerprint()) for one in self.items]
        sizes = (self.steps, self.microbatches, self.samples_per_microbatch, self.weights)
        sizes += (self.tokens, self.lanes)
        return f"data_{hashlib.sha256(repr((own, sizes)).encode()).hexdigest()[:16]}"

    @property
    def shards(self) -> list[str]:
        """One file for each source."""
        return [f"source{source}-00000.tar" for source in range(len(self.weights))]

    @property
    def block(self) -> int:
        """Number of samples of a source that stay together; if there is one source, all of them."""
        if len(self.weights) == 1:
            return self.steps * self._samples_per_step
        return int(_TURN * self.samples_per_microbatch)

    def seed(self, first: int) -> int:
        """The first seed from ``first`` on that shows both sources and their weights.

        A microbatch of the first step mixes the sources, and unequal weights draw from other
        sources than equal ones would.
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
        """All samples of a source, in order; a block begins with microbatches of every kind."""
        rng = np.random.default_rng(source + len(self.weights) - 1)
        microbatches = self.microbatches if len(self.weights) == 1 else math.ceil(_TURN)
        found: list[Sample] = []
        while len(found) < self._samples_per_source:
            together = []
            for microbatch in range(microbatches):
                # Samples as long as a packed sequence cost most, so they run together. There are
                # two microbatches of them: without items, and with one in its last sample.
                num_full = {_EMPTY: 2 * self.lanes - 1, _SINGLE: 1}.get(microbatch, 0)
                together += [
                    self._sample(own, rng, fills=self.tokens is not None and number < num_full)
                    for number, own in enumerate(self._item_counts(microbatch, rng).T.tolist())
                ]
            found += together[: self.block]
        return found

    def _item_counts(self, microbatch: int, rng: np.random.Generator) -> np.ndarray:
        """(media, samples): items of each media in each sample of one microbatch."""
        counts = np.zeros((len(self.items), self.samples_per_microbatch), np.int64)
        if microbatch == _EMPTY or not self.items:
            return counts
        if microbatch == _SINGLE:
            counts[0, 0] = 1
            return counts
        for own in counts:
            own[:] = rng.permutation(np.resize(_ITEMS, self.samples_per_microbatch))
        if microbatch == 0:  # however it is shuffled, one sample has items of every media
            for own in counts:
                own[[0, own.argmax()]] = own[[own.argmax(), 0]]
        return counts

    def _sample(self, counts: Sequence[int], rng: np.random.Generator, fills: bool) -> Sample:
        """A sample with so many items of each media. fills: whether it is ``tokens`` long."""
        items = [
            Item(own.media, own.files.suffixes[0], own.files.random_file(rng))
            for own, count in zip(self.items, counts, strict=True)
            for _ in range(count)
        ]
        digits = rng.integers(0, 10, int(rng.integers(1, _MAX_ANSWER + 1)))
        shuffled = tuple(items[i] for i in rng.permutation(len(items)))
        question = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))]
        if fills and self.tokens is not None:
            own = sum(_num_tokens(self.items[0].files, item) for item in items)
            words = self.tokens - own - len(digits) - _TEMPLATE_TOKENS
            question = " ".join(np.resize(question.split(), words).tolist())
        return Sample(shuffled, question, " ".join(str(digit) for digit in digits))

    def write(self, directory: Path) -> None:
        """Write the shards and ``tokenizer/``; does nothing if they are already there."""
        if (directory / self.shards[-1]).exists():
            return
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory / "tokenizer", {one.media: one.placeholder for one in self.items})
        for source, shard in enumerate(self.shards):
            write_shard(directory / shard, self.samples(source))


def _num_tokens(files: Media[Any], item: Item) -> int:
    """Tokens of an item of one file in the chat, with the two around it."""
    plan = files.plan(Part(files.probe(io.BytesIO(item.content))))
    return plan.num_items * plan.num_rows + 2


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """A webdataset shard of these samples."""
    with TarWriter(str(path), encoder=False) as tar:
        for number, sample in enumerate(samples):
            members: dict[str, Any] = {"__key__": f"sample{number:04d}"}
            members["json"] = json.dumps({"messages": sample.messages}).encode()
            for position, item in enumerate(sample.items):
                members[f"{position}.{item.suffix}"] = item.content
            tar.write(members)
