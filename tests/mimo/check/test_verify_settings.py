"""The recipe's warm-up, learning rates and data sources are in the workload; bugs of them show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.check.layouts import SweepCell, recipe_cells
from mimo.check.scale import ScaledRecipe, scale_recipe
from mimo.check.steps import scheduled_rate
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Train
from mimo.train.schedule import learning_rate
from tests.cases import quick_values
from tests.mimo.check.cells import (
    RECIPE,
    Case,
    by_fault,
    check_equal,
    check_fault,
    plan_first_step,
    run_cell,
)

# --------------------------------------------------------- faults, applied inside ranks


def ignore_warm_up() -> None:
    """The schedule begins with the whole learning rate."""
    from mimo.train import schedule

    rate = schedule.learning_rate

    def rate_without(train: Train, peak: float, warmup_steps: int, step: int) -> float:
        return rate(train, peak, 0, step)

    schedule.learning_rate = rate_without


def ignore_warm_up_of_encoder() -> None:
    """An encoder's rate rises with that of the language model."""
    from mimo.config.schema import Recipe

    Recipe.warmup_steps = lambda self, module: self.train.warmup_steps  # type: ignore[method-assign]


def ignore_rate_of_encoder() -> None:
    """An encoder learns at the rate of the language model."""
    from mimo.train import step as training

    rates = training.learning_rates

    def equal_rates(recipe: Any, step: int) -> dict[str, float]:
        of_modules = rates(recipe, step)
        return dict.fromkeys(of_modules, of_modules["language"])

    training.learning_rates = equal_rates


def step_first_parameter_group_only() -> None:
    """Norms and biases, which do not decay, keep the rate that the optimizer was built with."""
    from mimo.engines.megatron.module import MegatronModule

    update = MegatronModule.update

    def first_only(module: Any, *args: Any, **named: Any) -> Any:
        if not module.optimizers:
            return update(module, *args, **named)
        inner = module.optimizers[0].optimizer
        rate_of = {id(p): group["lr"] for group in inner.param_groups[1:] for p in group["params"]}

        def restore(*_: Any) -> None:
            for group in inner.param_groups:  # an update that is measured goes group by group
                group["lr"] = rate_of.get(id(group["params"][0]), group["lr"])

        hook = inner.register_step_pre_hook(restore)
        change = update(module, *args, **named)
        hook.remove()
        return change

    MegatronModule.update = first_only  # type: ignore[method-assign]


def ignore_weights_of_sources() -> None:
    """Every data source is drawn from equally often."""
    from mimo.model import dataset

    order: Any = dataset.SampleOrder

    def even(num_samples: Any, weights: Any, **rest: Any) -> Any:
        return order(num_samples, [1.0] * len(weights), **rest)

    dataset.SampleOrder = even  # type: ignore[misc,assignment]


# ---------------------------------------------------------------------------- tests

WARMUPS = ("encoders.vision.warmup_steps=30",)
RATES = ("encoders.vision.learning_rate=5.0e-3",)
SOURCES = ("data.sources=[{path: a.tar}, {path: b.tar, weight: 2.0}]",)

CASES = by_fault(
    Case(ignore_warm_up, SweepCell("", ""), overrides=RATES, what="weight"),
    Case(ignore_warm_up_of_encoder, SweepCell("", ""), overrides=WARMUPS, what="weight"),
    Case(ignore_rate_of_encoder, SweepCell("", ""), overrides=RATES, what="weight"),
    Case(
        step_first_parameter_group_only,
        SweepCell("", ""),
        "vision.blocks.layers.0.input_layernorm.weight",
        overrides=RATES,
        what="weight",
    ),
    Case(ignore_weights_of_sources, SweepCell("dp2", ""), overrides=SOURCES),
)


@pytest.mark.parametrize("case", quick_values(CASES, "ignore_warm_up_of_encoder"))
def test_a_fault_is_reported_with_the_first_parameter_that_differs(
    verifier: Verifier, case: Case
) -> None:
    check_fault(verifier, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "overrides"),
    [(SweepCell("", ""), RATES), (SweepCell("", ""), WARMUPS), (SweepCell("dp2", ""), SOURCES)],
)
def test_without_a_fault_the_same_layouts_are_equal(
    verifier: Verifier, cell: SweepCell, overrides: tuple[str, ...]
) -> None:
    check_equal(run_cell(verifier, cell, overrides=overrides))


def scaled(folder: Path, *overrides: str) -> ScaledRecipe:
    recipe = load_recipe(RECIPE, [*overrides])
    (cell,) = recipe_cells(recipe, 8, full=False).cells
    return scale_recipe(recipe, cell.layout, folder, "fp32")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 0.1), (3, 1)), ((0.2, 9), (1, 3)), ((2, 2), (1, 1)), ((2, 1, 5), (1, 3)), ((7,), (1,))],
)
def test_the_workload_has_two_data_sources_where_the_recipe_has_several(
    tmp_path: Path, weights: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    sources = ", ".join(f"{{path: a.tar, weight: {float(weight)}}}" for weight in weights)
    scaled_sources = scaled(tmp_path, f"data.sources=[{sources}]").recipe.data.sources
    assert tuple(source.weight for source in scaled_sources) == expected


def test_two_data_sources_differ_and_mix_in_a_microbatch(tmp_path: Path) -> None:
    mixed = scaled(tmp_path, *SOURCES)
    microbatches = plan_first_step(mixed).microbatches
    assert {0, 1} in [set(m.samples.source.tolist()) for m in microbatches]
    first, second = (Path(source.path).read_bytes() for source in mixed.recipe.data.sources)
    assert first != second


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (0.01, None, None, 2)),
        (["train.warmup_steps=0"], (0.01, None, None, 0)),
        (["encoders.vision.learning_rate=5.0e-4"], (0.01, None, 0.005, 2)),
        # Weights have to move, also where a rate is tiny.
        (["language.learning_rate=1.0e-6"], (0.01, 0.001, None, 2)),
        # The largest rate that a module has is the large one.
        (
            ["language.learning_rate=0.1", "encoders.vision.learning_rate=0.02"],
            (0.001, 0.01, 0.002, 2),
        ),
    ],
)
def test_the_workload_has_the_rates_of_the_modules_and_a_warm_up_where_the_recipe_has(
    tmp_path: Path, overrides: list[str], expected: tuple[float | None, ...]
) -> None:
    recipe = scaled(tmp_path, *overrides).recipe
    rates = recipe.language.learning_rate, recipe.encoders["vision"].learning_rate
    train = recipe.train
    assert (train.learning_rate, *rates, train.warmup_steps) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_warm_ups_of_modules_that_differ_differ_in_the_workload(
    tmp_path: Path, schedule: str
) -> None:
    warmups = ["train.warmup_steps=20", "encoders.vision.warmup_steps=30"]
    overrides = [*warmups, f"train.schedule={schedule}", "train.steps=100"]
    recipe = scaled(tmp_path, *overrides).recipe
    assert [recipe.warmup_steps(name) for name in recipe.modules] == [2, 3]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_the_schedule_of_the_reference_is_that_of_training(schedule: str) -> None:
    for warmup in (0, 1, 2, 7):
        decays = ["train.decay_steps=4"] if schedule == "wsd" else []
        settings = ["train.steps=12", "train.warmup_steps=0", f"train.schedule={schedule}"]
        train = load_recipe(RECIPE, [*settings, *decays]).train
        expected = [learning_rate(train, 0.3, warmup, step) for step in range(14)]
        rates = [scheduled_rate(train, 0.3, warmup, step) for step in range(14)]
        assert rates == pytest.approx(expected, rel=1e-12)
