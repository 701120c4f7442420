"""First messages and collectives: all that a step may need are made when groups are.

NCCL connects two ranks at the first message from one to the other in a group, and blocks both
hosts until each has made its call. Inside a step that could close a circle of ranks that wait for
each other. A collective connects ranks only for collectives, and the first one of a group blocks
the hosts of all its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from mimo.device import has_gpu, local_device
from mimo.parallel.grids import GridSpec, Layout
from mimo.parallel.levels import Link


def bridge_ends(layout: Layout, link: Link) -> list[tuple[list[int], list[int]]]:
    """For each block of lanes, the ranks that may send rows over a link and to which they go."""
    encoder, language = layout.encoders[link.encoder], layout.language
    blocks = layout.blocks_of(link.encoder)

    def lanes(grid: GridSpec, block: int) -> range:
        size = grid.dp // blocks
        return range(block * size, (block + 1) * size)

    return [
        (
            [
                encoder.rank(dp=d, pp=encoder.pp - 1, tp=t)
                for d in lanes(encoder, block)
                for t in range(encoder.tp)
            ],
            [
                language.rank(dp=d, pp=link.stage, cp=c, tp=t)
                for d in lanes(language, block)
                for c in range(language.cp)
                for t in range(language.tp)
            ],
        )
        for block in range(blocks)
    ]


def connect_collectives(groups: Iterable[dist.ProcessGroup]) -> None:
    """Sum a word over each group, which makes NCCL's communicators.

    All ranks of a group call it, with the groups that they share in the same order. Gloo connects
    the ranks of a group when it is made, so there it does nothing.
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
    """Connect every sender with every receiver, and back for gradients.

    Every rank of the two groups calls it, and no other.
    """
    rank = dist.get_rank()
    receivers_of_mine = receivers if rank in senders else ()
    senders_of_mine = senders if rank in receivers else ()
    _connect(forward, receivers_of_mine, senders_of_mine)
    _connect(backward, senders_of_mine, receivers_of_mine)


def connect_all(group: dist.ProcessGroup) -> None:
    """Connect every pair of ranks of a group: those that share out rows. All of them call it."""
    ranks = dist.get_process_group_ranks(group)
    _connect(group, ranks, ranks)


def connect_stages(pipeline: dist.ProcessGroup, interleaved: bool) -> None:
    """Connect the stages of a pipeline with their neighbours; every stage calls it.

    Batches of messages have the whole group's connections. An interleaved pipeline, whose last
    stage also sends to the first, sends messages one by one. A pair of ranks has connections of
    its own for those; with two stages Megatron also takes the world's for one direction.
    """
    ranks = dist.get_process_group_ranks(pipeline)
    own, last = pipeline.rank(), len(ranks) - 1
    if not interleaved:
        beside = [ranks[stage] for stage in (own - 1, own + 1) if 0 <= stage <= last]
        _connect(pipeline, beside, beside)
        return
    world = dist.group.WORLD
    assert world is not None, "the world exists before its groups"
    _connect_ring(pipeline, (pipeline, world) if last == 1 else (pipeline,))


def connect_context(group: dist.ProcessGroup) -> None:
    """Connect a ring of context-parallel ranks, in which Transformer Engine passes keys on.

    All ranks of the group call it. Two ranks send batches, more of them single messages.
    """
    if group.size() == 2:
        connect_all(group)
    else:
        _connect_ring(group, [group])


def _connect_ring(ring: dist.ProcessGroup, groups: Collection[dist.ProcessGroup]) -> None:
    """Connect each rank of a ring with the next one for single messages in ``groups``."""
    ranks = dist.get_process_group_ranks(ring)
    own, last = ring.rank(), len(ranks) - 1
    pairs = {(place, place + 1) for place in range(last)} | {(0, last)}
    # Pair after pair in one order everywhere, so that no two ranks wait for each other's next one.
    for pair in sorted(pair for pair in pairs if own in pair):
        (other,) = {ranks[place] for place in pair} - {ranks[own]}
        for group in groups:
            sent, received = _word(), _word()
            calls = [(dist.isend, sent), (dist.irecv, received)]
            works = [
                call(word, other, group) for call, word in calls[:: 1 if own == pair[0] else -1]
            ]
            for work in works:
                assert work is not None, "both ranks are in the group"
                work.wait()


def _connect(group: dist.ProcessGroup, to: Collection[int], source: Collection[int]) -> None:
    """One batch of a word to each rank of ``to`` and from each of ``source``, but to itself.

    As one batch, because one after another ranks could wait for each other in a circle.
    """
    rank = dist.get_rank()
    calls = [(dist.irecv, peer) for peer in source] + [(dist.isend, peer) for peer in to]
    operations = [dist.P2POp(call, _word(), peer, group) for call, peer in calls if peer != rank]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _word() -> torch.Tensor:
    return torch.zeros(1, device=local_device())
