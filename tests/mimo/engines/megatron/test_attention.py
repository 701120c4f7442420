"""Core attention over packed segments equals a softmax under a block-diagonal mask.

On a CPU the checks run inside a rank, where the engine is imported already.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.lone_module import noise

if TYPE_CHECKING:
    from mimo.engines.megatron.attention import CoreAttention

# fp32 against fp64: absolute, and relative to the expected number.
TOLERANCE = 1e-5
# A GPU kernel against SDPA, both in bf16: of the largest expected number. One rounding to bf16 is
# 4e-3 of a number; probabilities, outputs and their gradients are rounded once each.
BF16_TOLERANCE = 2e-2

HEADS = [(4, 4), (4, 2), (6, 1)]  # query heads, key/value heads
HEAD_SIZE = 8


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    causal: bool,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """All T × T scores, those of other segments masked. q (T, N, D), k and v (T, G, D)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    if causal:
        seen = seen.tril()
    if window is not None:
        seen = seen.triu(1 - window)
    scores = torch.einsum("qnd,knd->nqk", q, k) * scale
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def draw(num_tokens: int, heads: int, kv_heads: int, head_size: int = HEAD_SIZE) -> list[Tensor]:
    """Queries, keys, values and the output's gradient, fp32."""
    shapes = [(num_tokens, n, head_size) for n in (heads, kv_heads, kv_heads, heads)]
    return [noise(seed, *shape) for seed, shape in enumerate(shapes)]


def value_and_gradients(attend, tensors: list[Tensor]) -> dict[str, Tensor]:
    """``attend(q, k, v)`` and the gradients of its inputs, in the dtype of ``tensors``."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors[:3]]
    output = attend(*inputs)
    gradients = torch.autograd.grad(output, inputs, tensors[3].reshape(output.shape))
    return dict(zip(("output", "dq", "dk", "dv"), (output.detach(), *gradients), strict=True))


# ------------------------------------------------------- functions that run inside ranks


def core_attention(
    causal: bool,
    window: int | None = None,
    softmax_scale: float | None = None,
    cp: dist.ProcessGroup | None = None,
    **options: bool,
) -> CoreAttention:
    """Core attention for heads of HEAD_SIZE, as a layer spec builds it."""
    from mimo.engines.megatron.attention import AttnMaskType, CoreAttention
    from mimo.engines.megatron.config import ProcessGroupCollection, TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        cuda_graph_modules=[],
        hidden_size=HEAD_SIZE,
        num_attention_heads=1,
        kv_channels=HEAD_SIZE,
        context_parallel_size=1 if cp is None else cp.size(),
        window_size=None if window is None else (window - 1, 0),
    )
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    groups = None if cp is None else ProcessGroupCollection(cp=cp)
    return CoreAttention(
        config, 1, mask, "self", softmax_scale=softmax_scale, pg_collection=groups, **options
    )


def check_packed(
    rank: int, causal: bool, heads: int, kv_heads: int, window: int | None = None
) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from mimo.ops.segments import PackedSegments

    attention = core_attention(causal, window)
    length = st.integers(1, 20)
    # Any lengths, many short ones, equal ones, and lengths around one half of the longest.
    lengths_of = st.one_of(
        st.lists(length, min_size=1, max_size=8),
        st.lists(st.integers(1, 3), min_size=1, max_size=40),
        st.tuples(length, st.integers(1, 6)).map(lambda pair: [pair[0]] * pair[1]),
        st.lists(st.integers(7, 16), min_size=2, max_size=8),
    )

    @settings(max_examples=60, deadline=None, database=None)
    @given(lengths_of)
    def check(lengths: list[int]) -> None:
        segments = PackedSegments.from_lengths(lengths, torch.device("cpu"))
        tensors = draw(sum(lengths), heads, kv_heads)
        got = value_and_gradients(
            lambda q, k, v: attention(q, k, v, None, packed_seq_params=segments), tensors
        )
        expected = value_and_gradients(
            lambda q, k, v: naive_attention(q, k, v, lengths, causal, HEAD_SIZE**-0.5, window),
            [t.double() for t in tensors],
        )
        assert got["output"].shape == (sum(lengths), heads, HEAD_SIZE)
        for name, tensor in got.items():
            torch.testing.assert_close(
                tensor.double(),
                expected[name],
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda text, name=name: f"{name}: {text}",
            )

    check()


def check_dense(
    rank: int, causal: bool, heads: int, kv_heads: int, window: int | None = None
) -> None:
    """(S, B, N, D) gives what B packed segments of S tokens give."""
    from mimo.ops.segments import PackedSegments

    attention = core_attention(causal, window)
    batch, length = 3, 11
    tensors = draw(batch * length, heads, kv_heads)

    def to_dense(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, length)).transpose(0, 1)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = attention(to_dense(q), to_dense(k), to_dense(v), None)
        assert output.shape == (length, batch, heads * HEAD_SIZE)
        return output.transpose(0, 1).flatten(0, 1).unflatten(-1, (heads, HEAD_SIZE))

    segments = PackedSegments.from_lengths([length] * batch, torch.device("cpu"))
    got = value_and_gradients(dense, tensors)
    expected = value_and_gradients(
        lambda q, k, v: attention(q, k, v, None, packed_seq_params=segments), tensors
    )
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def check_other_segments_are_unseen(rank: int, causal: bool) -> None:
    from mimo.ops.segments import PackedSegments

    attention = core_attention(causal)
    lengths = [5, 8, 5, 7]
    segments = PackedSegments.from_lengths(lengths, torch.device("cpu"))
    q, k, v, _ = draw(sum(lengths), 4, 2)
    clean = attention(q, k, v, None, packed_seq_params=segments).split(lengths)
    for chosen in range(len(lengths)):
        # Whatever leaked from another segment would not be a number.
        spoilt = [x.clone() for x in (q, k, v)]
        for x in spoilt:
            for n, part in enumerate(x.split(lengths)):
                if n != chosen:
                    part.fill_(torch.nan)
        output = attention(*spoilt, None, packed_seq_params=segments).split(lengths)
        torch.testing.assert_close(output[chosen], clean[chosen], rtol=0, atol=1e-6)


def check_softmax_scale(rank: int) -> None:
    from mimo.engines.megatron.attention import AttnMaskType
    from mimo.ops.segments import PackedSegments

    lengths = [4, 9]
    q, k, v, _ = draw(13, 2, 2)
    segments = PackedSegments.from_lengths(lengths, q.device)
    for mask, causal in ((AttnMaskType.no_mask, False), (AttnMaskType.causal, True)):
        attention = core_attention(causal, softmax_scale=0.7)
        got = attention(q, k, v, None, mask, packed_seq_params=segments)
        expected = naive_attention(q, k, v, lengths, causal, 0.7)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(AssertionError, match="keeps its mask type"):
        attention(q, k, v, None, AttnMaskType.no_mask, packed_seq_params=segments)


def check_refusals(rank: int) -> None:
    from mimo.ops.segments import PackedSegments

    attention = core_attention(causal=True)
    q, k, v, _ = draw(4, 2, 2)
    segments = PackedSegments.from_lengths([4], q.device)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="pack segments"):
        attention(q, k, v, mask, packed_seq_params=segments)
    with pytest.raises(ValueError, match="pack segments"):
        attention(q, k, v, None, attention_bias=mask.float(), packed_seq_params=segments)


def describe_segments(rank: int, lengths: list[int], real: list[int] | None = None) -> dict:
    from megatron.core.packed_seq_params import PackedSeqParams

    from mimo.ops.segments import PackedSegments

    segments = PackedSegments.from_lengths(lengths, torch.device("cpu"), real)
    for field in fields(PackedSeqParams):  # layers of Megatron read them by name
        assert hasattr(segments, field.name)
    assert segments.cu_seqlens_q is segments.cu_seqlens_kv
    assert segments.cu_seqlens_q_padded is segments.cu_seqlens_kv_padded
    assert segments.cu_seqlens_q.dtype == torch.int32
    assert all(type(n) is int for n in segments.lengths)
    assert segments.qkv_format == "thd"
    return {
        "bounds": segments.cu_seqlens_q.tolist(),
        "padded bounds": segments.cu_seqlens_q_padded.tolist(),
        "padding between": segments.pad_between_seqs,
        "longest": (segments.max_seqlen_q, segments.max_seqlen_kv),
        "lengths": segments.lengths,
    }


# ------------------------------------------------------------------------------- tests


MASKED = {
    f"{heads}-{kv_heads}-{'causal' if causal else 'full'}": (causal, heads, kv_heads)
    for heads, kv_heads in HEADS
    for causal in (True, False)
}


@pytest.mark.parametrize("case", quick_values(MASKED, "4-2-causal", "6-1-full"))
def test_values_and_gradients_equal_a_softmax_under_a_block_diagonal_mask(
    run_ranks: RunRanks, case: tuple[bool, int, int]
) -> None:
    run_ranks(check_packed, 1, *case)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_dense_batch_equals_packed_segments_of_one_length(
    run_ranks: RunRanks, causal: bool, heads: int, kv_heads: int
) -> None:
    run_ranks(check_dense, 1, causal, heads, kv_heads)


@pytest.mark.parametrize("window", quick_values({str(n): n for n in (1, 2, 5, 9, 100)}, "1", "5"))
def test_a_sliding_window_sees_so_many_keys_its_own_included(
    run_ranks: RunRanks, window: int
) -> None:
    run_ranks(check_packed, 1, True, 4, 2, window)


def test_a_dense_batch_has_sliding_windows_too(run_ranks: RunRanks) -> None:
    run_ranks(check_dense, 1, True, 4, 2, 4)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_segment_never_sees_another(run_ranks: RunRanks, causal: bool) -> None:
    run_ranks(check_other_segments_are_unseen, 1, causal)


def test_the_softmax_scale_is_used_and_a_layer_keeps_its_mask_type(run_ranks: RunRanks) -> None:
    run_ranks(check_softmax_scale, 1)


def test_dense_masks_and_biases_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(check_refusals, 1)


@pytest.mark.parametrize(
    ("lengths", "real", "expected"),
    [
        ([3, 0, 1, 4, 0], None, ([0, 3, 4, 8], [0, 3, 4, 8], False, (4, 4), (3, 1, 4))),
        ([4, 0, 8, 4], [3, 0, 8, 1], ([0, 3, 11, 12], [0, 4, 12, 16], True, (8, 8), (4, 8, 4))),
        ([], None, ([0], [0], False, (0, 0), ())),
    ],
    ids=["empty segments", "padding", "no tokens"],
)
def test_segment_metadata_counts_tokens_with_and_without_padding(
    run_ranks: RunRanks, lengths: list[int], real: list[int] | None, expected: tuple
) -> None:
    (described,) = run_ranks(describe_segments, 1, lengths, real)
    names = ("bounds", "padded bounds", "padding between", "longest", "lengths")
    assert described == dict(zip(names, expected, strict=True))
