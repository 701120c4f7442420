"""What both sides of `benchmarks.train` train: a checkpoint, samples of uneven length, a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from webdataset.writer import TarWriter

from data.modalities.image_files import png_bytes
from data.text.digits import DIGITS, conversation, words
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe

FAMILY = "qwen3_vl"
_ROW_PIXELS = 30  # side of a row of the tiny checkpoint
_MAX_ROWS = 64  # of an image
_SPREAD, _MOST_WORDS = 1.0, 1500  # of the words of a sample: log-normal with this sigma

Lengths = Literal["long-tailed", "equal"]
OURS = ("packed", "packed equal")
THEIRS = ("padded", "sorted", "batched equal")
"""Contestants. Of transformers: `padded`, batches of 8 in the samples' order; `sorted`, by length
into batches of at most a microbatch's tokens, padding included; `batched equal`, all samples, which
are equally long, in one batch as in one of our microbatches."""


def lengths_of(contestant: str) -> Lengths:
    """The samples that a contestant trains on."""
    return "equal" if contestant.endswith("equal") else "long-tailed"


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of its samples.

    width, num_layers: of `TinyCheckpoint`. samples: of one step. tokens: of a microbatch, about.
    median_words: of a sample's text.
    """

    width: int = 4
    num_layers: int = 8
    samples: int = 32
    tokens: int = 4096
    median_words: int = 120

    def __str__(self) -> str:
        """The distribution of lengths, in words."""
        return (
            f"words: log-normal, median {self.median_words}, sigma {_SPREAD}, at most "
            f"{_MOST_WORDS}; one sample in two has 1 or 2 images of 4 to {_MAX_ROWS} rows, "
            f"square or not"
        )


@dataclass(frozen=True)
class Workload:
    """One folder with the checkpoint and, for each kind of lengths, a shard and a recipe."""

    directory: Path
    sizes: Sizes

    @property
    def checkpoint(self) -> Path:
        """In Hugging Face format; both sides load it."""
        return self.directory / "checkpoint"

    def shard(self, lengths: Lengths) -> Path:
        """The samples of a step, in order."""
        return self.directory / f"{lengths}-00000.tar"

    def num_samples(self, lengths: Lengths) -> int:
        """Samples of a step."""
        return self.sizes.samples if lengths == "long-tailed" else max(1, self.sizes.samples // 2)

    def write(self) -> None:
        """Write everything that is read later."""
        width, num_layers = self.sizes.width, self.sizes.num_layers
        write_tiny(TinyCheckpoint(FAMILY, width=width, num_layers=num_layers), self.checkpoint)
        file = self.checkpoint / "preprocessor_config.json"  # its images have few rows
        content = json.loads(file.read_text())
        content["size"]["longest_edge"] = _MAX_ROWS * _ROW_PIXELS**2
        file.write_text(json.dumps(content))
        for lengths in ("long-tailed", "equal"):
            write_shard(self.shard(lengths), self._samples(lengths))

    def recipe(
        self,
        lengths: Lengths,
        steps: int,
        mean_tokens: float,
        threads: int,
    ) -> Recipe:
        """Our recipe: one step per pass over the samples, on one rank.

        mean_tokens: of a sample.
        """
        content = {
            "name": "bench",
            "init_from": str(self.checkpoint),
            "encoders": {"vision": {"placement": "colocated"}},
            "data": {
                "sources": [{"path": str(self.shard(lengths))}],
                "sequence_length": 4096,
                "shuffle_block": 1_000_000,
            },
            "train": {
                "steps": steps,
                "global_batch_size": self.num_samples(lengths),
                "micro_batch_size": self._samples_together(lengths, mean_tokens),
                "learning_rate": 1e-4,
                "min_learning_rate_ratio": 1.0,
                "weight_decay": 0.01,
                "run_dir": str(self.directory / "runs"),
                "threads_per_rank": threads,
            },
        }
        path = self.directory / f"{lengths}.yaml"
        path.write_text(json.dumps(content))  # which is YAML as well
        return load_recipe(path)

    def _samples_together(self, lengths: Lengths, mean_tokens: float) -> int:
        samples = self.num_samples(lengths)
        wanted = max(1.0, self.sizes.tokens / mean_tokens)
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        return min(divisors, key=lambda n: abs(n - wanted))

    def _samples(self, lengths: Lengths) -> Iterable[dict[str, Any]]:
        """Members of each sample's files, for the tar writer: a question about images."""
        rng, median = np.random.default_rng(0), self.sizes.median_words
        for number in range(self.num_samples(lengths)):
            if lengths == "equal":
                num_words, images = 2 * median, [(3, 3)]
            else:
                drawn = median * np.exp(_SPREAD * rng.standard_normal())
                num_words = int(np.clip(drawn, 8, _MOST_WORDS))
                count = int(rng.integers(1, 3)) if rng.random() < 0.5 else 0
                images = rng.integers(2, 1 + round(_MAX_ROWS**0.5), (count, 2)).tolist()
            members: dict[str, Any] = {"__key__": f"sample{number:04d}"}
            members["json"] = chat(num_words, len(images), rng)
            for place, (h, w) in enumerate(images):
                pixels = rng.integers(0, 256, (h * _ROW_PIXELS, w * _ROW_PIXELS, 3), dtype=np.uint8)
                members[f"{place}.png"] = png_bytes(pixels)
            yield members


def chat(num_words: int, num_images: int, rng: np.random.Generator) -> bytes:
    """The JSON of a question about images, and an answer that is a third of the text."""
    vocabulary = [*DIGITS, *words()]
    text = [vocabulary[n] for n in rng.integers(len(vocabulary), size=num_words)]
    cut = num_words - max(1, num_words // 3)
    messages = conversation(["image"] * num_images, " ".join(text[:cut]), " ".join(text[cut:]))
    return json.dumps({"messages": messages}).encode()


def write_shard(path: Path, samples: Iterable[dict[str, Any]]) -> None:
    """One tar file with the members of each sample."""
    with TarWriter(str(path), encoder=False) as tar:
        for members in samples:
            tar.write(members)
