"""Process groups of every module and every bridge, created only here.

Each module is a separate Megatron job on its own grid of ranks, so each gets a
`ProcessGroupCollection`; no global `parallel_state` is initialised.
"""

import datetime
import functools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mimo.device import barrier, bridge_group_options, local_device
from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP
from mimo.engines.megatron.config import HyperCommGrid, ProcessGroupCollection
from mimo.ops.acceleration import TRANSFORMER_ENGINE, this_machine
from mimo.parallel.connections import (
    bridge_ends,
    connect_all,
    connect_bridge,
    connect_collectives,
    connect_context,
    connect_stages,
    find_host,
)
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, Link

# Megatron's names of groups, and the axes of our grid that each spans.
_GROUP_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("cp", "dp"),
    "intra_dp_cp": ("cp", "dp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "mp": ("tp", "pp"),
    # The whole module, so that the distributed optimizer never reduces over the world.
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}
# Likewise for experts, whose axes are another view of the same ranks.
_EXPERT_GROUP_AXES: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "expt_dp": ("copies",),
    "intra_expt_dp": ("copies",),
}
# Groups with collectives in every step; a module on FSDP2 uses its mesh for all but the first.
_GROUPS_OF_STEPS = ("tp", "cp", "dp_cp", "embd")
_GROUPS_OF_EXPERTS = ("tp_cp", "tp_ep", "expt_dp")  # likewise, if ranks share out experts


@dataclass(frozen=True)
class BridgeGroups:
    """Groups of one bridge: the module's last stage and one stage of the language model.

    Two groups, because in-order transfers of gradients must not wait behind those of rows.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True)
class Topology:
    """The process groups of this rank.

    modules: the groups of each module that has a part on this rank. meshes: of modules on FSDP2,
    the same ranks as (dp_replicate, dp_shard, tp). bridges: those with this rank at one end; for
    each encoder, in the order of their stages. groups: all of them, in the order of creation.
    ranks_on_host: number of the world's ranks on this rank's host.
    """

    layout: Layout
    rank: int
    modules: dict[str, ProcessGroupCollection] = field(default_factory=dict)
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    bridges: dict[Link, BridgeGroups] = field(default_factory=dict)
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    ranks_on_host: int = 1

    def owns(self, module: str) -> bool:
        return module in self.modules

    @property
    def reports(self) -> bool:
        """Whether this rank reports for the run: the first of the language model's last stage."""
        language = self.layout.language
        return self.rank == language.rank(pp=language.pp - 1)

    def close(self) -> None:
        """Destroy all groups but the world and meshes; the model can no longer be used.

        Every rank of the world calls it. The world may then build another topology.
        """
        barrier()
        for group in self.groups:
            dist.destroy_process_group(group)
        self.groups.clear()


@dataclass
class _GroupFactory:
    """Creates groups, each set of ranks once. Every rank of the world makes the same calls.

    timeout: of each group's collectives; None for the backend's default, which may be longer.
    """

    rank: int
    groups: list[dist.ProcessGroup]
    timeout: datetime.timedelta | None = None
    created: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    def mine(self, enumeration: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
        """Return the group of `enumeration` with this rank; None if there is none."""
        group = None
        for ranks in enumeration:
            key = tuple(ranks)
            if key not in self.created:
                self.created[key] = self.fresh(key, name)
            if self.rank in key:
                group = self.created[key]
        return group

    def fresh(
        self, ranks: Sequence[int], name: str, options: Any = None
    ) -> dist.ProcessGroup | None:
        """Create a group even if another has the same ranks. options: the backend's."""
        if options is not None and self.timeout is not None:
            options._timeout = self.timeout  # torch warns where the two differ
        group = dist.new_group([*ranks], timeout=self.timeout, group_desc=name, pg_options=options)
        if not isinstance(group, dist.ProcessGroup):
            return None
        self.groups.append(group)
        return group


def comm_grid(spec: GridSpec) -> HyperCommGrid:
    """Describe a module's ranks to Megatron; creates no group."""
    axes = {"tp": spec.tp, "cp": spec.cp, "dp": spec.dp, "pp": spec.pp}
    return HyperCommGrid(list(axes.values()), list(axes), spec.rank_offset)


def expert_grid(spec: GridSpec) -> HyperCommGrid:
    """Describe the same ranks as experts see them; creates no group."""
    axes = {"etp": spec.etp, "ep": spec.ep, "copies": spec.expert_copies, "pp": spec.pp}
    return HyperCommGrid(list(axes.values()), list(axes), spec.rank_offset)


def _module_groups(spec: GridSpec, factory: _GroupFactory) -> ProcessGroupCollection | None:
    """Create all groups of a module for Megatron 0.19; None on ranks without a part of it."""
    grid = comm_grid(spec)
    alone, created = [[rank] for rank in spec.ranks], dict[str, dist.ProcessGroup | None]()
    for view, groups_of_view in ((grid, _GROUP_AXES), (expert_grid(spec), _EXPERT_GROUP_AXES)):
        for name, axes in groups_of_view.items():
            ranks = view.get_rank_enum(list(axes))
            created[name] = factory.mine(ranks, f"{spec.module}.{name}")
    if spec.module == LANGUAGE:
        # Tied embeddings need a [first stage, last stage] group, else Megatron silently skips their
        # synchronisation. Middle stages hold no embedding.
        stages = grid.get_rank_enum(["pp"])
        ends = [[s[0], s[-1]] if len(s) > 1 else [s[0]] for s in stages]
        created["embd"] = factory.mine(ends, f"{spec.module}.embd")
        created["pos_embd"] = factory.mine(alone, f"{spec.module}.pos_embd")
    if factory.rank not in spec.ranks:
        return None
    groups = {name: group for name, group in created.items() if group is not None}
    names = _GROUPS_OF_STEPS[: 1 if spec.engine == "fsdp" else None]
    names += _GROUPS_OF_EXPERTS if spec.ep * spec.etp > 1 else ()
    connect_collectives(groups[name] for name in names if name in groups)
    return ProcessGroupCollection(**groups)


@functools.cache
def _mesh(
    world: dist.ProcessGroup,
    first: int,
    sizes: tuple[int, int, int],
    timeout: datetime.timedelta | None,
) -> DeviceMesh | None:
    """Create the mesh (dp_replicate, dp_shard, tp) of the ranks from `first`; None on others.

    Lanes that shard one copy of the weights are adjacent. A mesh lives as long as its world, as
    DTensor caches meshes by their ranks.
    """
    factory, names = _GroupFactory(world.rank(), [], timeout), (DP_REPLICATE, DP_SHARD, TP)
    ranks = torch.arange(first, first + math.prod(sizes)).view(sizes)
    by_axis = [
        factory.mine(ranks.movedim(axis, -1).reshape(-1, size).tolist(), names[axis])
        for axis, size in enumerate(sizes)
    ]
    groups = [group for group in by_axis if group is not None]
    if not groups:
        return None
    connect_collectives(groups)
    return DeviceMesh.from_group(groups, local_device().type, ranks, mesh_dim_names=names)


def build_topology(layout: Layout, timeout_seconds: float | None = None) -> Topology:
    """Create every group, and connect the ranks that may exchange messages in it.

    Every rank of the world calls it, once, after joining the world.
    timeout_seconds: how long a collective call may take; None leaves that to the backend.
    """
    rank = dist.get_rank()
    assert dist.get_world_size() == layout.world_size, "the layout was made for another world"
    topology = Topology(layout, rank, ranks_on_host=len(find_host().ranks))
    timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
    factory = _GroupFactory(rank, topology.groups, timeout)
    assert dist.group.WORLD is not None
    connect_collectives([dist.group.WORLD])
    for name, spec in layout.grids.items():
        groups = _module_groups(spec, factory)
        if groups is not None:
            topology.modules[name] = groups
            if spec.pp > 1:
                connect_stages(groups.pp, interleaved=spec.vpp > 1)
            if spec.tp > 1 and not spec.sp and layout.item_grids:  # they exchange rows
                connect_all(groups.tp)
            if spec.ep * spec.etp > 1:  # they exchange tokens
                connect_all(groups.tp_ep)
            if spec.cp > 1 and TRANSFORMER_ENGINE in this_machine().installed:
                connect_context(groups.cp)
        if spec.engine == "fsdp":
            sizes = (spec.dp_replicate, spec.dp // spec.dp_replicate, spec.tp)
            mesh = _mesh(dist.group.WORLD, spec.rank_offset, sizes, timeout)
            if mesh is not None:
                topology.meshes[name] = mesh
    for link in (link for name in layout.item_grids for link in layout.links_of(name)):
        _add_bridge(topology, factory, link)
    return topology


def _add_bridge(topology: Topology, factory: _GroupFactory, link: Link) -> None:
    """Create and connect the groups of a bridge's blocks; every rank of the world calls it.

    Each lane may have rows for any lane at the other end, so a rank connects to the whole of it.
    """
    for senders, receivers in bridge_ends(topology.layout, link):
        ends = sorted({*senders, *receivers})
        forward, backward = (
            factory.fresh(ends, f"bridge.{link.module}.{link.stage}.{way}", bridge_group_options())
            for way in ("forward", "backward")
        )
        if forward is not None and backward is not None:
            # NCCL wants all ranks of a group in its first call; later messages go only between
            # peers that have rows to exchange.
            connect_collectives((forward, backward))
            connect_bridge(forward, backward, senders, receivers)
            topology.bridges[link] = BridgeGroups(forward, backward)


@contextmanager
def simulated_topology(layout: Layout, rank: int) -> Iterator[Topology]:
    """Provide the groups of one rank in a process of its own; collectives return at once, unfilled.

    The process must belong to no world.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # late: runs do not need it

    with mock.patch.dict(os.environ, WORLD_SIZE=str(layout.world_size)):  # Megatron's grids read it
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        try:
            yield build_topology(layout)
        finally:
            dist.destroy_process_group()
