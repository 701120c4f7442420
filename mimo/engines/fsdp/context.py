"""What an fsdp module is built on, and made of."""

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
    reduce_gradients: once a step, of all its microbatches together, or after each microbatch.
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
        """The tensor-parallel dimension; None where it has one rank."""
        if self.mesh is None or self.mesh[TP].size() == 1:
            return None
        return self.mesh[TP]


class _Call:
    """What a sharded module is called with. FSDP2 does not look into it.

    It would cast and copy what it finds, plans of attention included.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


class Wrapper(nn.Module, ABC):
    """What an fsdp module is made of: parts of a model of transformers. Call it as `run` says.

    Weights are on meta and in at least fp32, until `mimo.engines.fsdp.load`; buffers are right.

    units: layers, which are gathered one at a time, in forward order. ends: before and after them,
    the embedding and the head, gathered on their own as well; empty where one matrix is both.
    hf_names: of every parameter here, the name that transformers gives it in memory in the whole
    model. sums_over_tp: parameters that every tensor-parallel rank has whole, but of whose gradient
    each has a part only.
    """

    units: list[nn.Module]
    ends: tuple[nn.Module, ...] = ()
    hf_names: dict[str, str]
    sums_over_tp: frozenset[str] = frozenset()

    def __init__(self, ctx: FsdpContext) -> None:
        super().__init__()
        self.ctx = ctx

    def name_as_in(self, whole: nn.Module) -> None:
        """Set `hf_names`; all parameters here are parameters of ``whole``."""
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        self.hf_names = {name: names[id(own)] for name, own in self.named_parameters()}

    def attention_forms(self) -> frozenset[LayerForm]:
        """Of its layers, for whoever plans attention ahead of its forward."""
        return frozenset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `run`, with what FSDP2 does before and after."""
        return super().__call__(_Call(args, kwargs))

    def forward(self, call: _Call) -> Any:
        """For `torch.nn.Module`; see `run`."""
        return self.run(*call.args, **call.kwargs)

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What it computes."""
