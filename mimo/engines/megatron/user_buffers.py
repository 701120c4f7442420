"""Messages of tensor-parallel linears beside their matrix products, by Transformer Engine.

Its user buffers have one size, so every sequence must have the same number of tokens. It makes them
for groups of neighbouring ranks that tile the world. Source: Transformer Engine's `initialize_ub`,
and how Megatron-LM calls it.
"""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist


def make_user_buffers(tokens: int, hidden_size: int, tp: int, dtype: torch.dtype) -> None:
    """Make the buffers of this process, in place of former ones; every rank of the world calls it.

    tokens: of a whole sequence, over all ``tp`` ranks of a group.
    """
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    base.destroy_ub()
    base.initialize_ub(
        shape=[tokens, hidden_size],
        tp_size=tp,
        quantization_modes=[base.UserBufferQuantizationMode.NONE],
        dtype=dtype,
        bootstrap_backend=dist.get_backend(),
    )
