"""Runs of single cells, and what tests assert about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo.check.compare import TOLERANCE, Comparison, Fault
from mimo.check.layouts import Cell, SweepCell, sweep_recipe
from mimo.check.scale import ScaledRecipe
from mimo.check.verify import CellResult, Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.model.dataset import item_processors, open_dataset, open_tokenizer
from mimo.model.step_plan import StepPlan, step_planner

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = RECIPES / "quickstart.yaml"
SPARSE = (
    "language.family=qwen3_moe",
    "language.model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 48, num_attention_heads: 4, "
    "num_query_groups: 2, head_size: 16, rotary_base: 1.0e+6, mrope_section: [4, 2, 2], "
    "num_experts: 16, experts_per_token: 3}",
)
"""Overrides that give the quickstart a language model with experts."""


@dataclass(frozen=True)
class Case:
    """A fault, the layout in which it shows, and the first parameter that differs.

    named: or its copies, where they are several. spared: a module whose gradients are right in the
    first step. overrides: of the recipe. what: differs first.
    """

    fault: Fault
    cell: SweepCell
    named: str | tuple[str, str] = "vision.patch_embed.weight"
    spared: str | None = None
    overrides: tuple[str, ...] = ()
    what: str = "gradient"


def by_fault(*cases: Case) -> dict[str, Case]:
    """Return cases by the names of their faults."""
    return {case.fault.__name__: case for case in cases}


def run_cell(
    verifier: Verifier,
    cell: SweepCell,
    fault: Fault | None = None,
    overrides: Sequence[str] = (),
    recipe: Recipe | None = None,
) -> CellResult:
    """Run a cell of a recipe; else of the quickstart with overrides."""
    recipe, layout = sweep_recipe(recipe or load_recipe(RECIPE, overrides), cell)
    return verifier.run(Cell(cell.name, recipe, layout), fault)


def check_equal(result: CellResult) -> Comparison:
    assert result.comparison is not None, result.failure
    assert result.passed, str(result.comparison.first)
    return result.comparison


def check_fault(verifier: Verifier, case: Case, recipe: Recipe | None = None) -> None:
    """Check that a fault is reported with the first parameter that differs."""
    result = run_cell(verifier, case.cell, case.fault, case.overrides, recipe)
    assert not result.passed
    assert result.comparison is not None, result.failure
    first = result.comparison.first
    assert first is not None
    assert (first.step, first.what) == (1, case.what), str(first)
    assert first.name in ((case.named,) if isinstance(case.named, str) else case.named), str(first)
    assert first.error > 10 * TOLERANCE["fp32"]
    assert result.repeated is None, "so large an error is no rounding"
    assert "stage" in first.where
    for name, (error, _) in result.comparison.gradients.items():
        if name.partition(".")[0] == case.spared:
            assert error <= TOLERANCE["fp32"], f"{name} should be right in the first step"


def plan_first_step(scaled: ScaledRecipe) -> StepPlan:
    """Write the data of a scaled recipe and plan its first step."""
    recipe = scaled.recipe
    scaled.workload.write(scaled.directory)
    dataset = open_dataset(recipe, "sources", open_tokenizer(recipe), item_processors(recipe))
    assert dataset is not None
    planner = step_planner(recipe, scaled.layout, dataset)
    return planner.finish(planner.microbatches(0))
