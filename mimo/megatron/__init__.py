"""The engine adapter: the only part of the project that imports Megatron-core.

Names load on first use, because importing the engine costs about ten seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mimo.megatron.notices import leave_out_notices

if TYPE_CHECKING:
    from mimo.megatron.config import (
        LocalAttention,
        ModuleContext,
        StackShape,
        TransformerConfig,
        transformer_config,
    )
    from mimo.megatron.groups import ProcessGroupCollection
    from mimo.megatron.initialize import initialize_parameters
    from mimo.megatron.language import LanguageModel, build_gpt
    from mimo.megatron.layers import ModuleSpec, ParallelMLP, build_stack
    from mimo.megatron.norms import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
    from mimo.megatron.rope import ContiguousMRope, InterleavedMRope
    from mimo.megatron.segments import PackedSegments
    from mimo.megatron.sequence import gather_sequence
    from mimo.megatron.windows import WindowedSegments

_HOME = {
    "ContiguousMRope": "rope",
    "LanguageModel": "language",
    "LayerNorm": "norms",
    "InterleavedMRope": "rope",
    "LocalAttention": "config",
    "ModuleContext": "config",
    "ModuleSpec": "layers",
    "PackedSegments": "segments",
    "ParallelMLP": "layers",
    "ProcessGroupCollection": "groups",
    "RMSNorm": "norms",
    "StackShape": "config",
    "TransformerConfig": "config",
    "WindowedSegments": "windows",
    "ZeroCenteredRMSNorm": "norms",
    "build_gpt": "language",
    "build_stack": "layers",
    "gather_sequence": "sequence",
    "initialize_parameters": "initialize",
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
    "TransformerConfig",
    "WindowedSegments",
    "ZeroCenteredRMSNorm",
    "build_gpt",
    "build_stack",
    "gather_sequence",
    "initialize_parameters",
    "transformer_config",
]

leave_out_notices()  # whoever imports the engine comes through here first


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
