"""One module's part on this rank, as the engine runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from mimo.engines.megatron.groups import ProcessGroupCollection
from mimo.engines.megatron.parallel import MegatronOptimizer


@dataclass
class Module:
    """One module's part on this rank.

    raw: its model chunks, several with an interleaved pipeline. chunks: the same, wrapped in DDP
    where this rank has weights to update. optimizer: None where it has none.
    trains: whether the module has weights to update, on any stage: all of its stages then run
    backward.
    run_ahead: for a disjoint encoder, forward passes before its first backward.
    """

    name: str
    groups: ProcessGroupCollection
    raw: list[nn.Module]
    chunks: list[nn.Module]
    optimizer: MegatronOptimizer | None
    learning_rate: float
    trains: bool
    run_ahead: int = 0

    @property
    def sequence_parts(self) -> int:
        """How many ranks the module's output is cut over: 1 without sequence parallelism."""
        config = cast("Any", self.raw[0]).config
        return config.tensor_model_parallel_size if config.sequence_parallel else 1
