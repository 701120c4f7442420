"""Megatron's `GPTModel` adapted: packed sequences, a head that computes losses, layers of Gemma-3.

Letters: S sequence of this rank (all its packed tokens, or one of B samples), B batch (1 when
packed), H hidden, D head size, V vocabulary, n chosen tokens, t ranks of the tensor-parallel group.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mimo.engines.megatron.attention import CoreAttention, window_of
from mimo.engines.megatron.config import LoRA, ModuleContext
from mimo.engines.megatron.lora import let_backward_into_layers
from mimo.engines.megatron.stack import DeepStackLayer, layer_spec, norm_of, stack_spec
from mimo.ops.cross_entropy import append_scalar, linear_cross_entropy


class LanguageModel(GPTModel):
    """`GPTModel` with our loss.

    Under context parallelism token ids, positions, labels and embeddings are this rank's share.
    queries: on the first stage, the query parameters (K, H) by generator.
    """

    queries: nn.ParameterDict

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        loss_at: Tensor | None = None,
        logits_at: Tensor | None = None,
        place: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None,
        levels: tuple[Tensor, Tensor] | None = None,
        emit: Callable[[Tensor], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """Run the chunk: arguments and losses are those of `mimo.engines.contract.Chunk`.

        Without ``loss_at``, labels are (B, S) -> losses (B, S). Without labels it returns logits
        (B, S, V/tp) or, for one sequence at the positions ``logits_at`` (n,), (1, n, V/tp).
        options: other arguments of `GPTModel.forward`, except a mask: segments are packed instead.
        """
        if place is not None and self.pre_process:
            text = self.embedding(input_ids=input_ids, position_ids=position_ids)
            options["decoder_input"] = place(text, dict(self.queries.items()))
        if levels is not None:
            options["extra_block_kwargs"] = {"context": levels[0], "context_mask": levels[1]}
        if labels is not None or logits_at is not None:
            at = logits_at if labels is None else loss_at
            options["output_processor"] = partial(_output, labels, at, emit)
        return super().forward(input_ids, position_ids, None, **options)  # type: ignore[arg-type]


def build_gpt(
    config: TransformerConfig,
    ctx: ModuleContext,
    layers: Sequence[ModuleSpec],
    rotary: nn.Module,
    num_tokens: int,
    embedding_scale: float | None = None,
    **options: Any,
) -> LanguageModel:
    """Build this rank's part of a causal language model.

    layers: of this chunk. num_tokens: size of the tokenizer's vocabulary. embedding_scale: factor
    on token embeddings, but not on encoders' embeddings; None for 1. options: other arguments of
    `GPTModel`.
    """
    # Megatron's mrope branch passes 3-D positions through; the class itself is replaced below.
    if config.mrope_section is None:
        config.mrope_section = [config.kv_channels // 2, 0, 0]  # type: ignore[operator]
    model = LanguageModel(
        config,
        stack_spec(config, layers),  # type: ignore[arg-type]
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
    model.queries = nn.ParameterDict()
    if ctx.is_last_stage:
        Head.convert(model.output_layer, num_tokens)
    if ctx.lora is not None:
        let_backward_into_layers(model.decoder)
    if embedding_scale is not None and ctx.is_first_stage:
        # As in transformers: rounded to fp32, then to the dtype of the embeddings.
        scale = torch.tensor(embedding_scale, dtype=torch.float32).to(ctx.dtype).item()

        # A hook on the output, because Megatron hard-codes the class.
        def scale_output(module: nn.Module, args: object, output: Tensor) -> Tensor:
            return output * scale

        model.embedding.register_forward_hook(scale_output)
    return model


class Head(ColumnParallelLinear):
    """Megatron's output layer that can compute the losses of chosen tokens without their logits.

    num_tokens: size of the tokenizer's vocabulary; later rows of the weight only pad it.
    """

    num_tokens: int

    @classmethod
    def convert(cls, layer: Any, num_tokens: int) -> None:
        """Turn the output layer that `GPTModel` built into a head; it hard-codes the class."""
        assert type(layer) is ColumnParallelLinear, f"an output layer of {type(layer)}"
        head = cast("Any", layer)
        head.__class__, head.num_tokens = cls, num_tokens

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """input_ (S, B, H), or (S/t, B, H) under SP -> logits (S, B, V/t) without ``labels``.

        With labels (n,) int64 and ``at`` (n,) int64, where s·B + b is token s of sequence b:
        losses (n,), at least fp32; without ``at`` those of all tokens in this order. Every rank of
        the tensor-parallel group calls it with equal labels and places. Under SP all hidden states
        are gathered and their gradients reduce-scattered; else the n tokens' gradients are summed.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        assert weight is not None, "a tied head is called with the embedding's weight"
        hidden = input_
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        hidden = hidden.flatten(0, 1)
        if at is not None:
            hidden = hidden.index_select(0, at)
        group = cast("Any", self.tp_group)
        if not self.sequence_parallel:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        return linear_cross_entropy(hidden, weight, labels, self.num_tokens, group), None


def _output(
    labels: Tensor | None,
    at: Tensor | None,
    emit: Callable[[Tensor], Tensor] | None,
    /,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    **unused: object,
) -> Tensor:
    """Compute losses or chosen logits, as `LanguageModel.forward` says, instead of Megatron."""
    if labels is None:
        assert at is not None, "logits of all positions are Megatron's"
        return output_layer(hidden_states.index_select(0, at), output_weight)[0].transpose(0, 1)
    if at is not None:
        losses = output_layer(hidden_states, output_weight, labels=labels, at=at)[0]
        return losses if emit is None else append_scalar(losses, emit(hidden_states))
    losses = output_layer(hidden_states, output_weight, labels=labels.t().flatten())[0]
    return losses.view(labels.shape[::-1]).t()


# Gemma-3 has norms on both sides of attention and MLP, and two kinds of layer. Local layers see a
# sliding window of keys and rotate fast with the position; global layers see all keys and rotate
# slowly. The kind follows from the layer's number in the whole model, whatever the pipeline.
_LOCAL, _GLOBAL = 0, 1

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class LocalGlobalRope(nn.Module):
    """Rotary frequencies for both kinds of layer side by side, as `GPTModel.rotary_pos_emb`.

    Position ids of all three axes are equal, so only the first are read.
    global_factor: divides the global frequencies (linear scaling).
    """

    def __init__(
        self, head_size: int, local_base: float, global_base: float, global_factor: float
    ) -> None:
        super().__init__()
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequencies = torch.stack((local_base**-exponent, global_base**-exponent / global_factor))
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(
        self, position_ids: Tensor, mrope_section: object = None, cp_group: object = None
    ) -> Tensor:
        """position_ids (3, B, S) int64 -> local and global frequencies (S, B, 2, D) fp32."""
        positions = position_ids[0].t().to(self.inv_freq.dtype)[:, :, None, None]
        freqs = positions * self.inv_freq  # (S, B, 2, D / 2)
        return torch.cat((freqs, freqs), dim=-1)


class NormedAdd(nn.Module):
    """A bias-dropout-add that normalises what it adds to the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.hidden_dropout == 0, "no family has dropout"
        self.norm = norm_of(config)(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> BiasDropoutAdd:
        """Return the function that adds, in the form that Megatron expects."""
        return self._add

    def _add(
        self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        """output, residual (S, B, H), bias (H,) -> (S, B, H)."""
        output, bias = output_with_bias
        return residual + self.norm(output if bias is None else output + bias)


class LocalGlobalLayer(DeepStackLayer):
    """A decoder layer that takes the rotary frequencies of its kind."""

    def forward(
        self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run `DeepStackLayer.forward`; of rotary_pos_emb (S, B, 2, D) it gets the layer's kind."""
        kind = _GLOBAL if window_of(self.config, self.layer_number) is None else _LOCAL
        frequencies = rotary_pos_emb[:, :, kind : kind + 1]
        return super().forward(*args, rotary_pos_emb=frequencies, **kwargs)


def local_global_layer_spec(config: TransformerConfig, lora: LoRA | None) -> ModuleSpec:
    """Return the spec of a causal layer with norms before and after attention and MLP.

    Core attention is always ours, because Transformer Engine's does not support `whole_items`.
    """
    return layer_spec(
        config,
        lora,
        causal=True,
        core=partial(CoreAttention, whole_items=True),
        add=ModuleSpec(module=NormedAdd, params={"config": config}),
        layer=LocalGlobalLayer,
    )
