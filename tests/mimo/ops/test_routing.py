"""The choice of experts, the balancing loss, and products with the weights of experts.

Letters: T tokens, E experts, k of a token, H hidden, S samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mimo.ops.routing import (
    Choice,
    TokenShare,
    balance_over_layers,
    balance_slopes,
    choose_experts,
    count_loads,
    grouped_linear,
)
from mimo.ops.segments import PackedSegments

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_of_equal_experts_those_with_the_smallest_numbers_are_chosen() -> None:
    # Whole numbers, whose products are exact whatever the order of additions.
    tokens, router = (3 * draw(5, 8)).round(), torch.zeros(7, 8, dtype=torch.float64)
    assert choose_experts(tokens, router, 3, True).experts.tolist() == [[0, 1, 2]] * 5
    router[[1, 4, 6]] = (3 * draw(8)).round()  # three equal ones, above or below the others
    for token, experts in zip(tokens, choose_experts(tokens, router, 4, True).experts, strict=True):
        expected = [1, 4, 6, 0] if token @ router[1] > 0 else [0, 2, 3, 5]
        assert experts.tolist() == expected


def test_the_softmax_is_over_all_experts_before_the_choice() -> None:
    choice = choose_experts(draw(6, 8), draw(5, 8, seed=1), 2, normalize=False)
    assert choice.probabilities.sum(-1).tolist() == pytest.approx([1] * 6)
    assert (choice.weights.sum(-1) < 1).all()
    assert torch.equal(choice.weights, choice.probabilities.gather(1, choice.experts))
    normalized = choose_experts(draw(6, 8), draw(5, 8, seed=1), 2, normalize=True)
    assert normalized.weights.sum(-1).tolist() == pytest.approx([1] * 6)
    assert torch.equal(normalized.experts, choice.experts)


def test_the_router_computes_in_fp32_whatever_the_model() -> None:
    tokens, router = draw(6, 8, dtype=torch.bfloat16), draw(5, 8, seed=1, dtype=torch.bfloat16)
    choice = choose_experts(tokens, router, 2, True)
    assert choice.logits.dtype == choice.weights.dtype == torch.float32
    assert torch.equal(choice.logits, tokens.float() @ router.float().T)


# ------------------------------------------------------------------ the tokens of a rank

LENGTHS, REAL, TAIL = (16, 8, 8), (13, 8, 8), 8  # the last is padding alone


def shares(cp: int, tp: int, sp: bool) -> list[TokenShare]:
    return [TokenShare(cp, c, tp, t, sp) for c in range(cp) for t in range(tp)]


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_ranks_send_every_real_token_once_and_no_padding(cp: int, tp: int, sp: bool) -> None:
    if sp and sum(LENGTHS) // cp % tp:
        pytest.skip("sequence parallelism needs equal slices")
    segments = PackedSegments.from_lengths(LENGTHS, CPU, REAL, tail=TAIL)
    sent = list[int]()
    for share in shares(cp, tp, sp):
        routed = share.plan_of(segments)
        own, each = routed.sample, len(routed.sample)
        if not sp:
            each = -(-len(own) // tp)
            own = own[share.tp_rank * each : (share.tp_rank + 1) * each]
        assert (routed.real is None) == bool(len(own) == each and (own < 3).all())
        sent += own.tolist() if routed.real is None else own[routed.real].tolist()
        assert routed.inverse_length.tolist() == pytest.approx([1 / 13, 1 / 8, 0, 0])
    assert sorted(sent) == [0] * 13 + [1] * 8


def test_without_padding_all_tokens_are_sent() -> None:
    segments = PackedSegments.from_lengths((4, 6), CPU)
    routed = TokenShare().plan_of(segments)
    assert routed.real is None
    assert routed.sample.tolist() == [0] * 4 + [1] * 6


# ------------------------------------------------------------------- the balancing loss


def balance(choice: Choice, routed: Any) -> torch.Tensor:
    return (choice.probabilities * balance_slopes(routed, count_loads(choice, routed))).sum()


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_balancing_loss_of_a_sample_is_that_of_transformers(top_k: int) -> None:
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

    tokens = draw(sum(LENGTHS), 8)
    router = draw(6, 8, seed=1).requires_grad_()
    segments = PackedSegments.from_lengths(LENGTHS, CPU, REAL, tail=TAIL)
    routed = TokenShare().plan_of(segments)
    ours = balance(choose_experts(tokens, router, top_k, True), routed)
    theirs: Any = 0.0
    for start, count in ((0, 13), (16, 8)):
        logits = tokens[start : start + count] @ router.T
        theirs = theirs + count * load_balancing_loss_func((logits,), 6, top_k)
    # Theirs sums in fp32.
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0)
    (got,), (wanted,) = (torch.autograd.grad(loss, router) for loss in (ours, theirs))
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-6


def test_gradients_of_a_loss_over_all_layers_are_those_of_transformers() -> None:
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

    segments = PackedSegments.from_lengths(LENGTHS, CPU, REAL, tail=TAIL)
    routed = TokenShare().plan_of(segments)
    inputs = [draw(sum(LENGTHS), 8, seed=layer) for layer in range(3)]
    routers = [draw(6, 8, seed=7 + layer).requires_grad_() for layer in range(3)]
    ours: Any = 0.0
    for layer, (tokens, router) in enumerate(zip(inputs, routers, strict=True)):
        choice = choose_experts(tokens, router, 2, True)
        loads = count_loads(choice, routed)
        ours = ours + balance_over_layers(choice, routed, loads, layer) / 3
    theirs: Any = 0.0
    for start, count in ((0, 13), (16, 8)):
        at = slice(start, start + count)
        logits: Any = tuple(x[at] @ router.T for x, router in zip(inputs, routers, strict=True))
        theirs = theirs + count * load_balancing_loss_func(logits, 6, 2)
    gradients = (torch.autograd.grad(loss, routers) for loss in (ours, theirs))
    for got, wanted in zip(*gradients, strict=True):
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-6


def test_the_balancing_loss_is_the_sum_of_what_ranks_compute() -> None:
    tokens, router = draw(sum(LENGTHS), 8), draw(6, 8, seed=1)
    segments = PackedSegments.from_lengths(LENGTHS, CPU, REAL, tail=TAIL)
    whole = TokenShare().plan_of(segments)
    expected = balance(choose_experts(tokens, router, 2, True), whole)
    parts = [share.plan_of(segments) for share in shares(2, 2, True)]
    # The zigzag of two ranks, each cut in two.
    chunks = [torch.arange(n).chunk(4) for n in LENGTHS]
    starts = [0, 16, 24]
    of_cp = [
        torch.cat([s + c[i] for s, c in zip(starts, chunks, strict=True) for i in (r, 3 - r)])
        for r in range(2)
    ]
    places = [part for held in of_cp for part in held.chunk(2)]
    choices = [choose_experts(tokens[at], router, 2, True) for at in places]
    pairs = list(zip(choices, parts, strict=True))
    loads = sum(count_loads(choice, routed) for choice, routed in pairs)
    assert isinstance(loads, torch.Tensor)
    total = sum((c.probabilities * balance_slopes(routed, loads)).sum() for c, routed in pairs)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


# ----------------------------------------------------------------- products of experts


@pytest.mark.parametrize(
    ("dtype", "inputs"), [(torch.float64, 4), (torch.bfloat16, 8), (torch.bfloat16, 4)]
)
@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0, 0), (5, 0, 0)])
def test_rows_are_multiplied_by_the_weights_of_their_expert(
    counts: tuple[int, ...], dtype: torch.dtype, inputs: int
) -> None:
    rows = draw(sum(counts), inputs, dtype=dtype).requires_grad_()
    weights = draw(3, 16, inputs, seed=1, dtype=dtype).requires_grad_()
    output = grouped_linear(rows, weights, torch.tensor(counts))
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("ni,noi->no", rows.double(), weights[expert].double())
    torch.testing.assert_close(output, expected.to(dtype))
    output.backward(torch.ones_like(output))
    assert weights.grad is not None
    for number, count in enumerate(counts):
        assert bool(weights.grad[number].any()) == (count > 0)


@pytest.mark.gpu
def test_grouped_products_on_a_gpu_leave_no_noise_in_gradients_of_idle_experts() -> None:
    from mimo.device import local_device

    counts = torch.tensor([5, 0, 3, 0])
    drawn = draw(8, 16, dtype=torch.bfloat16), draw(4, 24, 16, seed=1, dtype=torch.bfloat16)
    expected = [x.clone().requires_grad_() for x in drawn]
    reference = grouped_linear(expected[0], expected[1], counts)
    reference.sum().backward()
    got = [x.to(local_device()).requires_grad_() for x in drawn]
    # What the allocator hands out next is not zero by luck.
    del [torch.full((4, 24, 16), torch.nan, dtype=torch.bfloat16, device=local_device())][:]
    output = grouped_linear(got[0], got[1], counts.to(local_device()))
    output.sum().backward()
    torch.testing.assert_close(output.cpu(), reference, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=2e-2, atol=2e-2)
    assert got[1].grad is not None
    assert not got[1].grad[[1, 3]].any()
