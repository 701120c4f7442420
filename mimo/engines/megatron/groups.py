"""Megatron's types for grids and process groups, and its exchange of sequence-parallel parts.

`gather_sequence`: each rank's (S/tp, ...) -> all (S, ...) on every rank of the group, which all
call it; the backward reduce-scatters. `scatter_sequence`: (S, B, H), equal on all ranks -> this
rank's (S/tp, B, H), without communication; the backward all-gathers.
"""

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region as gather_sequence,
)
from megatron.core.tensor_parallel.mappings import (
    scatter_to_sequence_parallel_region as scatter_sequence,
)

__all__ = ["HyperCommGrid", "ProcessGroupCollection", "gather_sequence", "scatter_sequence"]
