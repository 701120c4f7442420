"""Megatron's sequence-parallel mappings, with the group as an argument."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor


def scatter_sequence(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(S, B, H), equal on all ranks -> this rank's (S/tp, B, H); the backward all-gathers."""
    return scatter_to_sequence_parallel_region(hidden, group=group)
