"""Weights as a pure function of (seed, parameter name, position in the whole matrix).

A whole matrix is tiled by blocks of `BLOCK` × `BLOCK` elements. The numbers of a block come from a
counter-based generator (Philox, Salmon et al. 2011) whose key is a hash of seed and name and whose
counter begins with the block's number. So a rank draws only the blocks that overlap its part, and
one rank and any layout start from the same weights, which the parity tests rely on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from mimo.engines.megatron.cut import Cut, as_matrix

BLOCK = 256
"""Rows and columns of a block. Another number gives other weights for the same seed."""

_ZERO_CENTERED = "zero_centered_gamma"  # of norms, ours and Transformer Engine's
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
    zero_centered = {
        id(module.weight) for module in model.modules() if getattr(module, _ZERO_CENTERED, False)
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
                numbers = _uniform(cut.whole_columns**-0.5)
            else:
                residual = name.endswith(("linear_proj.weight", "mlp.linear_fc2.weight"))
                numbers = _normal(std / (2 * config.num_layers) ** 0.5 if residual else std)
            _draw(as_matrix(param.data), cut, f"{seed}:{whole}", numbers)


_Numbers = Callable[[np.random.Generator, np.ndarray], None]
"""Fills an array (rows, columns) of float32."""


def _normal(std: float) -> _Numbers:
    def fill(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.standard_normal(out=out, dtype=np.float32)
        out *= np.float32(std)

    return fill


def _uniform(bound: float) -> _Numbers:
    def fill(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.random(out=out, dtype=np.float32)
        out *= np.float32(2 * bound)
        out -= np.float32(bound)

    return fill


def _draw(part: Tensor, cut: Cut, name: str, numbers: _Numbers) -> None:
    """Fill a rank's part (R', C') of a matrix, block by block of the whole."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")
    rows, columns = cut.whole_rows, cut.whole_columns
    per_row = -(-columns // BLOCK)
    memory = np.empty(BLOCK * BLOCK, np.float32)
    for own in cut.rectangles():
        for top in range(own.row // BLOCK * BLOCK, own.row + own.rows, BLOCK):
            for left in range(own.column // BLOCK * BLOCK, own.column + own.columns, BLOCK):
                height, width = min(BLOCK, rows - top), min(BLOCK, columns - left)
                block = memory[: height * width].reshape(height, width)
                number = top // BLOCK * per_row + left // BLOCK
                # The generator counts in the first of four words.
                philox = np.random.Philox(key=key, counter=[0, number, 0, 0])
                numbers(np.random.Generator(philox), block)
                first, last = max(top, own.row), min(top + height, own.row + own.rows)
                start, end = max(left, own.column), min(left + width, own.column + own.columns)
                target = own.of(part)[
                    first - own.row : last - own.row, start - own.column : end - own.column
                ]
                target.copy_(
                    torch.from_numpy(block[first - top : last - top, start - left : end - left])
                )
