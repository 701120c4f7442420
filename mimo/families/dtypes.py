"""The number formats of weights and of messages, by their names in recipes."""

import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def precision_of(dtype: torch.dtype) -> str:
    """The smallest ``train.precision`` that holds every number of this format."""
    # There is none for fp16; fp32 holds all of its numbers.
    wanted = torch.float32 if dtype == torch.float16 else dtype
    return next(name for name, known in DTYPES.items() if known == wanted)
