"""Megatron's types for grids of ranks and collections of process groups."""

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

__all__ = ["HyperCommGrid", "ProcessGroupCollection"]
