"""The verifier can fail: known bugs, each put into every rank of a layout, are reported.

A fault is applied in the layout's ranks and never in the one-rank run. The same layouts without
it are equal, so it is the fault that is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from encoders.qwen_vl import PROJECTOR
from mimo.check.layouts import SweepCell
from mimo.check.verify import Verifier
from mimo.families.keymap import is_adapter
from tests.mimo.check.cells import Case, by_fault, check_equal, check_fault, run_cell

# --------------------------------------------------------- faults, applied inside ranks


def average_encoder_gradients() -> None:
    """An encoder's lanes are averaged, as plain DDP does, although each has other items."""
    from mimo.engines.megatron.module import MegatronModule

    finish = MegatronModule.finish_gradients

    def averaged(module: Any, num_loss_tokens: int) -> None:
        is_encoder = module.name != "language"
        finish(module, num_loss_tokens * (module.groups.dp.size() if is_encoder else 1))

    MegatronModule.finish_gradients = averaged  # type: ignore[method-assign]


def sum_gradients_of_gathered_rows() -> None:
    """The backward of rows that are gathered over TP sums the ranks' equal gradients."""
    import torch.distributed as dist

    from bridge import BridgeReceiver

    backward = BridgeReceiver._backward

    def summed(self: Any, microbatch: int, gradient: Any) -> None:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=self.end.gather)
        backward(self, microbatch, gradient)

    BridgeReceiver._backward = summed  # type: ignore[method-assign]


def drop_group_of_tied_embeddings() -> None:
    """First and last stage do not know of each other's copy of the embedding."""
    from mimo.parallel import groups as topology

    groups_of = topology._module_groups

    def without(spec: Any, factory: Any) -> Any:
        groups: Any = groups_of(spec, factory)
        if groups is not None and hasattr(groups, "embd"):
            groups.embd = None
        return groups

    topology._module_groups = without


def cut_sequence_without_gather_in_backward() -> None:
    """Each rank takes its slice of the sequence by plain indexing, not by a scatter."""
    from mimo.parallel import partition

    def sliced(hidden: Any, group: Any) -> Any:
        return hidden.chunk(group.size())[group.rank()]

    partition.scatter_sequence = sliced


def take_first_slice_of_sequence() -> None:
    """The scatter is missing: every TP rank works on the first slice of the sequence."""
    from mimo.parallel import partition

    partition.scatter_sequence = lambda hidden, group: hidden.chunk(group.size())[0]


def lose_segments_on_middle_stage() -> None:
    """A middle pipeline stage takes the packed samples for one long segment."""
    from mimo.engines.megatron.attention import PackedSegments
    from mimo.model.modules import MimoModel

    stage, from_lengths = MimoModel.stage, PackedSegments.from_lengths

    def stage_step(self: Any, *args: Any) -> Any:
        language = self.modules.get("language")
        if language is not None and language.groups.pp.rank() == 1:
            PackedSegments.from_lengths = _one_segment(from_lengths)  # type: ignore[method-assign]
        return stage(self, *args)

    MimoModel.stage = stage_step  # type: ignore[method-assign]


def _one_segment(from_lengths: Callable[..., Any]) -> Callable[..., Any]:
    return lambda lengths, device, *rest: from_lengths([sum(lengths)], device)


def normalise_loss_per_rank() -> None:
    """Each lane divides by its own tokens of a microbatch; the sum over lanes is rescaled."""
    from mimo.engines.megatron import module as modules

    sum_losses = modules.sum_losses

    def mean(losses: Any) -> Any:
        total, tokens, logged = sum_losses(losses)
        return total / tokens.clamp(min=1) * 20, tokens, logged

    modules.sum_losses = mean


def shift_labels_over_segments() -> None:
    """Labels are shifted once more after packing, so the last one is the next sample's token."""
    from dataclasses import replace

    import numpy as np

    from mimo.model import decoding as loader

    pack = loader.pack_lane

    def shifted(*args: Any) -> Any:
        lane = pack(*args)
        return replace(lane, labels=np.roll(lane.labels, -1))

    loader.pack_lane = shifted


def keep_gradients_of_first_cp_rank() -> None:
    """Rows whose position another CP rank holds get no gradient."""
    from bridge import BridgeReceiver
    from mimo.model.modules import MimoModel

    run, backward, cp_rank = MimoModel._run_language, BridgeReceiver._backward, 0

    def run_language(self: Any, module: Any, *args: Any) -> Any:
        nonlocal cp_rank
        cp_rank = module.groups.cp.rank()
        return run(self, module, *args)

    def first_only(self: Any, microbatch: int, gradient: Any) -> None:
        backward(self, microbatch, gradient * (cp_rank == 0))

    MimoModel._run_language = run_language  # type: ignore[method-assign]
    BridgeReceiver._backward = first_only  # type: ignore[method-assign]


def swap_zigzag_order() -> None:
    """CP rank r takes the chunks of rank cp - 1 - r."""
    from mimo.parallel import partition

    owner: Any = partition
    indices = owner.zigzag_indices

    def swapped(lengths: Any, cp_size: int, cp_rank: int) -> Any:
        return indices(lengths, cp_size, cp_size - 1 - cp_rank)

    owner.zigzag_indices = swapped


def forget_slices_of_adapters() -> None:
    """Under sequence parallelism the matrix that all ranks have learns from one slice each."""
    from mimo.engines.megatron import lora

    whole = lora._whole
    lora._whole = lambda weight, rows, columns, sums_slices: whole(weight, rows, columns, False)


def take_adapter_inputs_of_own_rank() -> None:
    """A row-parallel linear's adapter leaves out the inputs of the other ranks."""
    from mimo.engines.megatron import lora

    lora.reduce_from_tensor_model_parallel_region = lambda down, group: down


# ---------------------------------------------------------------------------- tests


LORA_B = "language.decoder.layers.0.self_attention.linear_proj.lora_b"
CASES = by_fault(
    Case(average_encoder_gradients, SweepCell("", "dp2"), spared="language"),
    Case(sum_gradients_of_gathered_rows, SweepCell("tp2", "dp2"), spared="language"),
    Case(
        drop_group_of_tied_embeddings,
        SweepCell("pp2", ""),
        # Both copies are wrong, by what the other one lacks.
        ("language.embedding.word_embeddings.weight", "language.output_layer.weight"),
        spared="vision",
    ),
    Case(cut_sequence_without_gather_in_backward, SweepCell("tp2 sp", "", ("replicated",))),
    Case(take_first_slice_of_sequence, SweepCell("tp2 sp", "", ("replicated",))),
    Case(lose_segments_on_middle_stage, SweepCell("pp3", "")),
    Case(normalise_loss_per_rank, SweepCell("dp2", "")),
    Case(shift_labels_over_segments, SweepCell("dp2", "")),
    Case(keep_gradients_of_first_cp_rank, SweepCell("cp2", ""), spared="language"),
    # The bridge's own map is left alone, so the rows land on other positions than the text.
    Case(swap_zigzag_order, SweepCell("cp2", "")),
    Case(forget_slices_of_adapters, SweepCell("tp2 sp", "dp2", ("adapters",)), LORA_B, "vision"),
    Case(take_adapter_inputs_of_own_rank, SweepCell("tp2", "dp2", ("adapters",)), LORA_B, "vision"),
)


@pytest.mark.slow  # `test_verify_command.py` has one of them
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_fault_is_reported_with_the_first_parameter_that_differs(
    verifier: Verifier, case: Case
) -> None:
    check_fault(verifier, case)


@pytest.mark.slow
def test_without_a_fault_layouts_are_equal_and_only_what_learns_has_a_gradient(
    verifier: Verifier,
) -> None:
    whole, adapters = (
        check_equal(run_cell(verifier, SweepCell("tp2", "dp2", options)))
        for options in ((), ("adapters",))
    )
    assert whole.gradients.keys() == whole.weights.keys()
    assert adapters.gradients.keys() == {
        name
        for name in adapters.weights
        if is_adapter(name) or name.removeprefix("vision.").startswith(PROJECTOR)
    }


def fail_on_last_rank() -> None:
    """A rank that raises before it joins the others."""
    from mimo.runtime.ranks import rank_environment

    env = rank_environment()
    assert env is not None
    if env.rank == env.world_size - 1:
        raise ValueError("this rank has a bad day")


def test_a_rank_that_fails_is_named_with_its_error(verifier: Verifier) -> None:
    result = run_cell(verifier, SweepCell("", ""), fail_on_last_rank)
    assert not result.passed
    assert result.comparison is None
    assert result.failure is not None
    assert result.failure.strip().endswith("rank 1 failed: ValueError: this rank has a bad day")
