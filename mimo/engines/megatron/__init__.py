"""The engine adapter: the only part of the project that imports Megatron-core.

Names load on first use, because importing the engine costs about ten seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mimo.engines.megatron.notices import leave_out_notices

if TYPE_CHECKING:
    from mimo.engines.megatron.attention import forms_in
    from mimo.engines.megatron.config import (
        LocalAttention,
        ModuleContext,
        StackShape,
        TransformerConfig,
        transformer_config,
    )
    from mimo.engines.megatron.groups import ProcessGroupCollection
    from mimo.engines.megatron.initialize import initialize_parameters
    from mimo.engines.megatron.language import LanguageModel, build_gpt
    from mimo.engines.megatron.layers.norms import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
    from mimo.engines.megatron.layers.rope import ContiguousMRope, InterleavedMRope
    from mimo.engines.megatron.layers.windows import WindowedSegments
    from mimo.engines.megatron.schedule import StageShapes
    from mimo.engines.megatron.segments import PackedSegments, brought
    from mimo.engines.megatron.sequence import gather_sequence
    from mimo.engines.megatron.stack import ModuleSpec, ParallelMLP, build_stack, layers_here

_HOME = {
    "ContiguousMRope": "layers.rope",
    "LanguageModel": "language",
    "LayerNorm": "layers.norms",
    "InterleavedMRope": "layers.rope",
    "LocalAttention": "config",
    "ModuleContext": "config",
    "ModuleSpec": "stack",
    "PackedSegments": "segments",
    "ParallelMLP": "stack",
    "ProcessGroupCollection": "groups",
    "RMSNorm": "layers.norms",
    "StackShape": "config",
    "StageShapes": "schedule",
    "TransformerConfig": "config",
    "WindowedSegments": "layers.windows",
    "ZeroCenteredRMSNorm": "layers.norms",
    "brought": "segments",
    "build_gpt": "language",
    "build_stack": "stack",
    "forms_in": "attention",
    "gather_sequence": "sequence",
    "initialize_parameters": "initialize",
    "layers_here": "stack",
    "transformer_config": "config",
}

__all__ = [
    "ContiguousMRope",
    "InterleavedMRope",
    "LanguageModel",
    "LayerNorm",
    "LocalAttention",
    "ModuleContext",
    "ModuleSpec",
    "PackedSegments",
    "ParallelMLP",
    "ProcessGroupCollection",
    "RMSNorm",
    "StackShape",
    "StageShapes",
    "TransformerConfig",
    "WindowedSegments",
    "ZeroCenteredRMSNorm",
    "brought",
    "build_gpt",
    "build_stack",
    "forms_in",
    "gather_sequence",
    "initialize_parameters",
    "layers_here",
    "transformer_config",
]

leave_out_notices()  # whoever imports the engine comes through here first


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
