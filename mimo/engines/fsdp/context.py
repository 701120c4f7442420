"""The mesh and the settings that an fsdp module runs with, and the interface of what it wraps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from mimo.ops.attention_plan import LayerForm

DP_REPLICATE, DP_SHARD, TP = "dp_replicate", "dp_shard", "tp"
"""Names of the mesh's dimensions, outermost first."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters. scale: factor of their output.

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
    dtype: dtype of the computation; weights are kept in at least fp32.
    sequence_parallel: hidden states between layers are sharded over tp along the sequence.
    scatter_embedding: `place` gets embeddings that are sharded over tp too; else whole ones.
    recompute: activations that the backward computes again: of core attention, or of layers.
    reshard_after_forward: free a layer's gathered weights until its backward.
    reduce_gradients: once a step, for all its microbatches, or after each microbatch.
    """

    mesh: DeviceMesh | None
    dtype: torch.dtype
    sequence_parallel: bool = False
    scatter_embedding: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    reshard_after_forward: bool = True
    reduce_gradients: Literal["step", "microbatch"] = "step"
    adapters: Adapters | None = None

    @property
    def tp(self) -> DeviceMesh | None:
        """The tensor-parallel dimension of the mesh; None where it has one rank."""
        if self.mesh is None or self.mesh[TP].size() == 1:
            return None
        return self.mesh[TP]

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of weights: at least fp32; the plain module's is that of the computation."""
        return self.dtype if self.mesh is None else torch.promote_types(self.dtype, torch.float32)


class _Call:
    """The arguments of a forward, hidden from FSDP2.

    It would cast and copy what it finds in them, plans of attention included.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


class Wrapper(nn.Module, ABC):
    """Parts of a model of transformers that run as one fsdp module. Call it as `run` says.

    Weights are on meta and in at least fp32 until `mimo.engines.fsdp.sharding.load`; buffers have
    their values.

    units: layers, gathered one at a time, in forward order. ends: the embedding and the head, each
    gathered on its own; empty where one matrix is both. hf_names: by parameter, its name in
    transformers' memory in the whole model.
    """

    units: list[nn.Module]
    ends: tuple[nn.Module, ...] = ()
    hf_names: dict[str, str]

    def __init__(self, ctx: FsdpContext) -> None:
        super().__init__()
        self.ctx = ctx

    def name_as_in(self, whole: nn.Module) -> None:
        """Set `hf_names`; all parameters of this module are parameters of ``whole``."""
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        self.hf_names = {name: names[id(param)] for name, param in self.named_parameters()}

    def attention_forms(self) -> frozenset[LayerForm]:
        """The forms of attention to plan ahead of the forward."""
        return frozenset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run`, with FSDP2's hooks around it."""
        return super().__call__(_Call(args, kwargs))

    def forward(self, call: _Call) -> Any:
        """Implement `torch.nn.Module`; see `run`."""
        return self.run(*call.args, **call.kwargs)

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output."""
