"""Leaves out library notices that help nobody; each is named, and all others are shown.

They come from inside the engine and torch, however we call them. Notices that our arguments cause
are dealt with by changing those arguments.
"""

from __future__ import annotations

import logging
import warnings

# (message, module that warns), both regular expressions that match from the start.
WARNINGS = (
    # Optional packages. What replaces them is ours or torch's, and is tested.
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


def leave_out_notices() -> None:
    """Call before the engine is imported, once per process; forks inherit it."""
    for message, module in WARNINGS:
        for category in (UserWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", message, category, module)
    for name, beginning in RECORDS:
        logging.getLogger(name).addFilter(
            lambda record, beginning=beginning: not record.getMessage().startswith(beginning)
        )
