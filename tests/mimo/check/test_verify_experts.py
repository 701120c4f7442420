"""Layouts with experts take the steps of one rank, and known bugs of experts are reported.

A fault is applied in the layout's ranks and never in the one-rank run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mimo.check.compare import TOLERANCE
from mimo.check.layouts import SWEEP, SweepCell, sweep_cells
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from tests.mimo.check.cells import RECIPE, SPARSE, check_equal, run_cell

CELLS = {cell.name: cell for cell in SWEEP if cell.needs_experts}
# `test_verify_sparse_hybrid.py` and `tests/device_model/test_nccl.py` compare others.
COMPARED = (
    "dp3 → dp2 ep2 · clipped",
    "dp2 → dp4 ep4 · router losses",
    "1 rank → tp2 ep2 · recompute",
    "colocated tp2 → tp2 sp ep2 pp2",
    "dp2 → dp2 ep2 · distributed optimizer",
    "dp3 → tp2 sp ep2 dp2 · pooled losses · recompute",
    "colocated → cp2 dp2 ep4 · recompute",
    "dp2 → cp2 pp2 vpp2 ep2",
    "colocated → tp4 sp ep2 etp2 · router losses",
    "dp2 → tp2 sp etp2 · recompute",
    "dp2 + colocated → dp2 ep2 · router losses",
    "dp2 → tp2 sp ep2 dp2 · router losses",
    "1 rank → tp2 etp2",
    "colocated → tp2 cp2 ep4 · router losses",
    "dp2 → dp2 ep2 · frozen language",
    "colocated → tp2 sp dp2 ep2 · distributed optimizer · gathered late",
    "dp2 → tp2 cp2 ep2 · pooled losses",
)


def sparse(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, [*SPARSE, *overrides])


@pytest.mark.slow  # `tests/mimo/engines/megatron/test_experts.py` has quick ones
@pytest.mark.parametrize("name", COMPARED)
def test_a_layout_with_experts_takes_the_steps_of_one_rank(verifier: Verifier, name: str) -> None:
    check_equal(run_cell(verifier, CELLS[name], recipe=sparse()))


@pytest.mark.slow
def test_experts_that_are_not_shared_out_take_the_steps_of_one_rank(verifier: Verifier) -> None:
    cell = SweepCell("cp2 pp2", "dp2", ("router losses",))
    check_equal(run_cell(verifier, cell, recipe=sparse()))


def test_cells_with_experts_are_for_models_with_experts_alone() -> None:
    assert len(CELLS) >= 24
    dense = sweep_cells(load_recipe(RECIPE), max_ranks=8, precision="fp32").cells
    swept = sweep_cells(sparse(), max_ranks=8, precision="fp32").cells
    assert {c.name for c in swept} - {c.name for c in dense} == CELLS.keys()
    assert {(c.layout.language.ep, c.layout.language.etp) for c in swept} == {
        (1, 1),
        (2, 1),
        (4, 1),
        (1, 2),
        (2, 2),
    }


# --------------------------------------------------------- faults, applied inside ranks


def _scale_router_losses(factor_of: Callable[[Any], float]) -> None:
    from mimo.engines.megatron.module import MegatronModule

    begin = MegatronModule.begin_step

    def scaled(module: Any, forward_only: bool, loss_token_share: float = 0.0) -> None:
        begin(module, forward_only, loss_token_share * factor_of(module))

    MegatronModule.begin_step = scaled  # type: ignore[method-assign]


def scale_router_losses_by_lanes() -> None:
    """Router losses are averaged over lanes, as a framework that averages gradients would."""
    _scale_router_losses(lambda module: 1 / module.groups.dp.size())


def scale_router_losses_by_microbatches() -> None:
    """Router losses are averaged over the microbatches of a step."""
    _scale_router_losses(lambda module: 1 / 8)


def count_loads_of_own_slice() -> None:
    """A sample's balancing loss is computed of a rank's part of it."""
    import torch.distributed as dist

    from mimo.engines.megatron import experts

    class Alone:
        all_reduce = staticmethod(lambda *args, **options: None)
        ProcessGroup = dist.ProcessGroup

    experts.dist = Alone  # type: ignore[assignment]


def count_experts_twice_in_norm() -> None:
    """Every copy of an expert counts in the norm of the gradient."""
    from mimo.engines.megatron import module

    counted = module._counted_gradients

    def twice(optimizer: Any) -> Any:
        gradients = counted(optimizer)
        is_of_experts = not getattr(optimizer.get_parameters()[0], "allreduce", True)
        return gradients * 2 if is_of_experts else gradients

    module._counted_gradients = twice


def choose_before_softmax() -> None:
    """Probabilities are those among a token's own experts."""
    from dataclasses import replace

    from mimo.engines.megatron import experts

    choose = experts.choose_experts

    def chosen_first(tokens: Any, router: Any, top_k: int, normalize: bool) -> Any:
        choice = choose(tokens, router, top_k, normalize)
        return replace(choice, weights=choice.logits.gather(1, choice.experts).softmax(-1))

    experts.choose_experts = chosen_first


def sum_gradients_of_joined_parts() -> None:
    """The backward of outputs that are gathered over TP sums the ranks' equal gradients."""
    from mimo.engines.megatron import experts

    gather = experts.gather_sequence

    def summed(part: Any, tensor_parallel_output_grad: bool, group: Any) -> Any:
        return gather(part, group=group)

    experts.gather_sequence = summed


LOSSES = ("router losses",)
FAULTS = {
    fault.__name__: (fault, cell, overrides)
    for fault, cell, overrides in (
        (scale_router_losses_by_lanes, SweepCell("dp2 ep2", "dp2", LOSSES), ()),
        (scale_router_losses_by_microbatches, SweepCell("dp2 ep2", "dp2", LOSSES), ()),
        (count_loads_of_own_slice, SweepCell("cp2 ep2", "dp2", LOSSES), ()),
        (count_experts_twice_in_norm, SweepCell("dp2 ep2", "dp2"), ()),
        (
            choose_before_softmax,
            SweepCell("dp2 ep2", "dp2"),
            ("language.model.normalize_weights=false",),
        ),
        (sum_gradients_of_joined_parts, SweepCell("tp2 ep2", "dp2"), ()),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_experts_is_reported(verifier: Verifier, case: Any) -> None:
    fault, cell, overrides = case
    result = run_cell(verifier, cell, fault, recipe=sparse(*overrides))
    assert not result.passed
    assert result.comparison is not None, result.failure
    errors = result.comparison.gradients, result.comparison.scalars
    if fault is count_experts_twice_in_norm:
        assert errors[1][0]["grad_norm"] > 10 * TOLERANCE["fp32"]
        assert max(error for error, _ in errors[0].values()) <= TOLERANCE["fp32"]
    else:
        assert result.comparison.first is not None
        assert result.comparison.first.step == 1
        assert result.comparison.first.error > 10 * TOLERANCE["fp32"]


@pytest.mark.slow
def test_without_a_fault_weights_that_are_not_normalized_are_right(verifier: Verifier) -> None:
    recipe = sparse("language.model.normalize_weights=false")
    check_equal(run_cell(verifier, SweepCell("dp2 ep2", "dp2"), recipe=recipe))
