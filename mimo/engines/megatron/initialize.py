"""Weights as a pure function of (seed, parameter name).

Every rank draws the full tensor of a parameter from a generator seeded by the parameter's name
in the whole model and keeps its tensor-parallel slice. So one rank and any layout start from
the same weights, which the parity tests rely on.
"""

from __future__ import annotations

import hashlib
import re

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

_ZERO_CENTERED = "zero_centered_gamma"  # of norms, ours and Transformer Engine's
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def global_name(name: str, config, pp_rank: int, chunk: int | None) -> str:
    """A parameter's name in the whole model: its layer number counts from the first stage."""
    offset = get_transformer_layer_offset(config, chunk, pp_rank)
    return _LAYER.sub(lambda m: f"{m[1]}layers.{int(m[2]) + offset}.", name, count=1)


def tensor_parallel_slice(full: Tensor, rank: int, size: int, dim: int, stride: int) -> Tensor:
    """The part of ``full`` that tensor-parallel ``rank`` of ``size`` keeps.

    ``stride`` 2 means that two matrices (gate and up) are stacked along ``dim`` and each is
    split separately.
    """
    parts = [block.chunk(size, dim)[rank] for block in full.chunk(stride, dim)]
    return torch.cat(parts, dim)


@torch.no_grad()
def initialize_parameters(
    model: nn.Module,
    config,
    groups: ProcessGroupCollection,
    seed: int,
    std: float,
    chunk: int | None = None,
) -> None:
    """Draw weights N(0, std²), set biases to 0 and norms to a factor of 1, in place.

    The output projections of residual branches use std/sqrt(2·layers), as GPT-2 does. Adapters
    start without effect: `lora_b` is 0, `lora_a` uniform within ±1/sqrt(inputs), as in peft.
    """
    tp = groups.tp
    zero_centered = {
        id(module.weight) for module in model.modules() if getattr(module, _ZERO_CENTERED, False)
    }
    for name, param in model.named_parameters():
        if name.endswith((".bias", ".lora_b")):
            param.zero_()
            continue
        if param.dim() == 1:
            param.fill_(0.0 if id(param) in zero_centered else 1.0)
            continue
        whole = global_name(name, config, groups.pp.rank(), chunk)
        # A tied output head is the same matrix as the embedding of the first stage.
        whole = whole.replace("output_layer.weight", "embedding.word_embeddings.weight")
        digest = hashlib.sha256(f"{seed}:{whole}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        split = bool(getattr(param, "tensor_model_parallel", False)) and tp.size() > 1
        dim = int(getattr(param, "partition_dim", 0))
        shape = list(param.shape)
        if split:
            shape[dim] *= tp.size()
        full = torch.empty(shape)
        if name.endswith(".lora_a"):
            bound = shape[1] ** -0.5
            full.uniform_(-bound, bound, generator=generator)
        else:
            residual = name.endswith(("linear_proj.weight", "mlp.linear_fc2.weight"))
            full.normal_(generator=generator)
            full.mul_(std / (2 * config.num_layers) ** 0.5 if residual else std)
        if split:
            stride = int(getattr(param, "partition_stride", 1))
            full = tensor_parallel_slice(full, tp.rank(), tp.size(), dim, stride)
        param.copy_(full)
