"""What an fsdp module is built on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

DP_REPLICATE, DP_SHARD, TP = "dp_replicate", "dp_shard", "tp"
"""Names of the mesh's dimensions, outermost first."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters. scale: of their output.

    groups: linears by name in the whole model of transformers; those of a group share one `lora_a`.
    """

    rank: int
    scale: float
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class FsdpContext:
    """A module's ranks and how it computes.

    mesh: (dp_replicate, dp_shard, tp), sizes of 1 included; None for the plain module of
        transformers on this rank alone, without FSDP2 and DTensor.
    dtype: of the computation; weights are kept in at least fp32.
    sequence_parallel: hidden states between layers are cut over tp.
    scatter_embedding: embeddings are handed to `place` cut over tp too; else whole.
    recompute: activations computed again in the backward pass, of core attention or of layers.
    reshard_after_forward: free a layer's gathered weights until its backward.
    """

    mesh: DeviceMesh | None
    dtype: torch.dtype
    sequence_parallel: bool = False
    scatter_embedding: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    reshard_after_forward: bool = True
    adapters: Adapters | None = None

    @property
    def tp(self) -> DeviceMesh | None:
        """The tensor-parallel dimension; None where it has one rank."""
        if self.mesh is None or self.mesh[TP].size() == 1:
            return None
        return self.mesh[TP]
