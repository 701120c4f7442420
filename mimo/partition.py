"""Gives each language rank its part of a sequence that all ranks of the lane hold whole.

The readable reference for `delivery: sharded`, which never builds the whole sequence.

Letters: T packed tokens of a lane, B batch (1 for packed), H hidden.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mimo.megatron.sequence import scatter_sequence


class PartitionAdapter:
    """Sequence-parallel scatter over a tensor-parallel group; exists on language ranks only."""

    def __init__(self, tp: dist.ProcessGroup, sequence_parallel: bool) -> None:
        self.tp = tp
        self.sequence_parallel = sequence_parallel

    def shard(self, embeddings: Tensor) -> Tensor:
        """embeddings (T, B, H), equal on all ranks of the group -> this rank's (T/tp, B, H).

        Every rank of the group calls it. The backward gathers, so each rank gets the complete
        gradient of the whole sequence. Without sequence parallelism nothing happens.
        Raises ValueError when T is not a multiple of the group's size.
        """
        if not self.sequence_parallel:
            return embeddings
        if embeddings.shape[0] % self.tp.size():
            raise ValueError(
                f"language.grid.sp: {embeddings.shape[0]} packed tokens are not a multiple of "
                f"language.grid.tp {self.tp.size()}"
            )
        return scatter_sequence(embeddings, self.tp)
