"""Hooks on our modules that keep what every part of them computes, call by call, in either engine.

Both engines reach the same points. Megatron's tensors are sequence first (S, 1, H); those of
transformers' modules batch first (1, S, H), or flat in a tower.

Letters: n rows of a tensor on this rank, k columns, P patches, S local tokens, H hidden, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from mimo.check.parity.compare import LOGITS, PIXELS, POSITIONS, TOKENS
from mimo.check.parity.theirs import watch_blocks, watch_text
from mimo.engines.contract import Module
from mimo.engines.fsdp.language import LanguageModel
from mimo.engines.fsdp.towers import Tower
from mimo.engines.megatron.module import MegatronModule

ROWS = "rows"
"""A tower's whole output: embeddings and all levels side by side."""


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

    def keep_inputs(self, given: dict[str, Any]) -> None:
        """Keep input_ids (1, S) and position_ids (3, 1, S) of a call of a language model."""
        self.lengths.append(given["packed_seq_params"].lengths)
        self.keep(TOKENS, given["input_ids"].T)
        self.keep(POSITIONS, given["position_ids"][:, 0].T)

    def keep_output(self, point: str, layer: nn.Module) -> None:
        """Keep a layer's output (S, 1, H), which comes alone or as the first of several."""
        layer.register_forward_hook(
            lambda _, __, output: self.keep(
                point, (output if isinstance(output, Tensor) else output[0])[:, 0]
            )
        )


def record_language(module: Module) -> list[Recording]:
    """Watch all chunks of a language model; the recordings fill as the next steps compute."""
    if isinstance(module, MegatronModule):
        return [_record_chunk(cast("Any", chunk)) for chunk in module.raw]
    return [_record_text(cast("LanguageModel", module.whole))]


def record_tower(module: Module) -> Recording:
    """Watch an encoder; the recording fills as the next steps compute."""
    if isinstance(module, MegatronModule):
        return _record_stage(module)
    return _record_transformers_tower(cast("Tower", module.whole))


# -------------------------------------------------------------------------- megatron


def _record_chunk(gpt: Any) -> Recording:
    own = Recording()
    gpt.register_forward_pre_hook(lambda _, __, given: own.keep_inputs(given), with_kwargs=True)
    if gpt.pre_process:
        _keep_first_input(own, "language.embedding", gpt.decoder)
    for layer in gpt.decoder.layers:
        own.keep_output(f"language.layers.{layer.layer_number - 1}", layer)
    if gpt.post_process:
        own.keep_output("language.norm", gpt.decoder.final_layernorm)

        def keep_logits(head: nn.Module, args: tuple[Tensor, Tensor | None]) -> None:
            """Keep logits (S, 1, V/tp) of all tokens, which a step does not compute.

            args: hidden states and the head's weight if it is tied. A collective of tp.
            """
            with torch.no_grad():
                own.keep(LOGITS, head.forward(*args)[0][:, 0])

        gpt.output_layer.register_forward_pre_hook(keep_logits)
    return own


def _record_stage(module: MegatronModule) -> Recording:
    tower, own = cast("Any", module.raw[0]), Recording()
    stage, stages = module.groups.pp.rank(), module.groups.pp.size()
    if stage == 0:
        tower.register_forward_pre_hook(lambda _, args: own.keep(PIXELS, tower.values(args[0])))
        _keep_first_input(own, "vision.embedding", tower.blocks)
    for layer in tower.blocks.layers:
        own.keep_output(f"vision.blocks.{layer.layer_number - 1}", layer)
    if stage == stages - 1:
        tower.register_forward_hook(lambda _, __, output: own.keep(ROWS, output.values))
    return own


def _keep_first_input(own: Recording, point: str, blocks: nn.Module) -> None:
    """Keep hidden_states (S, 1, H) that a stack of layers gets."""
    blocks.register_forward_pre_hook(
        lambda _, __, given: own.keep(point, given["hidden_states"][:, 0]), with_kwargs=True
    )


# ------------------------------------------------------------------------------ fsdp


def _record_text(model: LanguageModel) -> Recording:
    own = Recording()
    model.register_forward_pre_hook(lambda _, args: own.keep_inputs(args[0].kwargs))
    watch_text(model.text, own.keep)

    def keep_logits(norm: nn.Module, args: object, hidden: Tensor) -> None:
        """Keep the logits of this rank, V/tp, from hidden (1, S, H): a collective of tp."""
        with torch.no_grad():
            logits, tp = model.logits(hidden)[0], model.ctx.tp
        own.keep(LOGITS, logits if tp is None else logits.chunk(tp.size(), 1)[tp.get_local_rank()])

    model.text.norm.register_forward_hook(keep_logits)
    return own


def _record_transformers_tower(tower: Tower) -> Recording:
    own = Recording()
    tower.register_forward_pre_hook(lambda _, args: own.keep(PIXELS, tower.values(args[0].args[0])))
    watch_blocks(tower.units, tower.config, own.keep)
    tower.register_forward_hook(lambda *given: own.keep(ROWS, given[-1].values))
    return own
