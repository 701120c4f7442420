"""The mesh and the settings that an fsdp module runs with, and the interface of what it wraps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from mimo.ops.attention_plan import LayerForm

DP_REPLICATE, DP_SHARD, TP = "dp_replicate", "dp_shard", "tp"
"""Names of the mesh's dimensions, outermost first."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters. scale: factor of their output.

    groups: names of linears in the whole model of transformers; a group shares one `lora_a`.
    """

    rank: int
    scale: float
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class FsdpContext:
    """A module's ranks and how it computes; see the recipe's keys.

    mesh: (dp_replicate, dp_shard, tp), sizes of 1 included; None for transformers' plain module on
        this rank alone, without FSDP2 and DTensor.
    dtype: of the computation. scatter_embedding: `place` gets embeddings that are sharded along the
        sequence like hidden states between layers; else whole ones.
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
        """The mesh's tensor-parallel dimension; None if it has one rank."""
        if self.mesh is None or self.mesh.shape[-1] == 1:
            return None
        return self.mesh[TP]

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of weights: at least fp32 with a mesh, else that of the computation."""
        return self.dtype if self.mesh is None else torch.promote_types(self.dtype, torch.float32)


class Wrapper(nn.Module, ABC):
    """Parts of a model of transformers that run as one fsdp module; called like `run`.

    Weights are on meta until `mimo.engines.fsdp.sharding.load`; buffers have their values.

    units: layers in forward order, gathered one at a time. ends: embedding and head, each gathered
    by itself; empty if one matrix is both. hf_names: by parameter, its name in transformers' memory
    in the whole model.
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

    def values(self, patches: Any) -> Tensor:
        """Return an encoder's `mimo.families.wire.WirePatches` as values (P, C) in its dtype."""
        dtype = self.ctx.dtype
        return patches.to(dtype) if isinstance(patches, Tensor) else patches.values(dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run` inside FSDP2's hooks.

        They do not see the arguments, because they would cast and copy attention plans, too.
        """
        return super().__call__(partial(self.run, *args, **kwargs))

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output."""
