"""What a run begins with, to the last bit: weights, optimizer and moving average of a checkpoint.

A run in bf16, whose optimizer keeps weights of its own, takes one step and is saved. Two others,
with other weights of their own, begin with that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.reading import describe, read
from mimo.checkpoint.resume import FromWeights, Resume, Start
from mimo.config.schema import Recipe
from mimo.engines.piece import EMA, key_of, kind_of
from mimo.parallel.groups import Topology
from tests.conftest import RunRanks
from tests.mimo.model.test_fsdp_runs import FSDP, make
from tests.mimo.runs import save

SETTINGS = [
    *("train.precision=bf16", "train.ema_decay=0.5", "train.steps=3"),
    *("train.save_every=null", "train.validate_every=null"),
]
ENGINES = {
    "megatron": [],
    "shared": ["train.distributed_optimizer=true"],
    "fsdp": FSDP,
}


def save_and_begin(rank: int, path: Path) -> None:
    """Write three checkpoints for each engine: of a step, and of what the other runs have."""
    from mimo.parallel.build import build_layout
    from mimo.parallel.groups import build_topology

    for name, settings in ENGINES.items():
        recipe = load_recipe(path, [*SETTINGS, *settings, f"name={name}"])
        topology = build_topology(build_layout(recipe))
        trainer = trainer_of(recipe, topology, "step")
        train_one_step(trainer)
        save(trainer.saver, trainer.progress)
        checkpoint = recipe.run_dir / "step" / "checkpoints" / "step_1"

        resumed = trainer_of(recipe, topology, "resumed", Resume(checkpoint))
        save(resumed.saver, resumed.progress)

        begun = trainer_of(recipe, topology, "begun", FromWeights(checkpoint))
        for module in begun.model.modules.values():
            module.begin_step(forward_only=False)
            module.finish_gradients(1)
            module.squared_norm()
            module.update(learning_rate=0.0, gradient_factor=1.0)
        save(begun.saver, begun.progress)
        topology.close()


def trainer_of(recipe: Recipe, topology: Topology, name: str, start: Start | None = None) -> Any:
    """A run that begins with the weights of the recipe's folder, then with ``start``."""
    from mimo.checkpoint.hf.initial import initial_weights
    from mimo.checkpoint.load import load_start, read_start_index
    from mimo.train.loop import Trainer

    trainer = Trainer(recipe, topology, recipe.run_dir / name, initial_weights(recipe))
    if start is not None:
        trainer.progress = load_start(trainer.model.modules, start, read_start_index(start))
    return trainer


def train_one_step(trainer: Any) -> None:
    from mimo.model.dataset import open_dataset
    from mimo.train.observer import StepObserver

    class Observer(StepObserver):
        pass

    dataset = open_dataset(trainer.recipe, "sources", trainer.chat, trainer.processors)
    steps = trainer.train(dataset, None, Observer())
    next(steps)
    steps.close()


@pytest.fixture(scope="module")
def folders(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs by engine."""
    path = make(tmp_path_factory.mktemp("contents"), "qwen3_vl")
    run_ranks(save_and_begin, 2, path)
    return path.parent / "runs"


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    return read(checkpoint, describe(checkpoint))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_resumes_with_all_that_a_checkpoint_holds(folders: Path, engine: str) -> None:
    stored = tensors(folders / engine / "step" / "checkpoints" / "step_1")
    found = tensors(folders / engine / "resumed" / "checkpoints" / "step_1")
    weights = {key for key in stored if not kind_of(key)[0]}
    averages = {key for key in stored if kind_of(key)[0] == EMA}
    assert averages == {key_of(EMA, key) for key in weights}
    assert not any(torch.equal(stored[key_of(EMA, key)], stored[key]) for key in weights)
    assert found.keys() == stored.keys()
    assert [key for key in stored if not torch.equal(found[key], stored[key])] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_a_run_begins_with_stay_in_a_step_at_rate_zero(
    folders: Path, engine: str
) -> None:
    stored = tensors(folders / engine / "step" / "checkpoints" / "step_1")
    found = tensors(folders / engine / "begun" / "checkpoints" / "step_0")
    for key in (key for key in stored if not kind_of(key)[0]):
        assert torch.equal(found[key], stored[key]), key
        assert torch.equal(found[key_of(EMA, key)], stored[key].float()), key
