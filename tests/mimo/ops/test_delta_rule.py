"""The gated delta rule and its convolution equal transformers', called once for each segment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mimo.ops import acceleration, delta_rule
from mimo.ops.acceleration import FLA, Machine, choose_delta_rule
from mimo.ops.delta_rule import gated_delta_rule, segment_conv
from tests.lone_module import noise

# fp32 and fp64: sums in another order. bf16: inputs are exact, outputs and gradients are rounded.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 8e-3}
LENGTHS = (200, 1, 64, 3, 130, 65)
KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, WINDOW = 2, 4, 8, 6, 4

Rule = Callable[..., Tensor]


def draw(
    total: int, dtype: torch.dtype, heads: tuple[int, int] = (KEY_HEADS, VALUE_HEADS)
) -> list[Tensor]:
    """Query, key, value, logarithm of the decay, beta, and a gradient of the output."""
    keys, values = heads
    query, key = (noise(seed, total, keys, KEY_SIZE) for seed in (0, 1))
    value, gradient = (noise(seed, total, values, VALUE_SIZE) for seed in (2, 3))
    log_decay, beta = -noise(4, total, values).square(), noise(5, total, values).sigmoid()
    wide = torch.promote_types(dtype, torch.float32)
    drawn = [query, key, value, log_decay.to(wide), beta, gradient]
    return [x if x is drawn[3] else x.to(dtype) for x in drawn]


def value_and_gradients(function: Rule, *drawn: Tensor) -> list[Tensor]:
    """drawn: inputs, then the gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in drawn[:-1]]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, drawn[-1])]


def by_segment(function: Rule, lengths: tuple[int, ...], *shared: Tensor) -> Rule:
    """Call a function of (T, ...) once for each segment."""

    def call(*inputs: Tensor) -> Tensor:
        segments = zip(*(x.split(lengths) for x in inputs), strict=True)
        return torch.cat([function(*parts, *shared) for parts in segments if len(parts[0])])

    return call


def transformers_rule(*inputs: Tensor) -> Tensor:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

    rule = reference.torch_chunk_gated_delta_rule
    output, _ = rule(*(x[None] for x in inputs), use_qk_l2norm_in_kernel=True)
    return output[0]


def token_by_token(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor):
    """The rule's definition, in fp64 too: transformers computes in fp32 always."""
    repeats = value.shape[1] // key.shape[1]
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, 1)
        for x in (query, key)
    )
    state, outputs = 0, []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        error = b[:, None] * (v - (k[..., None] * state).sum(1))
        state = state + k[..., None] * error[:, None]
        outputs.append((q[..., None] * state).sum(1) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)


def transformers_conv(x: Tensor, weight: Tensor) -> Tensor:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

    return reference.causal_conv1d_fn(x.T[None], weight, None, activation="silu")[0].T


def errors(got: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The error of each tensor."""
    largest = max(float(x.abs().max()) for x in expected)
    of_tensors = []
    for x, reference in zip(got, expected, strict=True):
        assert x.dtype == reference.dtype
        assert x.isfinite().all()
        floor = max(float(reference.abs().max()), 1e-6 * largest)
        of_tensors.append(float((x - reference).abs().max()) / floor)
    return of_tensors


def check_equal(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for number, error in enumerate(errors(got, expected)):
        assert error <= tolerance, f"tensor {number}: error {error:.2e}"


# ----------------------------------------------------------------------------- the values

packed = st.lists(st.integers(0, 140), min_size=1, max_size=4).filter(any).map(tuple)


@settings(max_examples=25)
@given(packed, st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]), st.sampled_from([*TOLERANCES]))
def test_outputs_and_gradients_equal_transformers_for_each_segment(
    lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    drawn = draw(sum(lengths), dtype, heads)
    got = value_and_gradients(partial(gated_delta_rule, lengths=lengths), *drawn)
    exact = value_and_gradients(by_segment(token_by_token, lengths), *(x.double() for x in drawn))
    exact = [x.to(y.dtype) for x, y in zip(exact, got, strict=True)]
    check_equal(got, exact, TOLERANCES[dtype])
    if dtype != torch.float64:  # transformers computes in fp32 always
        theirs = value_and_gradients(by_segment(transformers_rule, lengths), *drawn)
        # Where a gradient is tiny, most of theirs is rounding noise.
        noise_of_theirs = max(errors(theirs, exact))
        check_equal(got, theirs, TOLERANCES[dtype] + noise_of_theirs)
        assert noise_of_theirs < 10 * TOLERANCES[dtype]


@settings(max_examples=25)
@given(packed, st.integers(1, 5), st.sampled_from([*TOLERANCES]))
def test_the_convolution_equals_transformers_for_each_segment(
    lengths: tuple[int, ...], window: int, dtype: torch.dtype
) -> None:
    x, gradient = (noise(seed, sum(lengths), 10).to(dtype) for seed in (0, 1))
    weight = noise(2, 10, window).to(dtype)
    got = value_and_gradients(partial(segment_conv, lengths=lengths), x, weight, gradient)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    output = by_segment(transformers_conv, lengths, weight)(x)
    expected = [output.detach(), *torch.autograd.grad(output, (x, weight), gradient)]
    check_equal(got, expected, TOLERANCES[dtype])


def test_gradients_equal_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK", 2)  # segments of 3, 1 and 1 chunks
    inputs = [x.requires_grad_() for x in draw(8, torch.float64, (1, 2))[:-1]]
    assert torch.autograd.gradcheck(
        partial(gated_delta_rule, lengths=(5, 2, 1)), inputs, fast_mode=True
    )


def test_the_length_of_a_chunk_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(sum(LENGTHS), torch.float64)
    expected = value_and_gradients(by_segment(token_by_token, LENGTHS), *drawn)
    for chunk in (1, 8, 64, 256):
        monkeypatch.setattr(delta_rule, "CHUNK", chunk)
        got = value_and_gradients(partial(gated_delta_rule, lengths=LENGTHS), *drawn)
        check_equal(got, expected, TOLERANCES[torch.float64])


@pytest.mark.parametrize("log_decay", [-50.0, 0.0])
def test_extreme_decays_are_exact(log_decay: float) -> None:
    """Sums over a chunk reach -3,200, whose negative would overflow as an exponent."""
    for dtype in (torch.float32, torch.float64):
        query, key, value, decay, beta, gradient = draw(sum(LENGTHS), dtype)
        drawn = query, key, value, torch.full_like(decay, log_decay), beta, gradient
        got = value_and_gradients(partial(gated_delta_rule, lengths=LENGTHS), *drawn)
        expected = value_and_gradients(by_segment(token_by_token, LENGTHS), *drawn)
        check_equal(got, expected, TOLERANCES[dtype])


def test_equal_keys_that_overwrite_each_other_stay_exact() -> None:
    """All entries of the system are 1/2: powers of it, as in a Neumann series, are huge."""
    query, key, value, decay, beta, gradient = draw(sum(LENGTHS), torch.float32)
    key, decay = key[:1].expand_as(key).clone(), torch.zeros_like(decay)
    drawn = query, key, value, decay, torch.full_like(beta, 0.5), gradient
    got = value_and_gradients(partial(gated_delta_rule, lengths=LENGTHS), *drawn)
    check_equal(got, value_and_gradients(by_segment(token_by_token, LENGTHS), *drawn), 1e-5)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_without_tokens_gradients_are_zeros(lengths: tuple[int, ...]) -> None:
    drawn = draw(0, torch.float32)
    output, *gradients = value_and_gradients(partial(gated_delta_rule, lengths=lengths), *drawn)
    assert output.shape == (0, VALUE_HEADS, VALUE_SIZE)
    assert [x.shape for x in gradients] == [x.shape for x in drawn[:-1]]
    x, weight = noise(0, 0, 10), noise(1, 10, WINDOW)
    _, _, of_weight = value_and_gradients(partial(segment_conv, lengths=lengths), x, weight, x)
    assert torch.equal(of_weight, torch.zeros(10, WINDOW))


# ------------------------------------------------------------------------ between segments


def both_operations(lengths: tuple[int, ...], drawn: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients per token of the rule, then of the convolution."""
    weight, rows = noise(6, VALUE_HEADS * VALUE_SIZE, WINDOW), [x.flatten(1) for x in drawn]
    return [
        *value_and_gradients(partial(gated_delta_rule, lengths=lengths), *drawn),
        *value_and_gradients(lambda x: segment_conv(x, weight, lengths), rows[2], rows[-1]),
    ]


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_the_tokens_of_a_neighbour_do_not_change_a_bit(changed: int) -> None:
    drawn = draw(sum(LENGTHS), torch.float32)
    before = both_operations(LENGTHS, drawn)
    start, length = sum(LENGTHS[:changed]), LENGTHS[changed]
    for x in drawn:
        x[start : start + length] *= 1.5
    is_changed = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    is_changed[start : start + length] = True
    for number, (old, new) in enumerate(zip(before, both_operations(LENGTHS, drawn), strict=True)):
        assert torch.equal(old[~is_changed], new[~is_changed])
        # A segment's first token has no state to decay.
        assert (length, number) == (1, 4) or not torch.equal(old[is_changed], new[is_changed])


def test_a_state_or_a_window_that_leaks_over_a_border_is_found() -> None:
    """With the segments joined into one, both operations are far from those of the segments."""
    drawn, first = draw(sum(LENGTHS), torch.float32), LENGTHS[0]
    right, wrong = (both_operations(lengths, drawn) for lengths in (LENGTHS, (sum(LENGTHS),)))
    for expected, got in zip(right, wrong, strict=True):
        with pytest.raises(AssertionError, match="error"):
            check_equal([got[first:]], [expected[first:]], 1e-3)
    for number in (0, 6):  # outputs, which depend on earlier tokens only
        check_equal([wrong[number][:first]], [right[number][:first]], 1e-5)


# ---------------------------------------------------------------------- memory and kernels


def test_few_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the chunks of a segment: twice the states."""
    monkeypatch.setattr(delta_rule, "CHUNK", 4)

    def num_states(num_chunks: int, num_segments: int) -> int:
        saved = []
        drawn = [x.requires_grad_() for x in draw(4 * num_chunks * num_segments, torch.float32)]
        with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            gated_delta_rule(*drawn[:-1], lengths=(4 * num_chunks,) * num_segments)
        state_size = VALUE_HEADS * KEY_SIZE * VALUE_SIZE
        return sum(x.numel() for x in saved[5:]) // state_size

    assert [num_states(n, 1) for n in (1, 4, 16, 64, 256)] == [0, 1, 3, 7, 15]
    assert num_states(16, 30) == 30 * 3
    assert num_states(1, 30) == 0


def test_many_short_segments_take_few_steps() -> None:
    device = torch.device("cpu")
    for lengths, most in (((4,) * 512, 4), ((300, 3) * 20, 51), ((2048, *(64,) * 100), 45)):
        plan = delta_rule.stretches(lengths, 64, device)
        assert sum(len(stretch.sizes) - 1 for stretch in plan) <= most
        rows = torch.cat([stretch.rows for stretch in plan])
        assert torch.equal(rows.sort().values, torch.arange(sum(lengths)))
        # At most half of a chunk is padding, except in the last of a long segment.
        assert sum(stretch.tokens.numel() for stretch in plan) <= 1.3 * sum(lengths)


HOPPER = (9, 0)


def test_flash_linear_attention_is_chosen_where_it_runs() -> None:
    for machine, dtype, reason in (
        (Machine(None), torch.bfloat16, "no GPU"),
        (Machine(HOPPER), torch.bfloat16, "not installed"),
        (Machine(HOPPER, frozenset({FLA})), torch.float32, "16-bit"),
        (Machine((7, 5), frozenset({FLA})), torch.float16, "capability 8.0"),
    ):
        choice = choose_delta_rule(128, dtype, machine)
        assert choice.kernel == "torch"
        assert reason in choice.reason
    choice = choose_delta_rule(128, torch.bfloat16, Machine(HOPPER, frozenset({FLA})))
    assert choice.kernel == FLA


def test_its_kernel_is_called_with_bounds_and_the_choice_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A package of the same function stands in for it, and computes by definition."""
    calls: list[dict[str, Any]] = []

    def chunk_gated_delta_rule(q, k, v, g, beta, **options: Any) -> tuple[Tensor, None]:
        calls.append(options)
        lengths = tuple(options["cu_seqlens"].diff().tolist())
        return by_segment(token_by_token, lengths)(q[0], k[0], v[0], g[0], beta[0])[None], None

    package = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    machine = Machine(HOPPER, frozenset({FLA}))
    monkeypatch.setattr(acceleration, "this_machine", lambda: machine)
    acceleration.delta_rule_kernel.cache_clear()
    caplog.set_level(logging.INFO)
    drawn = draw(sum(LENGTHS), torch.bfloat16)
    try:
        got = gated_delta_rule(*drawn[:-1], lengths=(*LENGTHS, 0))
        gated_delta_rule(*(x[:0] for x in drawn[:-1]), lengths=())  # a kernel of no block
    finally:
        acceleration.delta_rule_kernel.cache_clear()
    assert "kernel='flash_linear_attention'" in caplog.text
    (options,) = calls
    assert options["use_qk_l2norm_in_kernel"]
    assert options["cu_seqlens"].dtype == options["cu_seqlens_cpu"].dtype == torch.int64
    expected = by_segment(transformers_rule, LENGTHS)(*drawn[:-1])
    assert float((got - expected).abs().max() / expected.abs().max()) <= 2e-2


@pytest.mark.gpu
def test_flash_linear_attention_equals_the_torch_form_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mimo.device import local_device

    if FLA not in acceleration.this_machine().installed:
        pytest.skip("flash-linear-attention is not installed")
    monkeypatch.setattr(sys.modules[__name__], "KEY_SIZE", 64)
    monkeypatch.setattr(sys.modules[__name__], "VALUE_SIZE", 64)
    drawn = [x.to(local_device()) for x in draw(sum(LENGTHS), torch.bfloat16)]
    by_kernel = {}
    for kernel in (FLA, "torch"):
        monkeypatch.setattr(delta_rule, "delta_rule_kernel", lambda *_, kernel=kernel: kernel)
        by_kernel[kernel] = value_and_gradients(partial(gated_delta_rule, lengths=LENGTHS), *drawn)
    # The kernels round the corrections of a chunk, and states in products, to bf16.
    check_equal(by_kernel[FLA], by_kernel["torch"], 3e-2)


@pytest.mark.gpu
def test_the_torch_form_on_a_gpu_equals_the_cpu() -> None:
    from mimo.device import local_device

    drawn = draw(sum(LENGTHS), torch.float64)
    on_gpu = [x.to(local_device()) for x in drawn]
    got, expected = (
        value_and_gradients(partial(gated_delta_rule, lengths=LENGTHS), *inputs)
        for inputs in (on_gpu, drawn)
    )
    check_equal([x.cpu() for x in got], expected, TOLERANCES[torch.float64])
