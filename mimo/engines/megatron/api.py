"""What languages and encoders are built from: see the package, which loads it on first use."""

from mimo.engines.megatron.attention import forms_in
from mimo.engines.megatron.config import (
    ModuleContext,
    StackShape,
    TransformerConfig,
    transformer_config,
)
from mimo.engines.megatron.groups import ProcessGroupCollection, gather_sequence
from mimo.engines.megatron.initialize import initialize_parameters
from mimo.engines.megatron.language import LanguageModel, build_gpt
from mimo.engines.megatron.local_global import LocalGlobalRope, local_global_layer_spec
from mimo.engines.megatron.schedule import StageShapes
from mimo.engines.megatron.stack import (
    ModuleSpec,
    ParallelMLP,
    build_stack,
    layer_spec,
    layers_here,
)
from mimo.ops.layers import LayerNorm, MRope, ZeroCenteredRMSNorm, contiguous_axes, interleaved_axes
from mimo.ops.segments import PackedSegments, to_device
