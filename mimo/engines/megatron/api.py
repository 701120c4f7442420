"""The names that languages and encoders are built from; the package loads them on first use."""

from mimo.engines.megatron.attention import forms_in
from mimo.engines.megatron.config import (
    ModuleContext,
    ProcessGroupCollection,
    TransformerConfig,
    gather_sequence,
    transformer_config,
)
from mimo.engines.megatron.delta_net import GatedDeltaNet
from mimo.engines.megatron.experts import Experts
from mimo.engines.megatron.language import (
    LanguageModel,
    LocalGlobalRope,
    build_gpt,
    local_global_layer_spec,
)
from mimo.engines.megatron.schedule import StageShapes
from mimo.engines.megatron.stack import (
    ModuleSpec,
    ParallelMLP,
    build_stack,
    layer_spec,
    layers_here,
)
from mimo.engines.megatron.weights import initialize_parameters
from mimo.ops.layers import LayerNorm, ZeroCenteredRMSNorm
from mimo.ops.segments import PackedSegments, to_device
