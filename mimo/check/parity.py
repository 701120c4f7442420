"""`mimo parity`: compare a layout with transformers, which runs the same checkpoint."""

import json as json_module
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from mimo.check.compare import (
    INPUTS,
    LOGITS,
    TOLERANCE,
    Comparison,
    Fault,
    IncomparableError,
    RankSteps,
    Reference,
    ReferenceParameter,
    Shard,
    compare,
)
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
_OVERRIDABLE = ("bridge.", "language.", "encoders.vision.")


class ParityRunner:
    """Compares layouts of one checkpoint. folder: for the data, written once."""

    def __init__(
        self, checkpoint: Path, folder: Path, timeout_seconds: float = _TIMEOUT_SECONDS
    ) -> None:
        self.checkpoint = checkpoint.absolute()
        self.folder = folder
        self.timeout_seconds = timeout_seconds
        self._transformers: dict[int, Reference] = {}

    def _prepare(self, overrides: Sequence[str]) -> tuple[Recipe, Layout]:
        """Return the recipe and its layout, after writing their data. Raises InputError."""
        for override in overrides:
            if not override.startswith(_OVERRIDABLE):
                raise InputError(
                    f"override {override!r}: parity takes layouts and sizes only; give keys under "
                    f"{', '.join(_OVERRIDABLE)}"
                )
        grid = self._recipe(_SAMPLES, overrides).language.grid
        step = grid.pp if grid.vpp > 1 else 1  # interleaving needs a multiple of pp
        count = _SAMPLES * -(-_MICROBATCHES // step) * step * (grid.dp or 1)
        recipe = self._recipe(count, overrides)
        layout = check_recipe(recipe, None)
        check_memory(recipe, layout, range(layout.world_size), machine_memory())
        shard = Path(recipe.data.sources[0].path)
        if not shard.exists():
            write_shard(shard, picture_samples(count))
        return recipe, layout

    def run(
        self,
        overrides: Sequence[str] = (),
        tolerance: float = TOLERANCE["fp32"],
        fault: Fault | None = None,
    ) -> Comparison:
        """Compare one layout. ``fault``: a deliberate bug of our ranks, for tests.

        The weights are those that were imported. Raises InputError before any rank starts;
        RanksFailed or RanksHung if a run fails; IncomparableError.
        """
        recipe, layout = self._prepare(overrides)
        warm_up_on_cpu(_PRELOAD)
        initial = initial_weights(recipe)
        assert initial is not None
        all_weights = {f"{m}.{w.name}": w for m, ws in initial.weights.items() for w in ws}
        weights = _weights_to_compare(all_weights)
        if len(weights) < len(all_weights):
            print(f"only the {len(weights)} smallest of {len(all_weights)} gradients are compared")
        arguments = (recipe, layout, set(weights), fault)
        results = run_on_cpu(_LAYOUT, arguments, layout.world_size, self.timeout_seconds)
        computed = self._run_transformers(recipe.train.global_batch_size, weights)
        vocabulary = computed.points[LOGITS].shape[1]
        for result in results:  # our vocabulary may be padded further
            result.points[LOGITS] = [
                replace(part, values=part.values[:, : vocabulary - part.column])
                for part in result.points.get(LOGITS, [])
                if part.column < vocabulary
            ]
        return compare(results, _in_our_names(computed, weights, results), tolerance)

    def _run_transformers(self, count: int, weights: Mapping[str, Weight]) -> Reference:
        """Return what transformers computes from ``count`` samples; runs once per count."""
        if count not in self._transformers:
            keys = {source.key for weight in weights.values() for source in weight.sources}
            arguments = (self.checkpoint, picture_samples(count), keys)
            (reference,) = run_on_cpu(_TRANSFORMERS, arguments, 1, self.timeout_seconds)
            self._transformers[count] = reference
        return self._transformers[count]

    def _recipe(self, count: int, overrides: Sequence[str]) -> Recipe:
        content = {
            "name": "parity",
            "init_from": str(self.checkpoint),
            "language": {"grid": {"dp": 1}},
            "encoders": {"vision": {"placement": "colocated"}},
            "bridge": {"check": "always"},
            "data": {
                "sources": [{"path": str(self.folder / f"samples-{count}.tar")}],
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
    tolerance: float,
    json: Path | None,
    engine: str = "megatron",
) -> int:
    """Print a table of errors; return 0 if both sides are equal, else 1. engine: of our modules."""
    check_writable(json)
    general = [f"language.family={GENERAL}"]
    if overrides == general or architecture_of_folder(checkpoint).language == GENERAL:
        if [*overrides] not in ([], general):
            raise InputError(f"{overrides[0]}: a model in two halves is compared without a layout")
        return compare_class(checkpoint, json)
    ours = [*on_engine(engine), *overrides]
    with tempfile.TemporaryDirectory(prefix="mimo-parity-") as folder:
        try:
            comparison = ParityRunner(checkpoint, Path(folder)).run(ours, tolerance)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            print(error, file=sys.stderr)
            return 1
    _print_errors(comparison, tolerance, f"{checkpoint}: {engine} against transformers (fp32)")
    is_equal = comparison.first is None
    if json is not None:
        facts = {"checkpoint": str(checkpoint), "overrides": ours, "tolerance": tolerance}
        write_json(json, {**facts, "passed": is_equal, "comparison": comparison})
    print("\n".join(comparison.lines()) or f"equal: everything within {tolerance:g}")
    return 0 if is_equal else 1


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


def _print_errors(comparison: Comparison, tolerance: float, title: str) -> None:
    points = comparison.points.values()
    rows = [(p.name, p.error, p.where, 0.0 if p.name in INPUTS else tolerance) for p in points]
    rows += [(name, comparison.worst(what), "", tolerance) for what, name in _STEP.items()]
    cells = [
        (name, scientific(error), where, "equal" if error <= limit else "DIFFERS")
        for name, error, where, limit in rows
    ]
    columns = ("compared", "error", "largest on", "result")
    show(Table(columns, cells, words=True, title=title))
