"""Transformer layers, stacks and projections built from Megatron's parallel linears.

If `mimo.ops.acceleration` chooses Transformer Engine, a layer has its linears and norms under the
names of ours, so checkpoints work with and without it. A linear with an adapter stays Megatron's.

Letters: B sequences (1 for packed) of S local tokens, H hidden, n embeddings of this rank, k
feature levels of this chunk.
"""

import copy
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import mlp
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from mimo.engines.megatron.attention import SelfAttention, WindowAttention, core_attention
from mimo.engines.megatron.config import LoRA, ModuleContext
from mimo.engines.megatron.experts import Experts, SparseMLP
from mimo.engines.megatron.lora import (
    LoRAColumnParallelLinear,
    LoRARowParallelLinear,
    let_backward_into_layers,
)
from mimo.ops.acceleration import layer_choice
from mimo.ops.layers import gate, norm_class
from mimo.ops.segments import sequence_first


def _transformer_engine() -> Any:
    """Import Megatron's wrappers of its layers, which needs a GPU."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine


def norm_of(config: TransformerConfig) -> Any:
    """Return the class of a layer's norms."""
    if layer_choice(config.params_dtype).transformer_engine:
        return _transformer_engine().TENorm
    return norm_class(config)


def _linears(config: TransformerConfig, lora: LoRA | None) -> dict[str, Any]:
    """Return the class of each linear of a layer, by its name in `LoRA.targets`."""
    column, row = ColumnParallelLinear, RowParallelLinear
    if layer_choice(config.params_dtype).transformer_engine:
        te = _transformer_engine()
        column = partial(_adding_to_main_grad, te.TEColumnParallelLinear)
        row = partial(_adding_to_main_grad, te.TERowParallelLinear)
    columns, rows = (column, LoRAColumnParallelLinear), (row, LoRARowParallelLinear)
    kinds = {"qkv": columns, "proj": rows, "fc1": columns, "fc2": rows}
    targets = frozenset() if lora is None else lora.targets
    return {
        name: partial(adapted, lora=lora) if name in targets else plain
        for name, (plain, adapted) in kinds.items()
    }


def _adding_to_main_grad(linear: Any, *args: Any, config: TransformerConfig, **options: Any) -> Any:
    """Build a linear of Transformer Engine that adds its weight gradient to DDP's sum itself.

    Megatron's own linears, such as the head, have no kernel for it.
    """
    fused = copy.copy(config)
    fused.gradient_accumulation_fusion = True
    return linear(*args, config=fused, **options)


class MLP(mlp.MLP):
    """Megatron's MLP, except that an unfused gate is `gate`, which computes the same bits."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (S, B, H) -> (S, B, H), and a bias left to add."""
        config = self.config
        if not config.gated_linear_unit or config.bias_activation_fusion:
            return super().forward(hidden_states, per_token_scale, **unused)
        assert per_token_scale is None, "dense layers do not scale tokens"
        into, out_of = cast("Any", self.linear_fc1), cast("Any", self.linear_fc2)
        both, bias = into(hidden_states)
        return out_of(gate(both if bias is None else both + bias, self.activation_func))


class DeepStackLayer(TransformerLayer):
    """A decoder layer that adds the first feature level to its output and passes on the others.

    Levels come as `context` with its mask, which Megatron's block hands to layers for
    cross-attention; ours have none. Full recomputation takes these as explicit checkpoint
    arguments and returns their gradients, which a closure would lose.

    Without sequence parallelism every tensor-parallel rank adds all embeddings of the lane, and
    each gradient is equal and complete on every rank. With it each rank adds those of its slice.
    """

    def _forward_mlp(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Run Megatron's, which does not tell an MLP of the segments, as experts need."""
        if not isinstance(self.mlp, SparseMLP):
            return super()._forward_mlp(*args, packed_seq_params=packed_seq_params, **kwargs)
        self.mlp.segments = packed_seq_params
        try:
            return super()._forward_mlp(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self.mlp.segments = None

    def forward(
        self,
        *args: Any,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (S, B, H), context (k, n, H) -> hidden states and the levels left, or None.

        context_mask: (n,) int64 positions among this rank's tokens, the same for all levels, none
        twice: b·S + s is token s of sequence b. Even with n = 0 the result depends on the levels,
        so that the backward reaches the bridge.
        """
        hidden = cast("Tensor", super().forward(*args, **kwargs)[0])
        if context is None or context_mask is None:
            return hidden, None
        places = sequence_first(context_mask, hidden)
        added = hidden.flatten(0, 1).index_add(0, places, context[0].to(hidden.dtype))
        # Pipeline schedules free tensors that a stage has sent, and refuse views.
        hidden = make_viewless_tensor(
            added.view(hidden.shape), requires_grad=hidden.requires_grad, keep_graph=True
        )
        return hidden, context[1:] if context.shape[0] > 1 else None


def layer_spec(
    config: TransformerConfig,
    lora: LoRA | None,
    causal: bool,
    core: Any = None,
    add: Any = get_bias_dropout_add,
    layer: type[TransformerLayer] | None = None,
    attention: type[nn.Module] | None = None,
    experts: Experts | None = None,
) -> ModuleSpec:
    """Return the spec of a pre-norm transformer layer: norm, attention, norm, MLP.

    core: core attention; None for the best. add: adds attention and MLP to the residual stream.
    layer: its class; None for `DeepStackLayer` if it is causal, else Megatron's. attention: class
    of the attention, such as `GatedDeltaNet`; None for `SelfAttention`. experts: in place of the
    MLP, in a `DeepStackLayer`.
    """
    linears, norm = _linears(config, lora), norm_of(config)
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    qk_norm = norm if config.qk_layernorm else None
    parts = SelfAttentionSubmodules(
        linear_qkv=linears["qkv"],
        core_attention=core or core_attention(config, causal),
        linear_proj=linears["proj"],
        q_layernorm=qk_norm,  # type: ignore[arg-type]
        k_layernorm=qk_norm,  # type: ignore[arg-type]
    )
    dense = partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=linears["fc1"], linear_fc2=linears["fc2"]),
    )
    mlp = partial(dense, ffn_hidden_size=config.ffn_hidden_size)
    if experts is not None:
        mlp = partial(SparseMLP, experts=experts, shared=dense, lora=lora)
    return ModuleSpec(
        module=layer or (DeepStackLayer if causal else TransformerLayer),
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,  # type: ignore[arg-type]
            self_attention=ModuleSpec(
                module=attention or SelfAttention, params={"attn_mask_type": mask}, submodules=parts
            ),
            self_attn_bda=add,
            pre_mlp_layernorm=norm,  # type: ignore[arg-type]
            mlp=mlp,  # type: ignore[arg-type]
            mlp_bda=add,
        ),
    )


def layers_here(
    config: TransformerConfig, groups: ProcessGroupCollection, chunk: int | None
) -> range:
    """Return the layers of this stage, or of a chunk of it, counted from 0 over all stages."""
    stage = groups.pp.rank()
    first = get_transformer_layer_offset(config, chunk, stage)
    return range(first, first + get_num_layers_to_build(config, chunk, stage))


def stack_spec(
    config: TransformerConfig, layers: Sequence[ModuleSpec]
) -> TransformerBlockSubmodules:
    """Return these layers plus a final norm that allows sequence parallelism."""
    return TransformerBlockSubmodules(
        layer_specs=list(layers),
        layer_norm=norm_of(config),  # type: ignore[arg-type]
    )


def build_stack(
    config: TransformerConfig, ctx: ModuleContext, window_layers: Collection[int] = ()
) -> TransformerBlock:
    """Build the layers of one stage of a tower, whose tokens see their whole segment.

    window_layers: layers, counted from 0 over all stages, that attend inside the windows of
    `PackedSegments.windows`.
    """
    windows = partial(WindowAttention, core_attention(config, causal=False))
    layers = [
        layer_spec(
            config, ctx.lora, causal=False, core=windows if number in window_layers else None
        )
        for number in layers_here(config, ctx.groups, ctx.chunk)
    ]
    block = TransformerBlock(
        config,
        stack_spec(config, layers),
        pre_process=ctx.is_first_stage,
        post_process=ctx.is_last_stage,
        pg_collection=ctx.groups,
        vp_stage=ctx.chunk,
    )
    if ctx.lora is not None:
        let_backward_into_layers(block)
    return block


class ParallelMLP(nn.Module):
    """Two linears with an activation, split over tensor parallelism: (n, I) -> (n, O).

    Input and output are replicated over the tensor-parallel group; under sequence parallelism
    each rank has its part of the n. I inputs, O outputs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        input_size: int,
        hidden_size: int,
        output_size: int,
        activation,
    ) -> None:
        super().__init__()
        options = {"config": config, "init_method": lambda weight: None, "bias": True}
        self.activation = activation
        self.linear_fc1 = ColumnParallelLinear(
            input_size, hidden_size, gather_output=False, tp_group=groups.tp, **options
        )
        self.linear_fc2 = RowParallelLinear(
            hidden_size,
            output_size,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=groups.tp,
            **options,
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.linear_fc1(x)
        output, _ = self.linear_fc2(self.activation(hidden))
        return output
