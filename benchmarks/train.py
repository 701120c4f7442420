"""Compare whole training steps of ours and of transformers on the same samples.

Each side is a process of its own, because the engine changes what PyTorch's calls do on a machine
without a GPU, for the whole process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from webdataset.writer import TarWriter

from benchmarks.harness import (
    Bound,
    Contest,
    Figures,
    Quick,
    Run,
    Worker,
    command,
    conclude,
    in_subprocess,
    take_turns,
)
from data.modalities.image_files import png_bytes
from data.text.digits import DIGITS, conversation, words
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe

_ROW_PIXELS = 30  # side of a row of the tiny checkpoint
_MAX_ROWS = 64  # of an image
_SPREAD, _MOST_WORDS = 1.0, 1500  # of the words of a sample: log-normal with this sigma

Lengths = Literal["long-tailed", "equal"]
LENGTHS: tuple[Lengths, ...] = ("long-tailed", "equal")
OURS = ("packed", "packed equal")
THEIRS = ("padded", "sorted", "batched equal")
"""Contestants. Of transformers: `padded`, batches of 8 in the samples' order; `sorted`, by length
into batches of limited tokens, padding included; `batched equal`, all samples, which are equally
long, in one batch as in one of our microbatches."""

PADDED_BATCH = 8
# Contestants that are compared: ours, theirs, and the least times faster that is promised.
_PAIRS = (
    ("packed", "padded", 2.0),
    ("packed", "sorted", None),
    ("packed equal", "batched equal", 1.15),
)
_LOSS_ERROR = 1e-4  # relative; fp32 on both sides, in another order of sums


def lengths_of(contestant: str) -> Lengths:
    """The samples that a contestant trains on."""
    return "equal" if contestant.endswith("equal") else "long-tailed"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its samples.

    width, num_layers: of `TinyCheckpoint`. samples: of one step. tokens: the most in a batch of
    the contestant `sorted`. median_words: of a sample's text.
    """

    width: int = 4
    num_layers: int = 8
    samples: int = 32
    tokens: int = 4096
    median_words: int = 120


QUICK = Sizes(width=1, num_layers=4, samples=8, tokens=256, median_words=12)


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
        return self.sizes.samples if lengths == "long-tailed" else self.sizes.samples // 2

    def write(self) -> None:
        """Write everything that is read later."""
        width, num_layers = self.sizes.width, self.sizes.num_layers
        write_tiny(TinyCheckpoint("qwen3_vl", width=width, num_layers=num_layers), self.checkpoint)
        file = self.checkpoint / "preprocessor_config.json"  # its images have few rows
        content = json.loads(file.read_text())
        content["size"]["longest_edge"] = _MAX_ROWS * _ROW_PIXELS**2
        file.write_text(json.dumps(content))
        for lengths in LENGTHS:
            write_shard(self.shard(lengths), self._samples(lengths))

    def recipe(self, lengths: Lengths, steps: int, threads: int) -> Recipe:
        """Our recipe: one step per pass over the samples, on one rank."""
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
                "micro_batch_size": self.sizes.samples // 2,
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


def batches_of(contestant: str, lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples of each forward pass. tokens: most of a batch, padding included."""
    order = list(range(len(lengths)))
    if contestant == "batched equal":
        return [order]
    if contestant == "padded":
        return [order[at : at + PADDED_BATCH] for at in range(0, len(order), PADDED_BATCH)]
    batches: list[list[int]] = []
    for sample in sorted(order, key=lambda n: (lengths[n], n)):
        if batches and (len(batches[-1]) + 1) * lengths[sample] <= tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def judge(runs: Mapping[str, Sequence[Run]]) -> list[Bound]:
    """Every promise, kept or not: that it was the same work, and how much faster.

    runs: the first of each contestant is not timed. They find the loss, and the real tokens.
    """
    bounds = []
    for ours, theirs, least in _PAIRS:
        bounds += same_work(f"{ours}, {theirs}", runs[ours], runs[theirs])
        if least is not None:
            ratio = _contest("", (ours, theirs), runs).ratio(theirs)
            bounds.append(Bound(f"{ours} against {theirs}, times faster", ratio, least, False))
    return bounds


def same_work(who: str, runs: Sequence[Run], others: Sequence[Run]) -> list[Bound]:
    """That two contestants had the same losses and the same real tokens in every round."""
    pairs = [(a.result, b.result) for a, b in zip(runs, others, strict=True)]
    error = max(abs(a["loss"] - b["loss"]) / max(abs(b["loss"]), 1e-12) for a, b in pairs)
    difference = max(abs(a["tokens"] - b["tokens"]) for a, b in pairs)
    return [
        Bound(f"{who}: relative difference of losses", error, _LOSS_ERROR, True),
        Bound(f"{who}: difference of real tokens", difference, 0, True),
    ]


COLUMNS: dict[str, Callable[[Contest, str], str]] = {
    "tokens/s": lambda contest, name: (
        f"{contest.median(name, 'tokens') / contest.median(name):.0f}"
    ),
    "real tokens": lambda contest, name: f"{contest.median(name, 'tokens'):.0f}",
    "computed": lambda contest, name: f"{contest.median(name, 'computed'):.0f}",
}


def _contest(name: str, contestants: Sequence[str], runs: Mapping[str, Sequence[Run]]) -> Contest:
    return Contest(name, {one: runs[one][1:] for one in contestants})


def _side(name: str, *args: Any) -> Callable[[str], Any]:
    """Load the engine here alone: where it initialises a GPU, no process could be forked then."""
    from benchmarks import train_sides

    return getattr(train_sides, name)(*args)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each contestant.")] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    quick: Quick = False,
    json_path: Figures = None,
) -> int:
    """Train on both sides in turns; return 1 when a bound is missed."""
    sizes, rounds = (QUICK, 1) if quick else (Sizes(), rounds)
    threads = threads or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        workload = Workload(Path(directory), sizes)
        in_subprocess(workload.write)
        with Worker(partial(_side, "their_side", workload, threads)) as theirs:
            # Enough steps that the last timed one still reads ahead.
            make = partial(_side, "our_side", workload, rounds + 5, threads)
            with Worker(make) as ours:
                sides = dict.fromkeys(OURS, ours) | dict.fromkeys(THEIRS, theirs)
                turns = {name: partial(side, name) for name, side in sides.items()}
                runs = take_turns(turns, 1 + rounds, verbose=True)
    by_lengths = {
        "long-tailed": ("packed", "padded", "sorted"),
        "equal": ("packed equal", "batched equal"),
    }
    return conclude(
        f"Training steps of Qwen3-VL, {sizes.num_layers} layers, hidden size "
        f"{128 * sizes.width}, fp32, {threads} threads",
        [_contest(name, contestants, runs) for name, contestants in by_lengths.items()],
        COLUMNS,
        judge(runs),
        json_path,
        judge_speed=not quick,
    )


if __name__ == "__main__":
    command(main)()
