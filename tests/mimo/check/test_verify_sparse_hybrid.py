"""Qwen3.5 with experts and a shared one, whose layers have linear or full attention.

Layouts take the steps of one rank, and known bugs of the shared expert are reported.
"""

from __future__ import annotations

from typing import Any

import pytest

from mimo.check.layouts import SWEEP, SweepCell
from mimo.check.parity import ParityRunner
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from tests.mimo.check.cells import RECIPES, Case, by_fault, check_equal, check_fault, run_cell

# For experts with a shared one beside them, and for layers whose state the ranks of cp, tp and pp
# hold in parts. `test_verify_experts.py` has other layouts of experts.
NAMES = (
    "dp2 → tp2 sp etp2 ep2 dp2",
    "dp2 → cp2 ep2 · router losses",
    "dp3 → pp2 vpp2 dp2 ep2 · router losses · recompute",
    "colocated → tp2 cp2 sp ep2 etp2",
    "dp2 → tp2 sp ep2 · language adapters · recompute",
    "dp2 → tp2 sp ep2 · unpacked · recompute",
)
CELLS = {cell.name: cell for cell in SWEEP if cell.name in NAMES}
# Dense layouts, for the hybrid layers.
CELLS |= {
    cell.name: cell
    for cell in (
        SweepCell("tp2 cp2 sp", "dp2"),
        SweepCell("tp2 sp pp2", "dp3", ("recompute",)),
    )
}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    # Batches are refused with router losses, which some cells add.
    return load_recipe(RECIPES / "sparse_digits.yaml", ["language.model.balance_loss=0.0"])


# Quick are steps of hybrid layers in `tests/mimo/engines/megatron/test_delta_net.py`, of experts
# with router losses in `test_experts.py` there, and of both in `tests/mimo/check/test_parity.py`.
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_layout_of_sparse_hybrid_layers_takes_the_steps_of_one_rank(
    exact_verifier: Verifier, recipe: Recipe, cell: SweepCell
) -> None:
    check_equal(run_cell(exact_verifier, cell, recipe=recipe))


def test_every_layout_is_one_of_the_matrix() -> None:
    assert {*NAMES} < {*CELLS}


# --------------------------------------------------------- faults, applied inside ranks


def keep_gate_of_own_slice() -> None:
    """With sequence parallelism, the gate of the shared expert learns from its slice alone."""
    from mimo.engines.megatron import experts

    class Gate(experts._Gate):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.weight.sequence_parallel = False  # type: ignore[attr-defined]

    experts._Gate = Gate  # type: ignore[misc]


def share_expert_without_gate() -> None:
    """The shared expert's output is added as it is."""
    from mimo.engines.megatron import experts

    def open_gate(self: Any, hidden: Any) -> Any:
        return 100 + 0 * hidden[..., :1] @ self.weight[:, :1]

    experts._Gate.forward = open_gate  # type: ignore[method-assign]


GATE = "language.decoder.layers.0.mlp.shared_expert_gate.weight"
CASES = by_fault(Case(keep_gate_of_own_slice, SweepCell("tp2 sp ep2", "dp2"), GATE, "vision"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_fault_is_reported_with_the_first_parameter_that_differs(
    exact_verifier: Verifier, recipe: Recipe, case: Case
) -> None:
    # In fp32, small gradients of linear attention before it may differ by rounding.
    check_fault(exact_verifier, case, recipe)


@pytest.mark.slow
def test_a_shared_expert_without_its_gate_is_found_against_transformers(
    runners: dict[str, ParityRunner],
) -> None:
    comparison = runners["qwen3_5_moe"].run(fault=share_expert_without_gate)
    assert comparison.first is not None
    assert comparison.first.name == "language.layers.0", str(comparison.first)
