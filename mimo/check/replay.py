"""`mimo replay`: repeat one step of a run on one rank, with statistics of every layer.

The samples are those of the step, whatever the layout. With the weights that the step began with,
the loss is the run's, up to rounding. Layers have the names of the checkpoint format.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, override

from torch import Tensor, nn

from mimo.checkpoint.folder import Progress, read_progress
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.load import load_weights
from mimo.checkpoint.resume import open_checkpoint
from mimo.config.phases import PHASE_FOLDER
from mimo.config.schema import LANGUAGE, Recipe
from mimo.device import gpu_memory, machine_memory
from mimo.engines.contract import Module
from mimo.engines.fsdp.module import FsdpModule
from mimo.errors import InputError
from mimo.generate.one_rank import join_world_of_one, one_rank_recipe
from mimo.model.dataset import changed_shards_named, open_dataset
from mimo.model.decoding import open_decoding
from mimo.model.recipe_checks import check_memory
from mimo.model.step_plan import StepPlan, pads_samples, step_planner
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology
from mimo.report.tables import Table, show, write_json
from mimo.runtime.run_files import METRICS, json_lines
from mimo.train.anomalies import BATCHES, samples_of
from mimo.train.batches import STEP
from mimo.train.loop import Trainer
from mimo.train.metrics import StepTimes
from mimo.train.run_folder import continue_order
from mimo.train.step import StepObserver, train_step

_LAYER = re.compile(r"(.*?\.layers\.\d+)\..*")


@dataclass(frozen=True)
class Replay:
    """The results of a repeated step.

    weights: the checkpoint; None for those that the run began with. updates_before: updates between
    the weights and the step. loss: per token. logged: the run's line in `metrics.jsonl`.
    activations: by layer. gradients: by parameter, before clipping.
    """

    step: int
    weights: str | None
    updates_before: int
    loss: float
    grad_norm: float
    logged: Mapping[str, Any] | None
    samples: list[dict[str, Any]]
    activations: dict[str, dict[str, float]]
    gradients: dict[str, dict[str, float]]


def replay(run: Path, step: int) -> Replay:
    """Run the batch of ``step``, as `metrics.jsonl` numbers it, forward and backward on one rank.

    run: a run's folder, or that of one phase. Raises InputError if there are no weights, or if data
    or recipe have changed since.
    """
    weights, recipe = _nearest_checkpoint(run, step)
    if step >= recipe.train.steps:
        raise InputError(f"--step {step}: the run has steps 0 to {recipe.train.steps - 1}")
    if weights is None and PHASE_FOLDER.fullmatch(run.name):
        raise InputError(
            f"--step {step}: no checkpoint of {run} is before it, and a phase begins with the "
            "weights of another; replay a step after its first checkpoint"
        )
    join_world_of_one()
    trainer = _trainer(recipe, run, weights)
    dataset = open_dataset(trainer.recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None, "the recipe schema asks for at least one source"
    progress = Progress(0, 0) if weights is None else read_progress(weights)
    updates_before = step - progress.step
    dataset, progress, _ = continue_order(dataset, progress)
    recipe, layout = trainer.recipe, trainer.topology.layout
    done, padded = (progress.step, progress.used), pads_samples(recipe)
    planner = step_planner(recipe, layout, dataset, done=done, padded=padded)
    watched = _WatchedLayers(trainer.model.modules)
    with (
        changed_shards_named(),
        open_decoding(recipe, layout, 0, dataset.readers) as decoding,
        trainer.batches(
            name=STEP,
            dataset=dataset,
            steps=range(step, step + 1),
            used=planner.used_before(step),
            decoding=decoding,
        ) as batches,
    ):
        metrics = train_step(
            step=step,
            recipe=recipe,
            model=trainer.model,
            batches=batches,
            observer=watched,
            times=StepTimes(layout, 0),
        )
    assert watched.plan is not None
    lines = (line for line in json_lines(run / METRICS) if "loss" in line)
    result = Replay(
        step=step,
        weights=None if weights is None else str(weights),
        updates_before=updates_before,
        loss=metrics.mean_loss,
        grad_norm=metrics.grad_norm,
        logged=next((line for line in lines if line["step"] == step), None),
        samples=[*samples_of(watched.plan, dataset)],
        activations={name: statistics.result() for name, statistics in watched.activations.items()},
        gradients={name: statistics.result() for name, statistics in watched.gradients.items()},
    )
    _check_same(run, watched.plan, result)
    return result


def _nearest_checkpoint(run: Path, step: int) -> tuple[Path | None, Recipe]:
    """Return the last checkpoint before the step, and the recipe that the step had."""
    if not (run / "recipe.yaml").is_file():
        raise InputError(f"{run}: no run in this folder; give a run's folder, or that of one phase")
    paths = (path.parent for path in (run / "checkpoints").glob("step_*/progress.json"))
    checkpoints = sorted((read_progress(path).step, path) for path in paths)
    earlier = [path for done, path in checkpoints if done <= step]
    later = [path for done, path in checkpoints if done > step]
    recipe = load_recipe((later[0] if later else run) / "recipe.yaml")
    return (earlier[-1] if earlier else None), recipe


def _trainer(recipe: Recipe, run: Path, weights: Path | None) -> Trainer:
    alone = one_rank_recipe(recipe, freeze=False)
    # The update is thrown away. Encoders run microbatch by microbatch to save memory.
    settings = {"optimizer": "sgd", "distributed_optimizer": False, "overlap_param_gather": "auto"}
    colocated = {"placement": "colocated", "encode_group": 1}
    train = alone.train.model_copy(update=settings)
    encoders = {n: e.model_copy(update=colocated) for n, e in alone.encoders.items()}
    colocated = {"placement": "colocated"}
    generators = {n: g.model_copy(update=colocated) for n, g in alone.generators.items()}
    update = {"train": train, "encoders": encoders, "generators": generators}
    alone = alone.model_copy(update=update)
    layout = build_layout(alone, 1)
    check_memory(alone, layout, range(1), gpu_memory() or machine_memory())
    if weights is None:
        return Trainer(alone, build_topology(layout), run, initial_weights(alone))
    stored = open_checkpoint(weights)
    trainer = Trainer(alone, build_topology(layout), run, provided=stored)
    load_weights(trainer.model.modules, weights, stored)
    return trainer


def _check_same(run: Path, plan: StepPlan, result: Replay) -> None:
    """Raise InputError if the step had other samples by its metrics or its kept batch."""
    counts = {"tokens": plan.num_tokens, "loss_tokens": plan.num_loss_tokens}
    logged = counts if result.logged is None else result.logged
    pairs = ((name, value, logged[name]) for name, value in counts.items())
    differs = [f"{name} {ours}, not {theirs}" for name, ours, theirs in pairs if ours != theirs]
    kept = run / BATCHES / f"step_{result.step}.json"
    if kept.exists():
        batch = json.loads(kept.read_text(encoding="utf-8"))
        groups = result.samples, batch["samples"]
        keys = ({sample["key"] for sample in group} for group in groups)
        differs += [f"sample {key}" for key in sorted(set.symmetric_difference(*keys))[:3]]
    if differs:
        raise InputError(
            f"--step {result.step}: the samples are not those of the run any more "
            f"({', '.join(differs)}); sources, batch size or packing have changed since, or a "
            f"sample became unreadable: restore them as in {run / 'recipe.yaml'}"
        )


class Statistics:
    """Norm, root mean square and maximum of the finite elements of all tensors that are added."""

    def __init__(self) -> None:
        self._elements = self._non_finite = 0
        self._squares = self._largest = 0.0

    def add(self, values: Tensor) -> None:
        wide = values.detach().double()
        finite = wide[wide.isfinite()]
        self._elements += wide.numel()
        self._non_finite += wide.numel() - finite.numel()
        self._squares += float(finite.square().sum())
        if finite.numel():
            self._largest = max(self._largest, float(finite.abs().amax()))

    def result(self) -> dict[str, float]:
        return {
            "elements": self._elements,
            "norm": math.sqrt(self._squares),
            "rms": math.sqrt(self._squares / max(self._elements - self._non_finite, 1)),
            "max": self._largest,
            "non_finite": self._non_finite,
        }


class _WatchedLayers(StepObserver):
    """Statistics of each layer's output and of every gradient; keeps the plan of the step."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.activations: dict[str, Statistics] = {}
        self.gradients: dict[str, Statistics] = {}
        self.plan: StepPlan | None = None
        for module in modules.values():
            for name, layer in _layers(module):
                statistics = self.activations.setdefault(name, Statistics())
                layer.register_forward_hook(partial(_add_output, statistics))

    @override
    def planned(self, step: int, plan: StepPlan) -> None:
        self.plan = plan

    @override
    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        for module in modules.values():
            for piece in module.gradients():
                self.gradients.setdefault(piece.key, Statistics()).add(piece.values)


def _add_output(statistics: Statistics, _: nn.Module, __: object, output: object) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Tensor) and first.is_floating_point():
        statistics.add(first)


def _layers(module: Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer of a stack, and modules with weights outside of the stacks, by name."""
    inside: set[nn.Module] = set()
    if isinstance(module, FsdpModule):
        stack = "decoder" if module.name == LANGUAGE else "blocks"
        for number, unit in enumerate(module.whole.units):  # type: ignore[arg-type]
            inside.update(unit.modules())
            yield f"{module.name}.{stack}.layers.{number}", unit
    for name, part in module.whole.named_modules():
        if part in inside:
            continue
        if name.rpartition(".")[2].isdigit():
            inside.update(part.modules())
        elif next(part.children(), None) or not list(part.parameters(recurse=False)):
            continue
        yield f"{module.name}.{name}", part


def main(run: Path, step: int) -> int:
    """Replay a step, print a table of layers, and write every number to `replays/step_<n>.json`."""
    result = replay(run, step)
    target = run / "replays" / f"step_{step}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, asdict(result))
    columns = ("layer", "rms", "max", "non-finite", "gradient norm", "max", "non-finite", "")
    show(Table(columns, _rows(result), title=f"step {step}"))
    name = "those that the run began with" if result.weights is None else result.weights
    print(f"weights: {name}, {result.updates_before} updates before this step")
    if result.logged is not None:
        print(f"logged: loss={result.logged['loss']} grad_norm={result.logged['grad_norm']}")
    print(f"written: {target}")
    print(f"step={step} loss={result.loss:.6g} grad_norm={result.grad_norm:.6g}")
    return 0


def _rows(result: Replay) -> list[list[str]]:
    """Return a row for each layer: statistics of its output and of its parameters' gradients."""
    by_layer: dict[str, list[dict[str, float]]] = {name: [] for name in result.activations}
    for key, numbers in result.gradients.items():
        layer = _LAYER.fullmatch(key)
        by_layer.setdefault(layer[1] if layer else key.rpartition(".")[0], []).append(numbers)
    rows = []
    for name, gradients in by_layer.items():
        output, cells, bad = result.activations.get(name), [""] * 6, 0.0
        if output is not None and output["elements"]:
            bad = output["non_finite"]
            cells[:3] = f"{output['rms']:.3e}", f"{output['max']:.3e}", f"{bad:.0f}"
        if gradients:
            norm = math.sqrt(sum(numbers["norm"] ** 2 for numbers in gradients))
            non_finite = sum(numbers["non_finite"] for numbers in gradients)
            highest = max(numbers["max"] for numbers in gradients)
            cells[3:] = f"{norm:.3e}", f"{highest:.3e}", f"{non_finite:.0f}"
            bad += non_finite
        rows.append([name, *cells, "NOT FINITE" if bad else ""])
    return rows
