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

# Notices of Megatron and torch that help nobody. (message, module that warns): regular expressions
# that match from the start.
WARNINGS = (
    # Optional packages, whose replacements are ours or torch's.
    (r"Transformer Engine and Apex are not installed", r"megatron\.core"),
    (r"Apex is not installed\. Falling back to Torch Norm", r"megatron\.core"),
    # Megatron's own imports.
    (r"The following imports from `dynamic_context\.py` will", r"megatron\.core\.inference"),
)
# (logger, how the message begins)
RECORDS = (
    # A CUDA toolkit on a machine without a GPU.
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    # Its successor is for hybrids of attention and state spaces.
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
