"""A run starts from a checkpoint to the last bit, also with other settings.

What the checkpoint has no state for starts afresh, with a message.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.reading import read
from mimo.checkpoint.resume import FromScratch, FromWeights, Resume, Start
from mimo.config.schema import Recipe
from mimo.engines.contract import EMA, key_of, kind_of
from mimo.families.keymap import is_adapter
from mimo.parallel.groups import Topology
from tests.cases import quick, quick_values
from tests.conftest import RunRanks
from tests.mimo.model.test_fsdp_runs import FSDP, make
from tests.mimo.runs import metrics, run_from, save

# The rate is the same at every step, so that steps of fresh and of older optimizers compare.
SETTINGS = [
    *("train.min_learning_rate_ratio=1", "train.steps=2", "train.save_every=1"),
    *("train.clip_grad_norm=null", "train.validate_every=null"),
]
FROZEN = "encoders.vision.freeze=true"
SHARED = "train.distributed_optimizer=true"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("settings"), "qwen3_vl")


def trained(
    run_ranks: RunRanks, path: Path, name: str, *overrides: str, start: Start | None = None
) -> Path:
    """Return the folder of a finished run; train it if it does not exist."""
    recipe = load_recipe(path, [*SETTINGS, *overrides, f"name={name}"])
    if not recipe.run_dir.exists():
        run_from(run_ranks, recipe, start or FromScratch())
    return recipe.run_dir


def steps_of(stored: dict[str, Tensor], module: str) -> set[float]:
    """Return the counts of updates over all parameters of a module."""
    return {float(v) for name, v in stored.items() if name.startswith(f"optimizer.step.{module}.")}


def begun(rank: int, recipe: Recipe, start: Start) -> str:
    """Save the state in which a run starts, and return its notes."""
    from mimo.checkpoint.load import load_start, read_start_index
    from mimo.parallel.build import build_layout
    from mimo.parallel.groups import build_topology
    from mimo.train.loop import Trainer

    topology = build_topology(build_layout(recipe))
    stored = read_start_index(start)
    trainer = Trainer(recipe, topology, recipe.run_dir, None, stored)
    with redirect_stdout(io.StringIO()) as printed:
        trainer.progress = load_start(trainer.model.modules, start, stored)
    save(trainer.saver, trainer.progress)
    topology.close()
    return printed.getvalue()


AFRESH = "weights whose optimizer state is not in the checkpoint"
# Settings before and after; notes by module; updates of language and vision.
CHANGES = {
    "unfrozen": ([FROZEN], [], {f"vision: {AFRESH}"}, ({2.0}, {0.0})),
    "unfrozen, by fsdp": ([FROZEN], FSDP, {f"vision: {AFRESH}"}, ({2.0}, {0.0})),
    "unfrozen in part": (
        ["encoders.vision.freeze=tower"],
        [],
        {f"vision: {AFRESH}"},
        ({2.0}, {0.0, 2.0}),
    ),
    "frozen": ([], [FROZEN], set(), ({2.0}, set())),
    "other settings of Adam": (
        [],
        [SHARED, "train.adam_beta2=0.9", "train.weight_decay=0.1", "train.learning_rate=0.1"],
        set(),
        ({2.0}, {2.0}),
    ),
    "with adapters": (
        [],
        ["language.lora={rank: 2}"],
        {"language: the checkpoint lacks its adapters"},
        ({0.0}, {2.0}),
    ),
    "from Adam to SGD": ([], ["train.optimizer=sgd"], set(), (set(), set())),
    "from SGD to Adam, in bf16": (
        ["train.optimizer=sgd", "train.precision=bf16"],
        ["train.precision=bf16"],
        {f"language: {AFRESH}", f"vision: {AFRESH}"},
        ({0.0}, {0.0}),
    ),
}


@pytest.mark.parametrize("change", quick_values(CHANGES, "unfrozen in part"))
def test_a_run_resumes_with_other_settings_and_names_fresh_state(
    run_ranks: RunRanks, recipe: Path, request: pytest.FixtureRequest, change: tuple
) -> None:
    before, after, notes, steps = change
    name = "_".join(["before", *("".join(filter(str.isalnum, override)) for override in before)])
    checkpoint = find_checkpoint(trained(run_ranks, recipe, name, *before))
    name = "after_" + "".join(filter(str.isalnum, request.node.name))
    resumed = load_recipe(recipe, [*SETTINGS, *after, f"name={name}"])
    printed = run_ranks(begun, 2, resumed, Resume(checkpoint))
    beginnings = (re.split(r": it is| \(|;", line)[0] for line in printed[0].splitlines())
    assert set(beginnings) == notes
    assert printed[1] == ""
    stored = read(checkpoint)
    loaded = read(resumed.run_dir / "checkpoints" / "step_2")
    assert (steps_of(loaded, "language"), steps_of(loaded, "vision")) == steps
    for key, values in loaded.items():
        if key in stored:
            assert torch.equal(values, stored[key]), key
        elif key.startswith(("optimizer.exp_avg", "optimizer.step.")):
            assert not values.any(), key
        else:
            assert is_adapter(key) or key.startswith("optimizer.fp32_param."), key
    assert {key for key in stored if not key.startswith("optimizer.")} <= loaded.keys()


@pytest.mark.slow
@pytest.mark.parametrize("engine", [[SHARED], FSDP], ids=["megatron", "fsdp"])
def test_an_unfrozen_module_counts_its_own_updates(
    run_ranks: RunRanks, recipe: Path, request: pytest.FixtureRequest, engine: list[str]
) -> None:
    # All samples are in every step, so that it does not matter which step it is.
    every = "train.global_batch_size=12"
    frozen = find_checkpoint(trained(run_ranks, recipe, "frozen", FROZEN, every))
    name = "".join(filter(str.isalnum, request.node.name))
    steps = [*engine, every, "train.steps=4"]
    whole = trained(run_ranks, recipe, f"{name}_on", *steps, start=Resume(frozen))
    after = {n: read(whole / "checkpoints" / f"step_{n}") for n in (3, 4)}
    assert [steps_of(after[n], "language") for n in (3, 4)] == [{3.0}, {4.0}]
    assert [steps_of(after[n], "vision") for n in (3, 4)] == [{1.0}, {2.0}]
    # A fresh optimizer of all modules does the same first step of this one: no bias is corrected
    # as of a third step.
    anew = trained(run_ranks, recipe, f"{name}_new", *steps, start=FromWeights(frozen))
    first, before = read(anew / "checkpoints" / "step_1"), read(frozen)
    moved = 0
    for key, values in first.items():
        if key.startswith("vision."):
            moved += not torch.equal(values, before[key])
            torch.testing.assert_close(after[3][key], values, rtol=1e-3, atol=1e-5)
    assert moved
    # Interrupted after its first step, it goes on to the last bit.
    start = Resume(whole / "checkpoints" / "step_3")
    again = trained(run_ranks, recipe, f"{name}_again", *steps, start=start)
    assert metrics(recipe, again.name)[-1]["loss"] == metrics(recipe, whole.name)[-1]["loss"]
    for key, values in read(again / "checkpoints" / "step_4").items():
        assert torch.equal(values, after[4][key]), key


BF16 = [
    *("train.precision=bf16", "train.ema_decay=0.5", "train.steps=3"),
    *("train.save_every=null", "train.validate_every=null"),
]
ENGINES = {"megatron": [], "shared": [SHARED], "fsdp": FSDP}


def save_and_begin(rank: int, path: Path, name: str) -> None:
    """Write three checkpoints of an engine: of a step, and of what the other runs have."""
    from mimo.model.dataset import open_dataset
    from mimo.parallel.build import build_layout
    from mimo.parallel.groups import build_topology
    from mimo.train.step import StepObserver

    class Observer(StepObserver): ...

    recipe = load_recipe(path, [*BF16, *ENGINES[name], f"name={name}"])
    topology = build_topology(build_layout(recipe))
    trainer = trainer_of(recipe, topology, "step")
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    steps = trainer.train(dataset, None, Observer())
    next(steps)
    steps.close()
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


@pytest.fixture(scope="module", params=quick(ENGINES, "megatron", "fsdp"))
def folder(request: pytest.FixtureRequest, run_ranks: RunRanks, recipe: Path) -> Path:
    """Return the run folder of an engine."""
    run_ranks(save_and_begin, 2, recipe, request.param)
    return recipe.parent / "runs" / request.param


def test_a_run_resumes_with_every_tensor_of_a_checkpoint(folder: Path) -> None:
    stored = read(folder / "step" / "checkpoints" / "step_1")
    loaded = read(folder / "resumed" / "checkpoints" / "step_1")
    weights = {key for key in stored if not kind_of(key)[0]}
    averages = {key for key in stored if kind_of(key)[0] == EMA}
    assert averages == {key_of(EMA, key) for key in weights}
    assert not any(torch.equal(stored[key_of(EMA, key)], stored[key]) for key in weights)
    assert loaded.keys() == stored.keys()
    assert [key for key in stored if not torch.equal(loaded[key], stored[key])] == []


def test_initial_weights_survive_a_step_at_rate_zero(folder: Path) -> None:
    stored = read(folder / "step" / "checkpoints" / "step_1")
    loaded = read(folder / "begun" / "checkpoints" / "step_0")
    for key in (key for key in stored if not kind_of(key)[0]):
        assert torch.equal(loaded[key], stored[key]), key
        assert torch.equal(loaded[key_of(EMA, key)], stored[key].float()), key
