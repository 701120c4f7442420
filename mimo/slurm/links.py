"""How fast ranks talk: which pairs are tried, in which rounds, and what a pair measures.

Not all pairs of a large job: of each tensor-parallel group the neighbours in a ring, of each edge
of a bridge one pair for each two nodes, and a ring of all nodes. A rank, and a node's network, has
one pair at a time, so that pairs do not measure each other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from mimo.device import barrier, local_device, synchronize
from mimo.parallel.connections import bridge_ends
from mimo.parallel.grids import Layout

_SMALL, _LARGE = 8, 8 * 2**20  # bytes of a message
_NUM_SMALL, _NUM_LARGE = 30, 4
_NUM_CLOCKS = 5


@dataclass(frozen=True)
class Pair:
    """Two ranks that are to talk. kind: why, such as `tp of language`."""

    kind: str
    a: int
    b: int


@dataclass(frozen=True)
class Link:
    """What a pair measured. latency_seconds: of a small message, one way."""

    pair: Pair
    latency_seconds: float
    bytes_per_second: float


@dataclass
class Measured:
    """What a rank has found out so far; another thread may look.

    links: of the pairs whose first it is. clock: seconds since 1970, at moments that all ranks
    have in common. now: with whom it talks. error: of the talk that failed.
    """

    links: list[Link]
    clock: list[float]
    now: Pair | None = None
    error: str = ""
    num_left_out: int = 0
    is_done: bool = False


def pairs_of(layout: Layout, node_of: Sequence[str]) -> list[Pair]:
    """The pairs to try, each two ranks once. node_of: the node of each rank."""
    found = dict[frozenset[int], Pair]()
    for pair in (*_tensor_parallel(layout), *_bridges(layout, node_of), *_nodes(node_of)):
        found.setdefault(frozenset((pair.a, pair.b)), pair)
    return [*found.values()]


def _tensor_parallel(layout: Layout) -> Iterator[Pair]:
    for name, grid in layout.grids.items():
        for first in range(grid.ranks.start, grid.ranks.stop, grid.tp):
            yield from _ring(f"tp of {name}", range(first, first + grid.tp))


def _bridges(layout: Layout, node_of: Sequence[str]) -> Iterator[Pair]:
    """Every two nodes of an edge once, by other ranks of theirs each time."""
    every = [link for name in layout.encoders for link in layout.links_of(name)]
    for link, ends in ((one, ends) for one in every for ends in bridge_ends(layout, one)):
        senders, receivers = (_by_node(ranks, node_of) for ranks in ends)
        for i, own in enumerate(senders.values()):
            for j, others in enumerate(receivers.values()):
                a, b = own[j % len(own)], others[i % len(others)]
                if a != b:
                    yield Pair(f"bridge of {link.name}", a, b)


def _nodes(node_of: Sequence[str]) -> Iterator[Pair]:
    nodes = _by_node(range(len(node_of)), node_of)
    return _ring("nodes", [ranks[0] for ranks in nodes.values()])


def _ring(kind: str, ranks: Sequence[int]) -> Iterator[Pair]:
    last = [(ranks[-1], ranks[0])] if len(ranks) > 2 else []
    return (Pair(kind, a, b) for a, b in (*pairwise(ranks), *last))


def _by_node(ranks: Sequence[int], node_of: Sequence[str]) -> dict[str, list[int]]:
    found = defaultdict[str, list[int]](list)
    for rank in ranks:
        found[node_of[rank]].append(rank)
    return found


def rounds_of(pairs: Sequence[Pair], node_of: Sequence[str]) -> list[list[Pair]]:
    """The same pairs in rounds: at one time a rank has one, and so has a node's network."""
    rounds, taken = list[list[Pair]](), list[set[object]]()
    for pair in pairs:
        busy: set[object] = {pair.a, pair.b}
        if node_of[pair.a] != node_of[pair.b]:
            busy |= {node_of[pair.a], node_of[pair.b]}
        place = next((n for n, others in enumerate(taken) if not busy & others), len(rounds))
        if place == len(rounds):
            rounds.append([])
            taken.append(set())
        rounds[place].append(pair)
        taken[place] |= busy
    return rounds


def measure(
    found: Measured, rounds: Sequence[Sequence[Pair]], seconds: float, rank: int, local_rank: int
) -> None:
    """Talk to the other ranks of this one's pairs; every rank of the world calls it.

    found: gets what is known. seconds: after which no further round begins, on any rank.
    """
    device = local_device(local_rank)  # a thread has its own
    began = time.monotonic()
    try:
        for _ in range(_NUM_CLOCKS):
            barrier()
            found.clock.append(time.time())
        for number, pairs in enumerate([*rounds, *rounds]):  # what is slow once may be so by chance
            passed = torch.tensor(time.monotonic() - began, device=device)
            dist.all_reduce(passed, op=dist.ReduceOp.MAX)
            if passed.item() > seconds:
                found.num_left_out = sum(map(len, rounds[number:]))
                break
            for pair in pairs:
                if rank in (pair.a, pair.b):
                    found.now = pair
                    link = _talk(pair, rank == pair.a)
                    if rank == pair.a:
                        found.links.append(link)
                    found.now = None
        found.is_done = True
    except Exception as error:  # told by the thread that waits for this one
        found.error = f"{type(error).__name__}: {error}".splitlines()[0]


def best_of(links: Iterable[Link]) -> list[Link]:
    """One link for each pair, with the best that was ever measured."""
    found = dict[Pair, Link]()
    for link in links:
        known = found.get(link.pair, link)
        found[link.pair] = Link(
            link.pair,
            min(known.latency_seconds, link.latency_seconds),
            max(known.bytes_per_second, link.bytes_per_second),
        )
    return [*found.values()]


def _talk(pair: Pair, begins: bool) -> Link:
    small, large = (
        torch.zeros(size, dtype=torch.uint8, device=local_device()) for size in (_SMALL, _LARGE)
    )

    def there_and_back(message: torch.Tensor) -> None:
        if begins:
            _move(dist.isend, message, pair.b)
            _move(dist.irecv, small, pair.b)
        else:
            _move(dist.irecv, message, pair.a)
            _move(dist.isend, small, pair.a)
        synchronize()

    there_and_back(large)  # connects
    latency = min(_times(lambda: there_and_back(small), _NUM_SMALL)) / 2
    fastest = min(_times(lambda: there_and_back(large), _NUM_LARGE))
    return Link(pair, latency, _LARGE / max(fastest - latency, 1e-9))


def _move(call: Callable[..., dist.Work | None], message: torch.Tensor, peer: int) -> None:
    # One by one NCCL would make a communicator of each pair.
    for work in dist.batch_isend_irecv([dist.P2POp(call, message, peer)]):
        work.wait()


def _times(do: Callable[[], None], number: int) -> list[float]:
    found = []
    for _ in range(number):
        began = time.perf_counter()
        do()
        found.append(time.perf_counter() - began)
    return found
