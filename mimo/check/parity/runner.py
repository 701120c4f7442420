"""Runs a checkpoint in transformers, in one process, and in our layouts, on real ranks.

What a layout is compared with is transformers, or another layout and perhaps another engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from data.modalities.image_files import png_bytes
from mimo.check.parity.compare import (
    TOLERANCE,
    OursOnRank,
    Parity,
    Theirs,
    compare_layouts,
    compare_points,
    compare_step,
    whole_points,
)
from mimo.check.verify.compare import Fault
from mimo.check.verify.workload import Item, Sample, write_shard
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.device import machine_memory
from mimo.errors import InputError
from mimo.families.keymap import Weight, num_elements
from mimo.model.memory import check_memory
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import run_on_cpu

# Named, not imported: only the fork server loads the engine and transformers.
_THEIRS, _OURS = "mimo.check.parity.theirs:run_theirs", "mimo.check.parity.ours:run_ours"
PRELOAD = (
    "mimo.engines.megatron.preload",
    "mimo.check.parity.ours",
    "mimo.check.parity.theirs",
    "transformers",
)

_MICROBATCHES = 3  # the last has no pictures
_SAMPLES = 2  # of a lane in a microbatch
_GRADIENT_ELEMENTS = 1 << 26  # of a model with more, only the smallest tensors are compared
_TIMEOUT_SECONDS = 4 * 3600.0  # a model of billions of weights takes its time on a CPU
# For each sample, width and height of its pictures in pixels. Two samples without pictures stand
# together, so that one microbatch is text only.
_PICTURES = (((61, 37), (140, 90)), (), ((97, 203),), ((28, 28), (45, 131), (33, 71)), (), ())
_QUESTIONS = ("what digits are these ?", "what comes after 3 ?", "read the digit .")
_MAX_ANSWER = 6  # words

# The keys of layouts and of a family's settings; parity sets all others itself.
_OVERRIDABLE = (
    "bridge",
    *(
        f"language.{key}"
        for key in ("engine", "grid", "model", "reshard_after_forward", "reduce_gradients")
    ),
    *(
        f"encoders.vision.{key}"
        for key in ("engine", "grid", "model", "placement", "run_ahead", "encode_group")
    ),
)


class ParityRunner:
    """Compares layouts of one checkpoint; all of them share what transformers computed.

    folder: for the data, written once. Start the fork server (`warm_up_on_cpu`) first.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, timeout_seconds: float = _TIMEOUT_SECONDS
    ) -> None:
        self.checkpoint = checkpoint.absolute()
        self.folder = folder
        self.timeout_seconds = timeout_seconds
        self._theirs: dict[int, Theirs] = {}

    def prepare(
        self, overrides: Sequence[str], against: Sequence[str] | None = None
    ) -> list[tuple[Recipe, Layout]]:
        """The recipe of each layout, with the data that they need. Raises InputError, RecipeError.

        against: overrides of another layout on the same samples; None for transformers.
        """
        sides = [overrides] if against is None else [overrides, against]
        counts = []
        for side in sides:
            check_overrides(side)
            grid = self._recipe(_SAMPLES, side).language.grid
            step = grid.pp if grid.vpp > 1 else 1  # interleaving needs a multiple of pp
            microbatches = -(-_MICROBATCHES // step) * step
            counts.append(_SAMPLES * microbatches * (grid.dp or 1))
        count, found = math.lcm(*counts), []
        for side in sides:
            recipe = self._recipe(count, side)
            layout = check_recipe(recipe, None)
            check_memory(recipe, layout, range(layout.world_size), machine_memory())
            found.append((recipe, layout))
        shard = self._shard(count)
        if not shard.exists():
            write_shard(shard, make_samples(count))
        return found

    def run(
        self,
        overrides: Sequence[str] = (),
        tolerance: float = TOLERANCE,
        fault: Fault | None = None,
        against: Sequence[str] | None = None,
    ) -> Parity:
        """Compare one layout. ``fault``: a deliberate bug of our ranks, for tests.

        against: as of `prepare`. Raises what `prepare` raises; RanksFailed or RanksHung if a run
        fails; IncomparableError if one side lacks what the other has.
        """
        sides = self.prepare(overrides, against)
        recipe = sides[0][0]
        initial = initial_weights(recipe)
        assert initial is not None
        everything = {f"{m}.{w.name}": w for m, own in initial.weights.items() for w in own}
        weights = _chosen(everything)
        results = self._run_ours(*sides[0], weights, fault)
        if against is None:
            theirs = self._run_theirs(recipe.train.global_batch_size, weights)
            step = compare_step(results, theirs.reference, weights, tolerance)
            lines = compare_points(results, theirs.points, tolerance)
        else:
            others = self._run_ours(*sides[1], weights, None)
            step = compare_layouts(results, others, weights, tolerance)
            lines = compare_points(results, whole_points(others, results), tolerance)
        return Parity(lines, step, tolerance, compared=len(weights), total=len(everything))

    def _run_ours(
        self, recipe: Recipe, layout: Layout, names: Iterable[str], fault: Fault | None
    ) -> list[OursOnRank]:
        arguments = (recipe, layout, set(names), fault)
        return run_on_cpu(_OURS, arguments, layout.world_size, self.timeout_seconds)

    def _run_theirs(self, count: int, weights: Mapping[str, Weight]) -> Theirs:
        """What transformers computes from ``count`` samples; an earlier run is used again."""
        if count not in self._theirs:
            keys = {source.key for weight in weights.values() for source in weight.sources}
            arguments = (self.checkpoint, make_samples(count), keys)
            (self._theirs[count],) = run_on_cpu(_THEIRS, arguments, 1, self.timeout_seconds)
        return self._theirs[count]

    def _shard(self, count: int) -> Path:
        return self.folder / f"samples-{count}.tar"

    def _recipe(self, count: int, overrides: Sequence[str]) -> Recipe:
        content = {
            "name": "parity",
            "init_from": str(self.checkpoint),
            "language": {"grid": {"dp": 1}},
            "encoders": {"vision": {"placement": "colocated"}},
            "bridge": {"check": "always"},
            "data": {
                "sources": [{"path": str(self._shard(count))}],
                "sequence_length": 16384,
                "shuffle_block": count,  # in order
                "max_skipped_samples": 0,
            },
            "train": {
                "steps": 2,  # the last one would write a checkpoint
                "global_batch_size": count,
                "micro_batch_size": _SAMPLES,
                "precision": "fp32",
                "optimizer": "sgd",
                "learning_rate": 1.0e-6,
                "clip_grad_norm": None,
                "run_dir": str(self.folder / "runs"),
                "threads_per_rank": 1,
            },
        }
        path = self.folder / f"parity-{count}.yaml"
        path.write_text(json.dumps(content))  # which is YAML as well
        return load_recipe(path, overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise InputError for an override of anything but layout or a family's settings."""
    for override in overrides:
        key = override.partition("=")[0]
        if not any(key == known or key.startswith(f"{known}.") for known in _OVERRIDABLE):
            raise InputError(
                f"override {override!r}: parity takes layouts and sizes only; give keys under "
                f"{', '.join(_OVERRIDABLE)}"
            )


def _chosen(everything: Mapping[str, Weight]) -> dict[str, Weight]:
    """The parameters whose gradients are compared, in the order of the model.

    They are all parameters, or the smallest ones of a large model: norms, biases and towers.
    """
    sizes = {name: num_elements([weight]) for name, weight in everything.items()}
    by_size = sorted(sizes, key=lambda name: sizes[name])
    running = np.cumsum([sizes[name] for name in by_size])
    kept = set(by_size[: int((running <= _GRADIENT_ELEMENTS).sum())])
    return {name: weight for name, weight in everything.items() if name in kept}


def make_samples(count: int) -> list[Sample]:
    """Chats with several pictures, with one and with none; sizes repeat, the noise does not."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        digits = rng.integers(0, 10, int(rng.integers(1, _MAX_ANSWER + 1)))
        noise, items = np.random.default_rng(number), []
        for width, height in _PICTURES[number % len(_PICTURES)]:
            pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
            items.append(Item("image", "png", png_bytes(pixels)))
        question = _QUESTIONS[number % len(_QUESTIONS)]
        found.append(Sample(tuple(items), question, " ".join(str(digit) for digit in digits)))
    return found
