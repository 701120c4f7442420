"""What the modules of a rank compute, recorded by hooks call by call.

Letters: T packed tokens of a lane, P patches, B sequences (1, packed) of S local tokens, H hidden,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mimo.engines.megatron.module import MegatronModule as Module
from mimo.parity.results import LOGITS, PIXELS, POSITIONS, TOKENS

ROWS = "rows"
"""A tower's whole output: rows of the embeddings and of all levels side by side."""


@dataclass
class Recording:
    """The calls of one model chunk, in the order of the microbatches.

    states: by point, (n, k) of each call. lengths: of the language model's segments.
    """

    states: dict[str, list[Tensor]] = field(default_factory=dict)
    lengths: list[tuple[int, ...]] = field(default_factory=list)

    def keep(self, point: str, values: Tensor) -> None:
        """Copy what a call computed, because the schedules free it once it is sent."""
        self.states.setdefault(point, []).append(values.detach().clone())


def record_language(module: Module) -> list[Recording]:
    """Watch all chunks of the language model; the recordings fill as the next steps compute."""
    found = []
    for chunk in module.raw:
        gpt, own = cast("Any", chunk), Recording()
        gpt.register_forward_pre_hook(partial(_keep_inputs, own), with_kwargs=True)
        if gpt.pre_process:
            watch = partial(_keep_embedding, own, "language.embedding")
            gpt.decoder.register_forward_pre_hook(watch, with_kwargs=True)
        for layer in gpt.decoder.layers:
            point = f"language.layers.{layer.layer_number - 1}"
            layer.register_forward_hook(partial(_keep_hidden, own, point))
        if gpt.post_process:
            gpt.decoder.final_layernorm.register_forward_hook(
                partial(_keep_hidden, own, "language.norm")
            )
            gpt.output_layer.register_forward_pre_hook(partial(_keep_logits, own))
        found.append(own)
    return found


def record_tower(module: Module) -> Recording:
    """Watch an encoder; the recording fills as the next steps compute."""
    tower, own = cast("Any", module.raw[0]), Recording()
    stage, stages = module.groups.pp.rank(), module.groups.pp.size()
    if stage == 0:
        tower.register_forward_pre_hook(lambda _, args: own.keep(PIXELS, tower.values(args[0])))
        tower.blocks.register_forward_pre_hook(
            partial(_keep_embedding, own, "vision.embedding"), with_kwargs=True
        )
    for layer in tower.blocks.layers:
        point = f"vision.blocks.{layer.layer_number - 1}"
        layer.register_forward_hook(partial(_keep_hidden, own, point))
    if stage == stages - 1:
        tower.register_forward_hook(lambda _, __, output: own.keep(ROWS, output.values))
    return own


def _keep_inputs(own: Recording, gpt: nn.Module, args: object, given: dict[str, Any]) -> None:
    """Keep input_ids (1, S) and position_ids (3, 1, S)."""
    own.lengths.append(given["packed_seq_params"].lengths)
    own.keep(TOKENS, given["input_ids"].T)
    own.keep(POSITIONS, given["position_ids"][:, 0].T)


def _keep_embedding(
    own: Recording, point: str, blocks: nn.Module, args: object, given: dict[str, Any]
) -> None:
    """Keep hidden_states (S, 1, H)."""
    own.keep(point, given["hidden_states"][:, 0])


def _keep_hidden(own: Recording, point: str, layer: nn.Module, args: object, output: Any) -> None:
    """Keep output (S, 1, H), which comes alone or as the first of several."""
    hidden = output if isinstance(output, torch.Tensor) else output[0]
    own.keep(point, hidden[:, 0])


def _keep_logits(own: Recording, head: nn.Module, args: tuple[Tensor, Tensor | None]) -> None:
    """Keep the logits (S, 1, V/tp) of all tokens, which a step does not compute.

    args: hidden states and the head's weight if it is tied. Every rank of the tensor-parallel
    group calls it.
    """
    with torch.no_grad():
        own.keep(LOGITS, head.forward(*args)[0][:, 0])
