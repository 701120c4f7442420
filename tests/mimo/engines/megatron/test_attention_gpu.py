"""Attention kernels of a GPU against SDPA: packed, context-parallel, sliding, with whole items.

They need a GPU and the packages of the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mimo.engines.megatron.test_attention import BF16_TOLERANCE, draw, value_and_gradients

# Multiples of 2·cp, for blocks such as each of two context-parallel ranks has.
GPU_LENGTHS = (300, 4, 76, 300, 128, 8)
GPU_HEADS, GPU_KV_HEADS, GPU_HEAD_SIZE = 8, 2, 64


KERNELS = [
    ("flash_attn_2", "flash_attn", ["flash_attn_varlen_func"]),
    ("flash_attn_3", "flash_attn_interface", ["flash_attn_varlen_func"]),
    ("torch_varlen", "torch.nn.attention.varlen", ["varlen_attn", "enable_gqa"]),
]
GPU_ITEMS = ((10, 64), (90, 100), (304, 40), (400, 256))  # inside of segments


def gpu_inputs(num_queries: int) -> list[Tensor]:
    """Queries, keys, values and the output's gradient in bf16."""
    from mimo.device import local_device

    drawn = draw(sum(GPU_LENGTHS), GPU_HEADS, GPU_KV_HEADS, GPU_HEAD_SIZE)
    tensors = [t.to(local_device(), torch.bfloat16) for t in drawn]
    for which in (0, 3):  # the queries of this rank, and their gradient
        tensors[which] = tensors[which][:num_queries]
    return tensors


def by_kernel(kernel: str, cp: tuple[int, int], causal: bool, window: int | None, items: Any):
    """The attention of one rank by this kernel, of q, k and v; k and v are not contiguous."""
    from mimo.device import local_device, send
    from mimo.ops.attention_plan import LayerForm
    from mimo.ops.segments import to_device

    form = LayerForm(kernel, causal, window, *cp)
    plan = to_device(form.plan(GPU_LENGTHS, items), lambda tensor: send(tensor, local_device()))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = torch.cat([k, v], 1).chunk(2, 1)  # as a layer cuts its linear's output
        return form.attend(q, k, v, plan, GPU_HEAD_SIZE**-0.5)

    return attend


def check_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        difference = (got[name].reshape(tensor.shape) - tensor).float().abs().max()
        error = float(difference / tensor.float().abs().max())
        assert error <= BF16_TOLERANCE, f"{name}: error {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("cp", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(
    ("causal", "window", "items"),
    [
        (True, None, ()),
        (False, None, ()),
        (True, 50, ()),
        (True, None, GPU_ITEMS),
        (True, 50, GPU_ITEMS),
    ],
    ids=["causal", "full", "window", "items", "items and window"],
)
@pytest.mark.parametrize(("kernel", "package", "function"), KERNELS)
def test_gpu_kernel_equals_sdpa_in_bf16(
    kernel: str,
    package: str,
    function: list[str],
    causal: bool,
    window: int | None,
    items: Any,
    cp: tuple[int, int],
) -> None:
    """Forward and backward."""
    from mimo.ops.acceleration import (
        AttentionCase,
        Machine,
        choose_kernel,
        has_function,
        this_machine,
    )

    if not has_function(package, *function):
        pytest.skip(f"{package} has no {function[0]} or is not installed")
    machine = Machine(this_machine().capability, frozenset({kernel}))
    case = AttentionCase(GPU_HEAD_SIZE, causal, cp[0], window, bool(items))
    choice = choose_kernel(case, torch.bfloat16, machine)
    if choice.kernel != kernel:
        pytest.skip(choice.reason)
    tensors = gpu_inputs(sum(GPU_LENGTHS) // cp[0])
    by_both = [
        value_and_gradients(by_kernel(name, cp, causal, window, items), tensors)
        for name in (kernel, "sdpa")
    ]
    check_equal(*by_both)


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
    from mimo.ops.segments import PackedSegments

    config = TransformerConfig(
        num_layers=1,
        cuda_graph_modules=[],
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
    tensors = gpu_inputs(sum(GPU_LENGTHS))
    got = value_and_gradients(
        lambda q, k, v: attention(q, k, v, None, mask, packed_seq_params=segments), tensors
    )
    check_equal(got, value_and_gradients(by_kernel("sdpa", (1, 0), causal, None, ()), tensors))


@pytest.mark.gpu
def test_layers_neither_wait_for_the_gpu_nor_copy_to_it() -> None:
    """Once plans are prepared; PyTorch itself raises at whatever makes the host wait."""
    from mimo.device import local_device
    from mimo.ops.acceleration import AttentionCase, choose_kernel, this_machine
    from mimo.ops.attention_plan import LayerForm
    from mimo.ops.segments import PackedSegments

    case = AttentionCase(GPU_HEAD_SIZE, causal=True, window=50, whole_items=True)
    kernel = choose_kernel(case, torch.bfloat16, this_machine()).kernel
    form = LayerForm(kernel, causal=True, window=50)
    q, k, v, _ = gpu_inputs(sum(GPU_LENGTHS))
    for x in (q, k, v):
        x.requires_grad_()

    def layer() -> None:
        segments = PackedSegments.from_lengths(GPU_LENGTHS, local_device(), items=GPU_ITEMS)
        form.attend(q, k, v, segments.plan(form), GPU_HEAD_SIZE**-0.5).sum().backward()

    layer()  # compiles and allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
