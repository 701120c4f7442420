"""Attention kernels of a GPU against SDPA: packed, context-parallel, sliding, with whole items.

They need a GPU and the packages of the kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.mimo.engines.megatron.test_attention import BF16_TOLERANCE, draw, value_and_gradients

# Multiples of 2·cp, for blocks such as each of two context-parallel ranks has.
GPU_LENGTHS = (300, 4, 76, 300, 128, 8)
GPU_HEADS, GPU_KV_HEADS, GPU_HEAD_SIZE = 8, 2, 64


def check_on_gpu(attend, blocks) -> None:
    """``attend(q, k, v)`` of these blocks in bf16 against SDPA in bf16: values and gradients."""
    from mimo.device import local_device
    from mimo.engines.megatron.layers.attention_kernels import sdpa

    drawn = draw(sum(GPU_LENGTHS), GPU_HEADS, GPU_KV_HEADS, GPU_HEAD_SIZE)
    tensors = [t.to(local_device(), torch.bfloat16) for t in drawn]
    for which in (0, 3):  # the queries of this rank, and their gradient
        tensors[which] = tensors[which][: sum(blocks.queries)]
    scale = GPU_HEAD_SIZE**-0.5
    expected = value_and_gradients(lambda q, k, v: sdpa(q, k, v, blocks, scale), tensors)
    got = value_and_gradients(attend, tensors)
    for name, tensor in expected.items():
        difference = (got[name].reshape(tensor.shape) - tensor).float().abs().max()
        error = float(difference / tensor.float().abs().max())
        assert error <= BF16_TOLERANCE, f"{name}: error {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 50)])
@pytest.mark.parametrize(
    ("kernel", "package"),
    [("flash_attn", "flash_attn"), ("torch_varlen", "torch.nn.attention.varlen")],
)
def test_gpu_kernel_equals_sdpa_in_bf16(
    kernel: str, package: str, causal: bool, window: int | None, cp_size: int, cp_rank: int
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    from mimo.engines.megatron.layers.attention_kernels import KERNELS
    from mimo.engines.megatron.segments import attention_blocks

    blocks = attention_blocks(GPU_LENGTHS, causal, window, cp_size, cp_rank)
    scale = GPU_HEAD_SIZE**-0.5
    check_on_gpu(lambda q, k, v: KERNELS[kernel](q, k, v, blocks, scale), blocks)


@pytest.mark.gpu
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("kernel", "package"),
    [("flash_attn", "flash_attn"), ("torch_varlen", "torch.nn.attention.varlen")],
)
def test_gpu_kernel_beside_bidirectional_items_equals_sdpa_in_bf16(
    kernel: str, package: str, window: int | None, cp_size: int, cp_rank: int
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    from mimo.device import local_device
    from mimo.engines.megatron.layers.attention_kernels import KERNELS
    from mimo.engines.megatron.layers.item_attention import attend_with_items, item_blocks

    items = ((10, 64), (90, 100), (304, 40), (400, 256))  # inside of segments
    parts = item_blocks(GPU_LENGTHS, items, window, cp_size, cp_rank, local_device())
    drawn = draw(sum(GPU_LENGTHS), GPU_HEADS, GPU_KV_HEADS, GPU_HEAD_SIZE)
    tensors = [t.to(local_device(), torch.bfloat16) for t in drawn]
    for which in (0, 3):
        tensors[which] = tensors[which][: sum(GPU_LENGTHS) // cp_size]

    def found(name: str) -> dict[str, Tensor]:
        return value_and_gradients(
            lambda q, k, v: attend_with_items(KERNELS[name], q, k, v, parts, GPU_HEAD_SIZE**-0.5),
            tensors,
        )

    got, expected = found(kernel), found("sdpa")
    for name, tensor in expected.items():
        error = float((got[name] - tensor).float().abs().max() / tensor.float().abs().max())
        assert error <= BF16_TOLERANCE, f"{name}: error {error:.2e}"


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

    from mimo.device import local_device
    from mimo.engines.megatron.segments import PackedSegments, attention_blocks

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
    segments = PackedSegments.from_lengths(GPU_LENGTHS, local_device())
    check_on_gpu(
        lambda q, k, v: attention(q, k, v, None, mask, packed_seq_params=segments),
        attention_blocks(GPU_LENGTHS, causal, None, 1, 0),
    )
