"""`mimo replay`: one step of a run again, alone on one rank, with statistics of every layer.

The samples are those that the step had, whatever the layout: they follow from the order of samples
and from what the run had used of it. Losses are summed over samples, so that of one rank is the
run's own, up to rounding, if the weights are those that the step began with.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mimo.check.layer_statistics import WatchedLayers
from mimo.checkpoint.assets import recipe_of
from mimo.checkpoint.folder import Progress, read_progress
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.load import load_checkpoint
from mimo.checkpoint.resume import open_checkpoint
from mimo.config.phases import PHASE_FOLDER
from mimo.config.schema import Recipe
from mimo.device import gpu_memory, machine_memory
from mimo.errors import InputError
from mimo.generate.one_rank import join_world_of_one, one_rank_recipe
from mimo.model.dataset import Dataset, changed_shards_named, open_dataset
from mimo.model.decoding import open_decoding
from mimo.model.memory import check_memory
from mimo.model.planner import step_planner
from mimo.model.step_plan import StepPlan
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology
from mimo.train.batches import STEP
from mimo.train.continuation import continue_order
from mimo.train.loop import Trainer
from mimo.train.metrics import StepResult
from mimo.train.observer import StepObserver
from mimo.train.odd_steps import BATCHES, samples_of
from mimo.train.run_files import METRICS
from mimo.train.step import train_step
from mimo.train.times import StepTimes

_LAYER = re.compile(r"(.*?\.layers\.\d+)\..*")
_WIDTH = 120  # of the table at least, also where output is no terminal


@dataclass(frozen=True)
class Replay:
    """What a step was again.

    weights: the checkpoint; None for those that the run began with. updates_before: the step, that
    they are behind it; negative if ahead. loss: per token. logged: the run's own line, if there is
    one. activations: by layer. gradients: by parameter, before clipping.
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


def replay(run: Path, step: int, checkpoint: Path | None = None) -> Replay:
    """Run the batch of ``step``, as `metrics.jsonl` numbers it, forward and backward on one rank.

    run: a run's folder, or that of one phase. checkpoint: with whose weights; else those of the
    nearest checkpoint that is not after the step, or those that the run began with.
    Raises InputError where that is not known, or where the samples are not those of the step any
    more, because data or recipe have changed.
    """
    near, recipe = _nearest(run, step), _recipe_of_step(run, step)
    weights = checkpoint or near
    if step >= recipe.train.steps:
        raise InputError(f"--step {step}: the run has steps 0 to {recipe.train.steps - 1}")
    if weights is None and PHASE_FOLDER.fullmatch(run.name):
        raise InputError(
            f"--step {step}: no checkpoint of {run} is old enough, and a phase begins with the "
            f"weights of another; name a checkpoint with --checkpoint"
        )
    join_world_of_one()
    trainer = _trainer(recipe, run, weights)
    dataset = open_dataset(trainer.recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None, "the recipe schema asks for at least one source"
    progress = Progress(0, 0) if near is None else read_progress(near)
    dataset, progress, _ = continue_order(dataset, progress)
    watched = WatchedLayers(trainer.model.modules)
    with changed_shards_named():
        result = _step(trainer, dataset, progress, step, watched)
    assert watched.plan is not None
    samples, logged = list(samples_of(watched.plan, dataset)), _logged(run, step)
    _check_same(run, step, watched.plan, samples, logged)
    done = 0 if weights is None else read_progress(weights).step
    return Replay(
        step,
        None if weights is None else str(weights),
        step - done,
        result.loss / max(watched.plan.num_loss_tokens, 1),
        result.grad_norm,
        logged,
        samples,
        {name: one.result() for name, one in watched.activations.items()},
        {name: one.result() for name, one in watched.gradients.items()},
    )


def _checkpoints(run: Path) -> dict[int, Path]:
    """Those of a run, by the number of steps that they have behind them."""
    found = (path.parent for path in (run / "checkpoints").glob("step_*/progress.json"))
    return dict(sorted((read_progress(path).step, path) for path in found))


def _nearest(run: Path, step: int) -> Path | None:
    if not (run / "recipe.yaml").is_file():
        raise InputError(f"{run}: no run is there; give its folder, or that of one of its phases")
    earlier = [path for done, path in _checkpoints(run).items() if done <= step]
    return earlier[-1] if earlier else None


def _recipe_of_step(run: Path, step: int) -> Recipe:
    """The recipe that the step was done with: a resumed run may have another."""
    later = [path for done, path in _checkpoints(run).items() if done > step]
    return recipe_of(later[0]) if later else load_recipe(run / "recipe.yaml")


def _trainer(recipe: Recipe, run: Path, weights: Path | None) -> Trainer:
    alone = one_rank_recipe(recipe, freeze=False)
    # Nothing is kept of an update. A microbatch at a time is what one rank has room for.
    settings = {"optimizer": "sgd", "distributed_optimizer": False, "overlap_param_gather": "auto"}
    together = {"placement": "colocated", "encode_group": 1}
    alone = alone.model_copy(
        update={
            "train": alone.train.model_copy(update=settings),
            "encoders": {n: one.model_copy(update=together) for n, one in alone.encoders.items()},
        }
    )
    layout = build_layout(alone, 1)
    check_memory(alone, layout, range(1), gpu_memory() or machine_memory())
    if weights is None:
        return Trainer(alone, build_topology(layout), run, initial_weights(alone))
    stored = open_checkpoint(weights)
    trainer = Trainer(alone, build_topology(layout), run, provided=stored)
    load_checkpoint(trainer.model.modules, weights, stored, with_optimizer=False)
    return trainer


def _step(
    trainer: Trainer, dataset: Dataset, progress: Progress, step: int, watched: StepObserver
) -> StepResult:
    """progress: where the run stood at some time before the step."""
    recipe, layout = trainer.recipe, trainer.topology.layout
    done = progress.step, progress.used
    used = step_planner(recipe, layout, dataset, done=done).used_before(step)
    with (
        open_decoding(recipe, layout, 0, dataset.readers) as decoding,
        trainer.batches(STEP, dataset, range(step, step + 1), used, 0, decoding) as batches,
    ):
        times = StepTimes(layout, 0)
        return train_step(step, recipe, trainer.model, batches, watched, times)


def _logged(run: Path, step: int) -> dict[str, Any] | None:
    """The line of the step in the run's metrics."""
    path = run / METRICS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed while writing
        if found["step"] == step and "loss" in found:
            return found
    return None


def _check_same(
    run: Path,
    step: int,
    plan: StepPlan,
    samples: list[dict[str, Any]],
    logged: Mapping[str, Any] | None,
) -> None:
    """Raise InputError if these are not the samples that the step had, as far as that is known."""
    own = {"tokens": plan.num_tokens, "loss_tokens": plan.num_loss_tokens}
    differs = [
        f"{name} {value}, not {logged[name]}"
        for name, value in own.items()
        if logged is not None and logged[name] != value
    ]
    kept = run / BATCHES / f"step_{step}.json"
    if kept.exists():
        then = {one["key"] for one in json.loads(kept.read_text(encoding="utf-8"))["samples"]}
        other = sorted({one["key"] for one in samples} ^ then)
        differs += [f"sample {key}" for key in other[:3]]
    if differs:
        raise InputError(
            f"--step {step}: the samples are not those of the run any more ({', '.join(differs)}); "
            f"sources, batch size or packing have changed since, or a sample cannot be read now "
            f"that could then: put them back as in {run / 'recipe.yaml'}"
        )


# ------------------------------------------------------------------------- for people


def main(run: Path, step: int, checkpoint: Path | None = None, target: Path | None = None) -> int:
    """`mimo replay RUN --step N`: prints a table, and writes every number to a file."""
    found = replay(run, step, checkpoint)
    target = target or run / "replays" / f"step_{step}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(_without_nan(asdict(found)), indent=1), encoding="utf-8")
    Console(width=max(Console().width, _WIDTH)).print(_table(found))
    name = "those that the run began with" if found.weights is None else found.weights
    apart, side = abs(found.updates_before), "before" if found.updates_before > 0 else "after"
    far = f"{apart} step{'s' if apart > 1 else ''} {side} this step"
    where = far if apart else "exactly those of the step"
    print(f"weights: {name}, {where}")
    if found.logged is not None:
        then = {key: _told(found.logged[key]) for key in ("loss", "grad_norm")}
        print(f"logged: loss {then['loss']} grad_norm {then['grad_norm']}")
    print(f"written: {target}")
    print(f"step={step} loss={found.loss:.6g} grad_norm={found.grad_norm:.6g}")
    return 0


def _told(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _table(found: Replay) -> Table:
    """A line for each layer: what it computes, and the gradients of its parameters."""
    table = Table("layer", title=f"step {found.step}")
    for name in ("rms", "max", "non-finite", "gradient norm", "max", "non-finite"):
        table.add_column(name, justify="right")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in found.activations}
    for key, numbers in found.gradients.items():
        layer = _LAYER.fullmatch(key)
        rows.setdefault(layer[1] if layer else key.rpartition(".")[0], []).append(numbers)
    for name, gradients in rows.items():
        own = found.activations.get(name)
        cells = ["", "", ""]
        if own is not None and own["elements"]:
            cells = [f"{own['rms']:.3e}", f"{own['max']:.3e}", f"{own['non_finite']:.0f}"]
        learnt = ["", "", ""]
        if gradients:
            norm = math.sqrt(sum(one["norm"] ** 2 for one in gradients))
            bad = sum(one["non_finite"] for one in gradients)
            learnt = [f"{norm:.3e}", f"{max(one['max'] for one in gradients):.3e}", f"{bad:.0f}"]
        style = "red" if any(one and float(one) for one in (cells[2], learnt[2])) else None
        table.add_row(name, *cells, *learnt, style=style)
    return table


def _without_nan(value: Any) -> Any:
    """The same for JSON, which has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
