"""`mimo parity`: compare a layout with transformers, which runs the same checkpoint in one process.

A layout may also be compared with another layout, of the same or the other engine.
"""

from __future__ import annotations

import json as json_module
import math
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from mimo.check.compare import (
    TOLERANCE,
    Comparison,
    Fault,
    IncomparableError,
    RankSteps,
    Reference,
    ReferenceParameter,
    Shard,
    compare,
    reference_of,
)
from mimo.check.points import PointResult, compare_points, whole_points
from mimo.check.workload import picture_samples, write_shard
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import architecture_of_folder, config_of_folder, load_recipe
from mimo.checkpoint.hf.shrink import shrink
from mimo.config.schema import Recipe
from mimo.device import machine_memory
from mimo.errors import InputError
from mimo.families.keymap import Weight, num_elements
from mimo.families.registry import GENERAL
from mimo.model.fsdp import differs
from mimo.model.gate import compare_halves
from mimo.model.recipe_checks import check_memory, check_recipe
from mimo.parallel.grids import Layout
from mimo.report.tables import Table, check_writable, scientific, show, write_json
from mimo.runtime.processes import RanksFailed, RanksHung
from mimo.runtime.ranks import run_on_cpu, warm_up_on_cpu

Engine = Literal["megatron", "fsdp"]
TRANSFORMERS = "transformers"

# Named, not imported: only the fork server loads the engine and transformers.
_TRANSFORMERS = "mimo.check.points:run_transformers"
_LAYOUT = "mimo.check.recording:run_points"
_PRELOAD = ("mimo.engines.megatron.preload", "mimo.check.recording", "transformers")

_MICROBATCHES = 3  # the last has no pictures
_SAMPLES = 2  # of a lane in a microbatch
_GRADIENT_ELEMENTS = 1 << 26  # of a model with more, only the smallest tensors are compared
_TIMEOUT_SECONDS = 4 * 3600.0  # a model of billions of weights takes its time on a CPU
_STEP = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "gradients": "gradients",
    "weights": "weights as imported",
}

# Keys of layouts and of a family's settings; parity sets all others.
_OVERRIDABLE = (
    "bridge",
    *(f"language.{key}" for key in ("reshard_after_forward", "reduce_gradients")),
    *(f"encoders.vision.{key}" for key in ("placement", "run_ahead", "encode_group")),
    *(f"{m}.{key}" for m in ("language", "encoders.vision") for key in ("engine", "grid", "model")),
)


@dataclass(frozen=True)
class Parity:
    """points: in forward order. step: loss, gradients, and weights as imported.

    compared, total: numbers of parameters; a large model's largest gradients are left out.
    """

    points: list[PointResult]
    step: Comparison
    tolerance: float
    compared: int
    total: int

    @property
    def first(self) -> PointResult | None:
        """The first module that diverges."""
        return next((result for result in self.points if not result.passed), None)

    @property
    def passed(self) -> bool:
        """True if nothing diverges."""
        return self.first is None and self.step.first is None


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
        self._transformers: dict[int, Reference] = {}

    def prepare(
        self, overrides: Sequence[str], against: Sequence[str] | None = None
    ) -> list[tuple[Recipe, Layout]]:
        """Return each layout and its recipe, after writing their data.

        against: overrides of another layout on the same samples; None for transformers.
        Raises InputError.
        """
        sides = [overrides] if against is None else [overrides, against]
        counts = []
        for side in sides:
            check_overrides(side)
            grid = self._recipe(_SAMPLES, side).language.grid
            step = grid.pp if grid.vpp > 1 else 1  # interleaving needs a multiple of pp
            microbatches = -(-_MICROBATCHES // step) * step
            counts.append(_SAMPLES * microbatches * (grid.dp or 1))
        count, prepared = math.lcm(*counts), []
        for side in sides:
            recipe = self._recipe(count, side)
            layout = check_recipe(recipe, None)
            check_memory(recipe, layout, range(layout.world_size), machine_memory())
            prepared.append((recipe, layout))
        shard = self._shard(count)
        if not shard.exists():
            write_shard(shard, picture_samples(count))
        return prepared

    def run(
        self,
        overrides: Sequence[str] = (),
        tolerance: float = TOLERANCE["fp32"],
        fault: Fault | None = None,
        against: Sequence[str] | None = None,
    ) -> Parity:
        """Compare one layout. ``fault``: a deliberate bug of our ranks, for tests.

        against: overrides of another layout; None for transformers. Raises InputError; RanksFailed
        or RanksHung if a run fails; IncomparableError if one side lacks what the other has.
        """
        sides = self.prepare(overrides, against)
        recipe = sides[0][0]
        initial = initial_weights(recipe)
        assert initial is not None
        all_weights = {f"{m}.{w.name}": w for m, ws in initial.weights.items() for w in ws}
        weights = _weights_to_compare(all_weights)
        results = self._run_layout(*sides[0], weights, fault)
        if against is None:
            computed = self._run_transformers(recipe.train.global_batch_size, weights)
            reference = _in_our_names(computed, weights, results)
        else:
            others = self._run_layout(*sides[1], weights, None)
            reference = reference_of(others, {name: [] for name in weights})
            reference.points = whole_points(others, results)
        step = compare(results, reference, tolerance)
        points = compare_points(results, reference.points, tolerance)
        return Parity(points, step, tolerance, compared=len(weights), total=len(all_weights))

    def _run_layout(
        self, recipe: Recipe, layout: Layout, names: Iterable[str], fault: Fault | None
    ) -> list[RankSteps]:
        arguments = (recipe, layout, set(names), fault)
        return run_on_cpu(_LAYOUT, arguments, layout.world_size, self.timeout_seconds)

    def _run_transformers(self, count: int, weights: Mapping[str, Weight]) -> Reference:
        """Return what transformers computes from ``count`` samples; runs once per count."""
        if count not in self._transformers:
            keys = {source.key for weight in weights.values() for source in weight.sources}
            arguments = (self.checkpoint, picture_samples(count), keys)
            (reference,) = run_on_cpu(_TRANSFORMERS, arguments, 1, self.timeout_seconds)
            self._transformers[count] = reference
        return self._transformers[count]

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
        path.write_text(json_module.dumps(content))  # which is YAML as well
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


def _in_our_names(
    computed: Reference, weights: Mapping[str, Weight], results: Sequence[RankSteps]
) -> Reference:
    """Give the parameters of transformers our names and shapes. Raises IncomparableError."""
    shards = {shard.name: shard for result in results for shard in result.shards}
    if missing := weights.keys() - shards.keys():
        raise IncomparableError(f"no rank has {', '.join(sorted(missing))}")
    parameters = {}
    for name, weight in weights.items():
        sources = {source.key: computed.parameters[source.key] for source in weight.sources}
        parameters[name] = ReferenceParameter(
            [_pack(weight, {k: s.gradients[0] for k, s in sources.items()}, shards[name])],
            [_pack(weight, {k: s.weights[0] for k, s in sources.items()}, shards[name])],
        )
    return Reference(computed.steps, parameters, computed.points)


def _pack(weight: Weight, tensors: Mapping[str, np.ndarray], shard: Shard) -> np.ndarray:
    """Make our parameter from the checkpoint's tensors, with the rows of zeros that pad ours."""
    packed = weight.pack({key: torch.from_numpy(t) for key, t in tensors.items()}).numpy()
    rows = shard.shape[0]
    return np.pad(packed, [(0, rows - len(packed)), *[(0, 0)] * (packed.ndim - 1)])


def _weights_to_compare(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return all parameters, or the smallest of a large model, in the order of the model."""
    sizes = {name: num_elements([weight]) for name, weight in weights.items()}
    by_size = sorted(sizes, key=lambda name: sizes[name])
    running = np.cumsum([sizes[name] for name in by_size])
    kept = set(by_size[: int((running <= _GRADIENT_ELEMENTS).sum())])
    return {name: weight for name, weight in weights.items() if name in kept}


def main(
    checkpoint: Path,
    overrides: Sequence[str],
    tolerance: float | None,
    json: Path | None,
    engine: Engine = "megatron",
    against: str = TRANSFORMERS,
) -> int:
    """Print a table of errors; return 0 if both sides are equal, else 1.

    engine: of all our modules. against: "transformers", or an engine and overrides of another
    layout, separated by spaces. Raises InputError for bad input, before any rank starts.
    """
    check_writable(json)
    general = [f"language.family={GENERAL}"]
    if overrides == general or architecture_of_folder(checkpoint).language == GENERAL:
        if [*overrides] not in ([], general):
            raise InputError(f"{overrides[0]}: a model in two halves is compared without a layout")
        return compare_class(checkpoint, json)
    ours = [*on_engine(engine), *overrides]
    other = None if against.strip() == TRANSFORMERS else other_side(against)
    with tempfile.TemporaryDirectory(prefix="mimo-parity-") as folder:
        runner = ParityRunner(checkpoint, Path(folder))
        sides = runner.prepare(ours, other)
        warm_up_on_cpu(_PRELOAD)
        try:
            limit = TOLERANCE["fp32"] if tolerance is None else tolerance
            parity = runner.run(ours, limit, against=other)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            print(error, file=sys.stderr)
            return 1
    ranks = " against ".join(f"{layout.world_size} ranks" for _, layout in sides)
    title = f"{checkpoint}, {ranks}: {engine} against {against.strip()} (fp32)"
    _print_parity(parity, title)
    if json is not None:
        document = {
            "checkpoint": str(checkpoint),
            "overrides": ours,
            "against": against,
            "tolerance": parity.tolerance,
            "passed": parity.passed,
            "compared_parameters": parity.compared,
            "parameters": parity.total,
            "first_diverging": parity.first,
            "points": [vars(point) | {"measure": point.measure} for point in parity.points],
            **{what.replace("steps", "step"): e for what, e in parity.step.errors.items()},
            "first_difference_of_step": parity.step.first,
        }
        write_json(json, document)
    print(verdict(parity))
    return 0 if parity.passed else 1


def compare_class(checkpoint: Path, json: Path | None) -> int:
    """Compare a folder's class in two halves with the whole model; return 0 if they are equal."""
    config = config_of_folder(checkpoint)
    verdict = compare_halves(shrink(config))
    if json is not None:
        write_json(json, {"class": type(config).__name__, **asdict(verdict)})
    if verdict.problem:
        print(differs(config, verdict))
        return 1
    samples = "padded to a batch" if verdict.packing is None else "packed"
    levels = {modality: form.num_levels for modality, form in verdict.outputs.items()}
    print(
        f"equal: loss and every gradient within {TOLERANCE['fp32']:g} on a tiny copy, samples "
        f"{samples}; modalities and their feature levels: {levels}"
    )
    return 0


def on_engine(engine: str) -> list[str]:
    """Return the overrides that set the engine of all our modules."""
    return [f"{module}.engine={engine}" for module in ("language", "encoders.vision")]


def other_side(words: str) -> list[str]:
    """Parse another layout: an engine, and overrides. Raises InputError."""
    with suppress(ValueError):  # a quote is not closed
        engine, *overrides = shlex.split(words) or [""]
        if engine in get_args(Engine):
            return [*on_engine(engine), *overrides]
    raise InputError(
        f"--against {words!r}: give {TRANSFORMERS}, or an engine and perhaps its layout, such as "
        "'megatron language.grid.pp=2'"
    )


def _print_parity(parity: Parity, title: str) -> None:
    """Print a row per point in forward order, then loss, gradients and imported weights."""
    rows = [
        (r.point, scientific(r.error), r.measure, r.where, "equal" if r.passed else "DIFFERS")
        for r in parity.points
    ]
    for what, name in _STEP.items():
        error = parity.step.worst(what)
        result = "equal" if error <= parity.tolerance else "DIFFERS"
        rows.append((name, scientific(error), "max|Δ| / max|reference|", "", result))
    columns = ("compared", "error", "measure", "largest on", "result")
    show(Table(columns, rows, words=True, title=title))


def verdict(parity: Parity) -> str:
    """Return one sentence: equal, or where the two first diverge."""
    if parity.passed:
        which = "every gradient"
        if parity.compared < parity.total:
            which = f"the gradients of the {parity.compared} smallest of {parity.total} parameters"
        return f"equal: every point, the loss and {which} within {parity.tolerance:g}"
    lines = []
    if first := parity.first:
        lines.append(
            f"first diverging module: {first.point} on {first.where} ({first.measure} "
            f"{scientific(first.error)}, tolerance {parity.tolerance:g})"
        )
    if parity.step.first is not None:
        lines.append(f"first difference of the step: {parity.step.first}")
    return "\n".join(lines)
