"""Qwen3.5, whose layers have linear or full attention: equal layouts, and known bugs found.

A packed sample's state and convolution begin anew: neither a neighbour in the lane nor the layout
has any part in its loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.check.layouts import SWEEP, SweepCell
from mimo.check.parity import ParityRunner
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_recipe
from tests.cases import quick_values
from tests.mimo.check.cells import RECIPES, Case, by_fault, check_equal, check_fault, run_cell

NAMES = (
    "colocated → tp2 cp2 sp dp2 · recompute",
    "dp2 → tp2 cp2 sp · unpacked",
    "1 rank → pp2 vpp2",
    "dp2 → pp3 · selective recompute",
    "dp2 → cp2 pp2 vpp2",
    "dp2 → cp2 pp2 · distributed optimizer · gathered late",
    "tp2 → tp4 sp",
)
CELLS = {cell.name: cell for cell in SWEEP if cell.name in NAMES}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return hybrid_recipe(tmp_path_factory.mktemp("checkpoint"))


def hybrid_recipe(folder: Path, *overrides: str) -> Recipe:
    """The tiny recipe; its checkpoint is written into ``folder``."""
    write_tiny(TinyCheckpoint("qwen3_5"), folder / "qwen3_5")
    path = RECIPES / "qwen3_5_tiny.yaml"
    return load_recipe(path, [f"init_from={folder / 'qwen3_5'}", *overrides])


@pytest.mark.slow  # `tests/mimo/engines/megatron/test_delta_net.py` has quick steps of such layers
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_layout_of_hybrid_layers_takes_the_steps_of_one_rank(
    verifier: Verifier, exact_verifier: Verifier, recipe: Recipe, cell: SweepCell
) -> None:
    in_fp32 = "distributed optimizer" in cell.options  # it has no fp64
    check_equal(run_cell(verifier if in_fp32 else exact_verifier, cell, recipe=recipe))


def test_every_layout_is_one_of_the_matrix() -> None:
    assert CELLS.keys() == {*NAMES}


@pytest.mark.slow
def test_in_fp32_rounding_above_the_tolerance_counts_as_equal(
    verifier: Verifier, recipe: Recipe
) -> None:
    check_equal(run_cell(verifier, CELLS["1 rank → pp2 vpp2"], recipe=recipe))


# --------------------------------------------------------- faults, applied inside ranks


def leak_states() -> None:
    """A state goes on from a packed sample to the next."""
    _join_segments("gated_delta_rule")


def leak_windows() -> None:
    """The convolution sees the last tokens of the packed sample before."""
    _join_segments("segment_conv")


def _join_segments(name: str) -> None:
    from mimo.engines.megatron import delta_net

    operation = getattr(delta_net, name)

    def joined(*tensors: Any) -> Any:
        *inputs, lengths = tensors
        return operation(*inputs, (sum(lengths),))

    setattr(delta_net, name, joined)


def forget_norm_of_other_heads() -> None:
    """The gated norm's factor learns from the heads of its own rank alone."""
    from mimo.engines.megatron import delta_net

    delta_net.copy_to_tensor_model_parallel_region = lambda factor, group: factor


def centre_gated_norm() -> None:
    """The gated norm has a factor of 1 + weight, as all other norms have."""
    from mimo.engines.megatron import delta_net

    norm = delta_net.gated_norm
    delta_net.gated_norm = lambda x, gate, weight, eps: norm(x, gate, 1 + weight, eps)


def take_norms_for_plain() -> None:
    """All other norms have a factor of weight, as the gated norm has."""
    from mimo.ops import layers

    class Plain(layers.RMSNorm):
        initial = 0.0
        zero_centered_gamma = True

    layers.ZeroCenteredRMSNorm = Plain  # type: ignore[misc]


def scan_heads_of_first_cp_rank() -> None:
    """Every context-parallel rank takes the decays of the first one's heads."""
    from mimo.engines.megatron.delta_net import GatedDeltaNet

    def first(self: Any, parameter: Any) -> Any:
        return parameter.chunk(self.cp.size())[0]

    GatedDeltaNet._rows_of_cp_rank = first  # type: ignore[method-assign]


NORM = "language.decoder.layers.0.self_attention.norm_weight"
CASES = by_fault(
    Case(leak_states, SweepCell("tp2", "dp2")),
    Case(leak_windows, SweepCell("cp2", "dp2")),
    Case(forget_norm_of_other_heads, SweepCell("tp2", "dp2"), NORM, "vision"),
    Case(centre_gated_norm, SweepCell("tp2", "dp2")),
    Case(take_norms_for_plain, SweepCell("tp2", "dp2")),
    Case(scan_heads_of_first_cp_rank, SweepCell("cp2", "dp2")),
)


@pytest.mark.parametrize("case", quick_values(CASES, "leak_states"))
def test_a_fault_is_reported_with_the_first_parameter_that_differs(
    exact_verifier: Verifier, recipe: Recipe, case: Case
) -> None:
    check_fault(exact_verifier, case, recipe)


@pytest.mark.slow
def test_with_sequence_parallelism_the_norm_needs_the_other_heads_too(
    verifier: Verifier, recipe: Recipe
) -> None:
    case = Case(forget_norm_of_other_heads, SweepCell("tp2 sp", ""), NORM, "vision")
    check_fault(verifier, case, recipe)


IN_EVERY_LAYOUT = {f.__name__: f for f in (leak_states, centre_gated_norm, take_norms_for_plain)}


@pytest.mark.parametrize("fault", quick_values(IN_EVERY_LAYOUT, "centre_gated_norm"))
def test_a_bug_of_every_layout_is_found_against_transformers(
    runners: dict[str, ParityRunner], fault: Any
) -> None:
    comparison = runners["qwen3_5"].run(fault=fault)
    assert comparison.first is not None
    assert comparison.first.name == "language.layers.0", str(comparison.first)


def test_key_heads_that_the_ranks_do_not_divide_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    data = recipe.model_dump(mode="json")
    data["language"]["grid"] |= {"tp": 2, "cp": 4, "dp": 1}
    with pytest.raises(RecipeError, match=r"tp · cp = 8 must divide linear_num_key_heads.* is 4"):
        check_recipe(Recipe.model_validate(data), None)
