"""Megatron's `GPTModel` adapted: packed sequences, our layers, the family's rotary class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mimo.engines.megatron.config import ModuleContext
from mimo.engines.megatron.head import Head, output
from mimo.engines.megatron.lora import let_backward_into_layers
from mimo.engines.megatron.stack import layers_here, stack_spec


class LanguageModel(GPTModel):
    """`GPTModel` with our loss.

    Under context parallelism token ids, positions, labels and embeddings are this rank's share.
    """

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_at: Tensor | None = None,
        logits_at: Tensor | None = None,
        place: Callable[[Tensor], Tensor] | None = None,
        levels: tuple[Tensor, Tensor] | None = None,
        **given: Any,
    ) -> Tensor:
        """As `GPTModel`, but see `mimo.engines.contract.Chunk` for what it takes and gives.

        Without ``loss_at``, labels are (B, S) -> losses (B, S). Without labels it gives logits
        (B, S, V/tp) or, of one sequence at the positions ``logits_at`` (n,), (1, n, V/tp).
        Raises ValueError for a dense mask under context parallelism.
        """
        if attention_mask is not None and self.cp_group.size() > 1:
            raise ValueError(
                f"a dense attention mask under context parallelism (language.grid.cp = "
                f"{self.cp_group.size()}): ranks hold chunks of the sequence, which it does not "
                f"describe; pack segments instead, or set cp to 1"
            )
        if place is not None and self.pre_process:
            text = self.embedding(input_ids=input_ids, position_ids=position_ids)
            given["decoder_input"] = place(text)
        if levels is not None:
            given["extra_block_kwargs"] = {"context": levels[0], "context_mask": levels[1]}
        if labels is not None or logits_at is not None:
            at = logits_at if labels is None else loss_at
            given["output_processor"] = partial(output, labels, at)
        return super().forward(input_ids, position_ids, attention_mask, **given)  # type: ignore[arg-type]


def build_gpt(
    config: TransformerConfig,
    ctx: ModuleContext,
    layer: ModuleSpec,
    rotary: nn.Module,
    num_tokens: int,
    embedding_scale: float | None = None,
    **options: Any,
) -> LanguageModel:
    """This rank's part of a causal language model.

    num_tokens: of the tokenizer. embedding_scale: factor on token embeddings, but not on rows of
    encoders; None for 1. options: of `GPTModel`.

    Under sequence parallelism the embedding scatters its output (a reduce-scatter inside the
    vocabulary-parallel lookup) unless ``ctx.scatter_embedding`` is off; then `GPTModel` scatters
    afterwards. Either way a forward from `input_ids` alone keeps its length.
    """
    # Megatron's mrope branch passes 3-D positions through; the class itself is replaced below.
    if config.mrope_section is None:
        config.mrope_section = [config.kv_channels // 2, 0, 0]  # type: ignore[operator]
    model = LanguageModel(
        config,
        stack_spec(config, [layer] * len(layers_here(config, ctx.groups, ctx.chunk))),  # type: ignore[arg-type]
        pre_process=ctx.is_first_stage,
        post_process=ctx.is_last_stage,
        parallel_output=True,
        scatter_embedding_sequence_parallel=ctx.scatter_embedding,
        position_embedding_type="mrope",
        pg_collection=ctx.groups,
        vp_stage=ctx.chunk,
        **options,
    )
    cast("Any", model).rotary_pos_emb = rotary
    if ctx.is_last_stage:
        Head.adopt(model.output_layer, num_tokens)
    if ctx.lora is not None:
        let_backward_into_layers(model.decoder)
    if embedding_scale is not None and ctx.is_first_stage:
        # As transformers does: rounded to fp32, then to the dtype of what it multiplies.
        scale = torch.tensor(embedding_scale, dtype=torch.float32).to(ctx.dtype).item()
        model.embedding.register_forward_hook(partial(_scale_output, scale))
    return model


def _scale_output(scale: float, module: nn.Module, args: object, output: Tensor) -> Tensor:
    """A hook, because both Megatron and the model around it call the embedding, and Megatron has
    no place for a class of ours.
    """
    return output * scale
