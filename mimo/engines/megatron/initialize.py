"""Weights as a pure function of (seed, parameter name, position in the whole matrix).

One rank and any layout start from the same weights, which the parity tests rely on.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from mimo.engines.draw import adapter_numbers, draw, normal
from mimo.engines.megatron.cut import Cut

_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def global_name(name: str, config, pp_rank: int, chunk: int | None) -> str:
    """A parameter's name in the whole model: its layer number counts from the first stage."""
    offset = get_transformer_layer_offset(config, chunk, pp_rank)
    return _LAYER.sub(lambda m: f"{m[1]}layers.{int(m[2]) + offset}.", name, count=1)


def stored_name(whole: str, model: nn.Module) -> str:
    """The name under which a parameter of this global name is drawn, saved and loaded.

    A tied output head is the embedding of the first stage: the last stage has a copy.
    """
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    return _EMBEDDING if whole == _OUTPUT and tied else whole


@torch.no_grad()
def initialize_parameters(
    model: nn.Module,
    config,
    groups: ProcessGroupCollection,
    seed: int,
    std: float,
    chunk: int | None = None,
    provided: Collection[str] = (),
) -> None:
    """Draw weights N(0, std²), set biases to 0 and norms to a factor of 1, in place.

    The output projections of residual branches use std/sqrt(2·layers), as GPT-2 does. Adapters
    start without effect: `lora_b` is 0, `lora_a` uniform within ±1/sqrt(inputs), as in peft.

    provided: names, as in the whole model, of parameters that a checkpoint is about to fill. They
    are not drawn but set to NaN, so that one which is left out after all does not go unnoticed.
    """
    zero_centered = {  # of norms, ours and Transformer Engine's
        id(m.weight) for m in model.modules() if getattr(m, "zero_centered_gamma", False)
    }
    for name, param in model.named_parameters():
        whole = stored_name(global_name(name, config, groups.pp.rank(), chunk), model)
        if whole in provided:
            param.fill_(torch.nan)
        elif name.endswith((".bias", ".lora_b")):
            param.zero_()
        elif param.dim() == 1:
            param.fill_(0.0 if id(param) in zero_centered else 1.0)
        else:
            cut = Cut.of(param, groups.tp)
            if name.endswith(".lora_a"):
                numbers = adapter_numbers(cut.whole_columns)
            else:
                residual = name.endswith(("linear_proj.weight", "mlp.linear_fc2.weight"))
                numbers = normal(std / (2 * config.num_layers) ** 0.5 if residual else std)
            shape = cut.whole_rows, cut.whole_columns
            for row, column, values in cut.rectangles(param.data.view(-1)):
                draw(values, row, column, shape, f"{seed}:{whole}", numbers)
