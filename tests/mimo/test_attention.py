"""Core attention over packed segments equals a softmax under a block-diagonal mask.

On a CPU the checks run inside a rank, where the engine is imported already.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import RunRanks
from tests.lone_module import noise

# fp32 against fp64: absolute, and relative to the expected number.
TOLERANCE = 1e-5
# A GPU kernel against SDPA, both in bf16: of the largest expected number. One rounding to bf16 is
# 4e-3 of a number; probabilities, outputs and their gradients are rounded once each.
BF16_TOLERANCE = 2e-2

HEADS = [(4, 4), (4, 2), (6, 1)]  # query heads, key/value heads
HEAD_SIZE = 8


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool, scale: float
) -> Tensor:
    """All T × T scores, those of other segments masked. q (T, N, D), k and v (T, G, D)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    if causal:
        seen = seen.tril()
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
    found = torch.autograd.grad(output, inputs, tensors[3].reshape(output.shape))
    return dict(zip(("output", "dq", "dk", "dv"), (output.detach(), *found), strict=True))


# ------------------------------------------------------- functions that run inside ranks


def core_attention(causal: bool, head_size: int = HEAD_SIZE) -> nn.Module:
    from types import SimpleNamespace

    from mimo.megatron.attention import AttnMaskType, CoreAttention

    config = SimpleNamespace(
        context_parallel_size=1, kv_channels=head_size, params_dtype=torch.float32
    )
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    return CoreAttention(config, 1, mask, "self")


def check_packed(rank: int, causal: bool, heads: int, kv_heads: int) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from mimo.megatron.attention import PackedSegments

    attention = core_attention(causal)
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
            lambda q, k, v: naive_attention(q, k, v, lengths, causal, HEAD_SIZE**-0.5),
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


def check_dense(rank: int, causal: bool, heads: int, kv_heads: int) -> None:
    """(S, B, N, D) gives what B packed segments of S tokens give."""
    from mimo.megatron.attention import PackedSegments

    attention = core_attention(causal)
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
    from mimo.megatron.attention import PackedSegments

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
    from types import SimpleNamespace

    from mimo.megatron.attention import AttnMaskType, CoreAttention, PackedSegments

    config = SimpleNamespace(context_parallel_size=1, kv_channels=8, params_dtype=torch.float32)
    attention = CoreAttention(config, 1, AttnMaskType.no_mask, "self", softmax_scale=0.7)
    lengths = [4, 9]
    q, k, v, _ = draw(13, 2, 2)
    segments = PackedSegments.from_lengths(lengths, q.device)
    for mask, causal in ((None, False), (AttnMaskType.causal, True)):
        # A mask type given with the call goes before that of the layer.
        got = attention(q, k, v, None, mask, packed_seq_params=segments)
        expected = naive_attention(q, k, v, lengths, causal, 0.7)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def check_refusals(rank: int) -> None:
    from mimo.megatron.attention import PackedSegments

    attention = core_attention(causal=True)
    q, k, v, _ = draw(4, 2, 2)
    segments = PackedSegments.from_lengths([4], q.device)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="pack segments"):
        attention(q, k, v, mask, packed_seq_params=segments)
    with pytest.raises(ValueError, match="pack segments"):
        attention(q, k, v, None, attention_bias=mask.float(), packed_seq_params=segments)


def describe_segments(rank: int, lengths: list[int]) -> dict:
    from mimo.megatron.attention import PackedSegments

    made = PackedSegments.from_lengths(lengths, torch.device("cpu"))
    assert made.cu_seqlens_q is made.cu_seqlens_kv
    assert made.cu_seqlens_q.dtype == torch.int32
    assert all(type(n) is int for n in made.lengths)
    return {
        "format": made.qkv_format,
        "bounds": made.cu_seqlens_q.tolist(),
        "longest": (made.max_seqlen_q, made.max_seqlen_kv),
        "lengths": made.lengths,
    }


def chosen_kernels(rank: int) -> tuple[set[str], str]:
    from mimo.megatron.attention import KERNELS, choose_kernel

    names = {choose_kernel(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    attention = core_attention(causal=True)
    return names, next(name for name, kernel in KERNELS.items() if attention.kernel is kernel)


# ------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_values_and_gradients_equal_a_softmax_under_a_block_diagonal_mask(
    run_ranks: RunRanks, causal: bool, heads: int, kv_heads: int
) -> None:
    run_ranks(check_packed, 1, causal, heads, kv_heads)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_dense_batch_equals_packed_segments_of_one_length(
    run_ranks: RunRanks, causal: bool, heads: int, kv_heads: int
) -> None:
    run_ranks(check_dense, 1, causal, heads, kv_heads)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_segment_never_sees_another(run_ranks: RunRanks, causal: bool) -> None:
    run_ranks(check_other_segments_are_unseen, 1, causal)


def test_softmax_scale_and_mask_type_of_the_caller_are_used(run_ranks: RunRanks) -> None:
    run_ranks(check_softmax_scale, 1)


def test_dense_masks_and_biases_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(check_refusals, 1)


def test_segment_metadata_counts_tokens_and_drops_empty_segments(run_ranks: RunRanks) -> None:
    (made,) = run_ranks(describe_segments, 1, [3, 0, 1, 4, 0])
    assert made == {
        "format": "thd",
        "bounds": [0, 3, 4, 8],
        "longest": (4, 4),
        "lengths": (3, 1, 4),
    }


def test_segment_metadata_of_no_tokens_is_empty(run_ranks: RunRanks) -> None:
    (made,) = run_ranks(describe_segments, 1, [])
    assert made == {"format": "thd", "bounds": [0], "longest": (0, 0), "lengths": ()}


def test_without_a_gpu_every_dtype_uses_sdpa(run_ranks: RunRanks) -> None:
    ((names, used),) = run_ranks(chosen_kernels, 1)
    assert names == {"sdpa"}
    assert used == "sdpa"


# ------------------------------------------------------------------------- GPU kernels

GPU_LENGTHS = [300, 1, 77, 300, 128, 5]
GPU_HEADS, GPU_KV_HEADS, GPU_HEAD_SIZE = 8, 2, 64


def check_on_gpu(attend, causal: bool) -> None:
    """``attend(q, k, v, segments)`` in bf16 against SDPA in bf16: values and gradients."""
    from mimo.device import local_device
    from mimo.megatron.attention import KERNELS, PackedSegments

    device = local_device()
    segments = PackedSegments.from_lengths(GPU_LENGTHS, device)
    drawn = draw(sum(GPU_LENGTHS), GPU_HEADS, GPU_KV_HEADS, GPU_HEAD_SIZE)
    tensors = [t.to(device, torch.bfloat16) for t in drawn]
    scale = GPU_HEAD_SIZE**-0.5
    expected = value_and_gradients(
        lambda q, k, v: KERNELS["sdpa"](q, k, v, segments, causal, scale), tensors
    )
    got = value_and_gradients(lambda q, k, v: attend(q, k, v, segments), tensors)
    for name, tensor in expected.items():
        difference = (got[name].reshape(tensor.shape) - tensor).float().abs().max()
        error = float(difference / tensor.float().abs().max())
        assert error <= BF16_TOLERANCE, f"{name}: error {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("kernel", "package"),
    [("flash_attn", "flash_attn"), ("torch_varlen", "torch.nn.attention.varlen")],
)
def test_gpu_kernel_equals_sdpa_in_bf16(kernel: str, package: str, causal: bool) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    from mimo.megatron.attention import KERNELS

    scale = GPU_HEAD_SIZE**-0.5
    check_on_gpu(
        lambda q, k, v, segments: KERNELS[kernel](q, k, v, segments, causal, scale), causal
    )


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_transformer_engine_equals_sdpa_in_bf16(causal: bool) -> None:
    pytest.importorskip(
        "transformer_engine.pytorch",
        reason="Transformer Engine is not installed",
        exc_type=ImportError,
    )
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=GPU_HEADS * GPU_HEAD_SIZE,
        num_attention_heads=GPU_HEADS,
        num_query_groups=GPU_KV_HEADS,
        kv_channels=GPU_HEAD_SIZE,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention = TEDotProductAttention(config, 1, mask, "self")
    check_on_gpu(
        lambda q, k, v, segments: attention(q, k, v, None, mask, packed_seq_params=segments),
        causal,
    )
