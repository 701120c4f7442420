"""The layers of Qwen3.5 with linear attention: Gated DeltaNet in place of self-attention.

Queries, keys and values pass a short causal convolution. Each value head keeps a matrix as state,
which decays, and in which a key's value is corrected (delta rule). The output is normalized and
gated. Source: Yang et al. 2024, arXiv:2412.06464; transformers `Qwen3_5GatedDeltaNet`.

A tensor-parallel rank has whole key heads, each with its value heads, so all parameters are cut by
rows; only the norm's factor is replicated. Under context parallelism ranks exchange tokens for
heads around convolution and state.

Letters: S sequence of this rank, B batch (1 when packed), T packed tokens of the lane; K key heads
and V value heads of this rank, r = V/K, D and E their sizes, W width of the convolution,
C context-parallel ranks, t tensor-parallel ranks, H hidden.
"""

from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mimo.ops.attention_plan import batch_plan
from mimo.ops.delta_rule import gated_delta_rule, segment_conv
from mimo.ops.head_exchange import heads_to_share, share_to_heads
from mimo.ops.layers import gated_norm
from mimo.ops.segments import LaneForm, PackedSegments


class GatedDeltaNet(nn.Module):
    """Linear attention over segments, each of which starts with an empty state.

    Its sizes are `TransformerConfig.linear_*`. Rows of ``linear_qkv`` belong to one key head after
    the other: query (D), key (D), values (r·E), strengths (r), decays (r), gates (r·E). Rows of
    ``conv_weight`` (K·(2·D + r·E), W) are its query, key and values. a_log, dt_bias: (V,).
    """

    form: LaneForm | None
    """Form of the layer under context parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__()
        sizes: Any = config
        heads, value_heads = sizes.linear_num_key_heads, sizes.linear_num_value_heads
        self.key_size, self.value_size = sizes.linear_key_head_dim, sizes.linear_value_head_dim
        self.values_per_key, self.eps = value_heads // heads, config.layernorm_epsilon
        self.tp, self.cp = pg_collection.tp, pg_collection.cp
        self.form = LaneForm(self.cp.size()) if self.cp.size() > 1 else None
        channels = 2 * self.key_size + self.values_per_key * self.value_size
        self.parts = (channels, *[self.values_per_key] * 2)
        self.gates = self.values_per_key * self.value_size
        self.heads = heads // self.tp.size()
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp}
        self.linear_qkv = cast("Any", submodules.linear_qkv)(
            config.hidden_size,
            heads * (sum(self.parts) + self.gates),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **options,
        )
        self.linear_proj = cast("Any", submodules.linear_proj)(
            value_heads * self.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **options,
        )
        dtype, local = config.params_dtype, self.heads * self.values_per_key
        width = sizes.linear_conv_kernel_dim
        self.conv_weight = _tp_parameter(torch.empty(self.heads * channels, width, dtype=dtype))
        self.a_log, self.dt_bias = (
            _tp_parameter(torch.empty(local, dtype=dtype)) for _ in range(2)
        )
        self.norm_weight = nn.Parameter(torch.ones(self.value_size, dtype=dtype))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (S, B, H), or (S/t, B, H) under SP -> the same, and a bias left to add.

        Every rank of the tensor- and context-parallel groups calls it, also its backward.
        """
        assert attention_mask is None, "segments are packed instead of masked"
        rows = self.linear_qkv(hidden_states)[0].transpose(0, 1)  # (B, S, rows)
        batch, length = rows.shape[:2]
        by_head = rows.reshape(batch * length, self.heads, -1)
        inputs, gates = by_head.split((sum(self.parts), self.gates), dim=-1)
        if packed_seq_params is None:
            lengths = (length * self.cp.size(),) * batch
            plan = self.form and batch_plan(self.form, lengths[0], batch, rows.device)
        else:
            lengths = packed_seq_params.lengths
            plan = self.form and packed_seq_params.plan(self.form)
        if plan is not None:
            inputs = share_to_heads(inputs, plan, self.cp)
        output = self._scan(inputs, lengths)
        if plan is not None:
            output = heads_to_share(output, plan, self.cp)
        # Each rank sees its own heads only, with or without sequence parallelism.
        factor = copy_to_tensor_model_parallel_region(self.norm_weight, group=cast("Any", self.tp))
        output = gated_norm(output, gates.reshape(output.shape), factor, self.eps)
        return self.linear_proj(output.reshape(batch, length, -1).transpose(0, 1))

    def _scan(self, inputs: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """inputs (T, K/C, 2·D + r·E + 2·r), all tokens of the lane -> (T, V/C, E)."""
        assert sum(lengths) == len(inputs), f"{len(inputs)} tokens for segments of {lengths}"
        mixed, strengths, decays = inputs.split(self.parts, dim=-1)
        weight, a_log, dt_bias = (
            self._rows_of_cp_rank(p) for p in (self.conv_weight, self.a_log, self.dt_bias)
        )
        mixed = segment_conv(mixed.flatten(1), weight, lengths).view(mixed.shape)
        sizes = (self.key_size, self.key_size, self.gates)
        query, key, value = mixed.split(sizes, dim=-1)
        value = value.reshape(len(value), -1, self.value_size)
        wide = torch.promote_types(inputs.dtype, torch.float32)
        steps = functional.softplus(decays.flatten(1).to(wide) + dt_bias)
        log_decay = -a_log.to(wide).exp() * steps
        return gated_delta_rule(
            query, key, value, log_decay, strengths.flatten(1).sigmoid(), lengths
        )

    def _rows_of_cp_rank(self, parameter: Tensor) -> Tensor:
        """Return the rows of the heads that this context-parallel rank scans."""
        return parameter.chunk(self.cp.size())[self.cp.rank()]


def _tp_parameter(rows: Tensor) -> nn.Parameter:
    """A tensor-parallel rank's rows of a parameter."""
    parameter = nn.Parameter(rows)
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
