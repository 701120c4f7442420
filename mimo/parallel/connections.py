"""Connect ranks before the first step, and find the ranks of a host.

NCCL connects two ranks at their first message in a group, and blocks both hosts until each has made
its call. Inside a step that could close a circle of waiting ranks, so every pair that may exchange
messages is connected when the groups are created. Collectives have connections of their own.
"""

import os
import shutil
import socket
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mimo.device import has_gpu, local_device
from mimo.parallel.grids import GridSpec, Layout, Link


def bridge_ends(layout: Layout, link: Link) -> list[tuple[list[int], list[int]]]:
    """Return, for each block of lanes, the ranks that send a link's rows, and those that get them.

    An encoder sends rows to the language model, which sends rows to a generator.
    """
    module, language = layout.item_grids[link.module], layout.language
    blocks = layout.blocks_of(link.module)

    def ranks(grid: GridSpec, block: int, stage: int) -> list[int]:
        first = grid.rank(dp=block * grid.dp // blocks, pp=stage)
        return [*range(first, first + grid.dp // blocks * grid.cp * grid.tp)]

    ends = [(module, module.pp - 1), (language, link.stage)]
    if link.module in layout.generators:
        ends.reverse()
    (sender, first), (receiver, last) = ends
    return [(ranks(sender, n, first), ranks(receiver, n, last)) for n in range(blocks)]


def sender_receiver_pairs(layout: Layout) -> dict[str, list[tuple[int, int]]]:
    """Return the pairs of ranks that talk in tensor-parallel groups and on bridges, by name."""
    pairs = defaultdict[str, list[tuple[int, int]]](list)
    for name, grid in layout.grids.items():
        for first in grid.ranks[:: grid.tp] if grid.tp > 1 else ():
            ring = [(first + n, first + (n + 1) % grid.tp) for n in range(grid.tp)]
            pairs[f"tp of {name}"] += ring
    for link in (link for name in layout.item_grids for link in layout.links_of(name)):
        for senders, receivers in bridge_ends(layout, link):
            for n in range(max(len(senders), len(receivers))):
                ends = senders[n % len(senders)], receivers[n % len(receivers)]
                if ends[0] != ends[1]:
                    pairs[f"bridge of {link.name}"].append(ends)
    return pairs


def connect_collectives(groups: Iterable[dist.ProcessGroup]) -> None:
    """Sum a word over each group, which creates NCCL's communicators; gloo needs none.

    All ranks of a group call it, with the groups that they share in the same order.
    """
    for group in dict.fromkeys(groups):
        if has_gpu() and group.size() > 1:
            dist.all_reduce(_word(), group=group)


def connect_bridge(
    forward: dist.ProcessGroup,
    backward: dist.ProcessGroup,
    senders: Collection[int],
    receivers: Collection[int],
) -> None:
    """Connect every sender with every receiver, and back; all ranks of both groups call it."""
    rank = dist.get_rank()
    my_receivers = receivers if rank in senders else ()
    my_senders = senders if rank in receivers else ()
    _connect(forward, my_receivers, my_senders)
    _connect(backward, my_senders, my_receivers)


def connect_all(group: dist.ProcessGroup) -> None:
    """Connect every pair of ranks of a group, which exchange rows; all of them call it."""
    ranks = dist.get_process_group_ranks(group)
    _connect(group, ranks, ranks)


def connect_stages(pipeline: dist.ProcessGroup, interleaved: bool) -> None:
    """Connect the stages of a pipeline with their neighbours; every stage calls it.

    An interleaved pipeline, whose last stage also sends to the first, sends single messages, for
    which pairs of ranks have separate connections; with two stages Megatron uses the world's for
    one direction.
    """
    ranks = dist.get_process_group_ranks(pipeline)
    stage, last = pipeline.rank(), len(ranks) - 1
    if not interleaved:
        neighbours = [ranks[other] for other in (stage - 1, stage + 1) if 0 <= other <= last]
        _connect(pipeline, neighbours, neighbours)
        return
    world = dist.group.WORLD
    assert world is not None, "the world exists before its groups"
    _connect_ring(pipeline, (pipeline, world) if last == 1 else (pipeline,))


def connect_context(group: dist.ProcessGroup) -> None:
    """Connect a ring of context-parallel ranks, in which Transformer Engine sends keys.

    All ranks of the group call it. Two ranks send batches, more ranks single messages.
    """
    if group.size() == 2:
        connect_all(group)
    else:
        _connect_ring(group, [group])


def _connect_ring(ring: dist.ProcessGroup, groups: Collection[dist.ProcessGroup]) -> None:
    """Connect each rank of a ring with the next for single messages in `groups`."""
    ranks = dist.get_process_group_ranks(ring)
    place, last = ring.rank(), len(ranks) - 1
    pairs = {(first, first + 1) for first in range(last)} | {(0, last)}
    # All ranks take the pairs in the same order, so that no ranks wait for each other in a circle.
    for pair in sorted(pair for pair in pairs if place in pair):
        (other,) = {ranks[end] for end in pair} - {ranks[place]}
        for group in groups:
            calls = [(dist.isend, _word()), (dist.irecv, _word())]
            order = 1 if place == pair[0] else -1
            for work in [call(word, other, group) for call, word in calls[::order]]:
                assert work is not None, "both ranks are in the group"
                work.wait()


def _connect(group: dist.ProcessGroup, to: Collection[int], source: Collection[int]) -> None:
    """Exchange a word with other ranks in one batch: sent to `to`, received from `source`.

    One batch, because with single messages ranks could wait for each other in a circle.
    """
    rank = dist.get_rank()
    calls = [(dist.irecv, peer) for peer in source] + [(dist.isend, peer) for peer in to]
    operations = [dist.P2POp(call, _word(), peer, group) for call, peer in calls if peer != rank]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _word() -> torch.Tensor:
    return torch.zeros(1, device=local_device())


SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Host:
    """This rank's host. ranks: on it, ascending. job: a name that is unique to this world.

    free_bytes: of its shared memory. cores_per_rank: of the cores that this rank may use.
    """

    ranks: tuple[int, ...]
    job: str
    free_bytes: int
    cores_per_rank: int


def find_host() -> Host:
    """Find the ranks that share this rank's memory; every rank of the world calls it."""
    cores, free = sorted(os.sched_getaffinity(0)), 0
    with suppress(OSError):
        free = shutil.disk_usage(SHARED_MEMORY).free
    table: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(table, (_identity(), cores, free, os.urandom(7).hex()))
    host, *_ = table[dist.get_rank()]
    ranks = [rank for rank, row in enumerate(table) if row[0] == host]
    sharing = sum(table[rank][1] == cores for rank in ranks)
    return Host(
        ranks=tuple(ranks),
        job=table[0][3],
        free_bytes=min(table[rank][2] for rank in ranks),
        cores_per_rank=len(cores) // sharing,
    )


def _identity() -> list[object]:
    """Return facts that are equal for processes with the same shared memory and temporary files."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else socket.gethostname()
    folders = [path for path in (SHARED_MEMORY, Path(tempfile.gettempdir())) if path.is_dir()]
    return [name, os.getuid(), *((str(path), path.stat().st_dev) for path in folders)]
