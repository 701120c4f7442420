"""Megatron's sequence-parallel mappings, with the group as an argument."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor


def scatter_sequence(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(S, B, H), equal on all ranks -> this rank's (S/tp, B, H); the backward all-gathers."""
    return scatter_to_sequence_parallel_region(hidden, group=group)


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's (S/tp, ...) -> all (S, ...) on every rank of the group, which all call it.

    The backward reduce-scatters: ranks use different rows, and a row's gradient is their sum.
    """
    return gather_from_sequence_parallel_region(hidden, group=group)
