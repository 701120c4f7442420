"""The Megatron engine: the only package of the project that imports Megatron-core.

The names of `mimo.engines.megatron.api` are names of this package, too. They load on first use,
because importing Megatron takes about ten seconds.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimo.engines.megatron.api import *  # noqa: F403

# Notices of Megatron and torch that help nobody, however they are called. All others are shown;
# notices that our arguments cause are avoided by changing the arguments.
# (message, module that warns), both regular expressions that match from the start.
WARNINGS = (
    # Optional packages. Their replacements are ours or torch's, and tested.
    (r"Transformer Engine and Apex are not installed", r"megatron\.core"),
    (r"Apex is not installed\. Falling back to Torch Norm", r"megatron\.core"),
    # One of the engine's packages imports from another in a way that is being removed.
    (r"The following imports from `dynamic_context\.py` will", r"megatron\.core\.inference"),
)
# (logger, how the message begins)
RECORDS = (
    # A CUDA toolkit on a machine without a GPU.
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    # Its successor in the engine is for hybrids of attention and state spaces.
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
)


def _hide_notices() -> None:
    """Filter the notices in this process and its forks. Must run before Megatron is imported."""
    for message, module in WARNINGS:
        for category in (UserWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", message, category, module)
    for name, beginning in RECORDS:
        logging.getLogger(name).addFilter(
            lambda record, beginning=beginning: not record.getMessage().startswith(beginning)
        )


_hide_notices()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api"), name)
