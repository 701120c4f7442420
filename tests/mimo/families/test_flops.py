"""The FLOPs that families declare are those that PyTorch counts in a forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mimo.config.modules import LoRA
from mimo.families.flops import causal_pairs, flops_per_unit, step_flops
from mimo.families.keymap import is_adapter
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.lone_module import SEED, _context
from tests.mimo.families.test_contracts import ENCODERS, LANGUAGES, draw_items, settings_of

H, NUM_TOKENS = 32, 16
LENGTHS = (12, 12, 12)  # alike, so that no kernel computes on padding
RANK, TARGETS = 3, ("qkv", "proj", "fc1", "fc2")
# PyTorch counts five products of a causal square in the backward of attention, of which one is
# computed again: the model needs four halves of a square.
COUNTED_BACKWARD = 5 / 4

Counted = tuple[float, float, float, float]
"""Matrices and attention: ours, then PyTorch's."""

LEARNS = {
    "trained": (lambda name, projector: True, False),
    "frozen": (lambda name, projector: False, False),
    "projector": (lambda name, projector: name.startswith(projector), False),
    "frozen behind what learns": (lambda name, projector: False, True),
    "adapters": (lambda name, projector: is_adapter(name), False),
    "adapters and projector": (
        lambda name, projector: is_adapter(name) or name.startswith(projector),
        False,
    ),
    "adapters behind what learns": (lambda name, projector: is_adapter(name), True),
}


def _ours(settings: Any, counts: dict[str, float], case: str, size: int, projector: Any) -> Any:
    learns, input_learns = LEARNS[case]
    adapters = LoRA(rank=RANK) if case.startswith("adapters") else None
    found = []
    for kind in (True, False):
        pairs = {name: n for name, n in counts.items() if name.endswith("pair") != kind}
        per_unit = flops_per_unit(
            settings.products(size), lambda name: learns(name, projector), input_learns, adapters
        )
        found.append(step_flops(per_unit, pairs))
    return tuple(found)


def _theirs(forward: Callable[[], torch.Tensor], causal: float) -> Any:
    """causal: the share of a square that causal queries see; PyTorch counts squares."""
    counter = FlopCounterMode(display=False)
    with counter:
        output = forward()
        if output.requires_grad:
            output.sum().backward()
    by_operator = counter.get_flop_counts()["Global"]
    attention = matrices = 0.0
    for operator, flops in by_operator.items():
        if "attention" not in str(operator):
            matrices += flops
        else:
            again = COUNTED_BACKWARD if "backward" in str(operator) else 1.0
            attention += flops * causal / again
    return matrices, attention


def _freeze(model: nn.Module, case: str, projector: Any) -> None:
    learns, _ = LEARNS[case]
    for name, param in model.named_parameters():
        param.requires_grad_(learns(name, projector))


def _with_adapters(case: str) -> Any:
    from dataclasses import replace

    from mimo.engines.megatron import config

    adapters = config.LoRA(RANK, 1.0, frozenset(TARGETS)) if case.startswith("adapters") else None
    return replace(_context(1, False), lora=adapters)


def count_tower(rank: int, name: str, case: str) -> Counted:
    family = importlib.import_module(f"encoders.{name}")
    settings = settings_of(family).scaled_down(1, 1)
    tower = family.build(settings, _with_adapters(case), H, SEED)
    _freeze(tower, case, family.PROJECTOR)
    patches, grids = draw_items(settings, 2)
    tower.set_input_tensor([None])
    inputs = torch.from_numpy(patches), torch.from_numpy(grids)
    theirs = _theirs(lambda: tower(*inputs).values, 1.0)
    counts = settings.counts(grids)
    return (*_ours(settings, counts, case, H, family.PROJECTOR), *theirs)


def compute_without_chunks() -> None:
    """Linear attention does what a token needs: its window, and three products with a state."""
    from mimo.engines.megatron import delta_net

    def rule(query: Any, key: Any, value: Any, log_decay: Any, beta: Any, lengths: Any) -> Any:
        repeated = query.repeat_interleave(value.shape[1] // query.shape[1], dim=1)
        by_head = repeated.transpose(0, 1)  # (V, T, D)
        state = torch.ones(*by_head.shape[::2], value.shape[2], requires_grad=query.requires_grad)
        outputs = [by_head @ (number * state) for number in (1, 2, 3)]
        rest = value * beta[..., None] + key.sum() + log_decay.sum()
        return sum(outputs).transpose(0, 1) + rest  # type: ignore[union-attr]

    def conv(x: Any, weight: Any, lengths: Any) -> Any:
        windows = nn.functional.pad(x.T, (weight.shape[1] - 1, 0)).unfold(1, weight.shape[1], 1)
        return (windows @ weight[..., None])[..., 0].T  # (C, T, W), (C, W, 1)

    delta_net.gated_delta_rule, delta_net.segment_conv = rule, conv


def count_language(rank: int, name: str, case: str) -> Counted:
    from mimo.engines.megatron import PackedSegments

    family = importlib.import_module(f"mimo.families.languages.{name}")
    # A window as long as a segment: kernels compute on more keys than a shorter one needs.
    window = {"sliding_window": LENGTHS[0]} if name.startswith("gemma") else {}
    settings = settings_of(family).scaled_down(1, 1).model_copy(update=window)
    compute_without_chunks()
    total = sum(LENGTHS)
    model = family.build(settings, _with_adapters(case), NUM_TOKENS, total, SEED)
    _freeze(model, case, ())
    ids = (torch.arange(total) % NUM_TOKENS)[None]
    positions = torch.arange(total).expand(3, 1, total)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": positions,
        # No labels: a loss may compute logits again in its backward.
        "packed_seq_params": PackedSegments.from_lengths(LENGTHS, ids.device),
    }
    if LEARNS[case][1]:
        hidden = model.embedding(input_ids=ids, position_ids=positions)
        inputs["decoder_input"] = hidden.detach().requires_grad_()
    square = sum(length**2 for length in LENGTHS)
    share = causal_pairs(np.array(LENGTHS)) / square
    theirs = _theirs(lambda: model(**inputs), share)
    counts = settings.counts(np.array(LENGTHS), np.zeros(0), total)
    vocabulary = settings.padded_vocab_size(NUM_TOKENS)
    return (*_ours(settings, counts, case, vocabulary, ()), *theirs)


TOWERS = {
    f"{name}, {case}": (name, case)
    for name in ENCODERS
    for case in ("trained", "frozen", "projector", "adapters", "adapters and projector")
    # The engine's linears compute a gradient of their input even where nothing before them learns;
    # only here is one the first that learns.
    if (name, case) != ("whisper", "projector")
}
MODELS = {
    f"{name}, {case}": (name, case)
    for name, family in LANGUAGES.items()
    if "megatron" in family.Settings.engines
    for case in LEARNS
    if "projector" not in case
}


def check(counted: Counted) -> None:
    matrices, attention, their_matrices, their_attention = counted
    assert matrices == pytest.approx(their_matrices, rel=1e-12)
    assert attention == pytest.approx(their_attention, rel=1e-12)


@pytest.mark.parametrize(
    "tower",
    quick_values(
        TOWERS,
        *(f"{name}, trained" for name in ENCODERS),
        "qwen3_vl, projector",
        "qwen_vl, frozen",
        "gemma3, adapters",
    ),
)
def test_a_tower_declares_the_flops_it_needs(run_ranks: RunRanks, tower: tuple[str, str]) -> None:
    (counted,) = run_ranks(count_tower, 1, *tower)
    check(counted)


@pytest.mark.parametrize(
    "model",
    quick_values(
        MODELS,
        *(name for name in MODELS if name.endswith(", trained")),
        "qwen3, frozen",
        "qwen3, frozen behind what learns",
        "gemma3, adapters",
    ),
)
def test_a_language_model_declares_its_flops(run_ranks: RunRanks, model: tuple[str, str]) -> None:
    (counted,) = run_ranks(count_language, 1, *model)
    check(counted)


def test_pairs_of_causal_attention_are_counted_one_by_one() -> None:
    def one_by_one(length: int, window: int) -> int:
        return sum(min(place, window) for place in range(1, length + 1))

    lengths = (1, 5, 9)
    assert causal_pairs(np.array(lengths)) == sum(one_by_one(n, n) for n in lengths)
    assert causal_pairs(np.array(lengths), 4) == sum(one_by_one(n, 4) for n in lengths)
