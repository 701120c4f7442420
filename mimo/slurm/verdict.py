"""What is wrong with which node: rules on what ranks have found out, in plain figures.

A difference is the fault of the nodes that are fewer. A slow node is one whose best link is far
slower than the best links of other nodes: its neighbours' links to it are slow as well, but they
have others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mimo.slurm.links import Link

_SLOWER = 4.0  # times the median is slow
_LATENCY_SLOWER, _LATENCY_SECONDS = 10.0, 1e-3  # and so much more than the median
_SKEW_SECONDS = 1.0
_FEWEST = 3  # nodes of which one can be odd

Scope = Literal["within a node", "between nodes"]


@dataclass(frozen=True)
class Facts:
    """What a rank has found out by itself.

    same: what has to be alike on all nodes, by name. problems: sentences. gpu: identity of its
    GPU; empty without. free: bytes of memories and folders.
    """

    rank: int
    node: str
    same: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    gpu: str = ""
    free: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """text: a sentence. node: whose fault it is; empty where that is not known.

    is_note: no reason not to begin.
    """

    text: str
    node: str = ""
    is_note: bool = False


def absent(present: Mapping[int, str], hosts: Sequence[str], num_ranks: int) -> Iterator[Finding]:
    """Ranks that have not come. present: nodes of those that have. hosts: of the job, if known."""
    missing = [rank for rank in range(num_ranks) if rank not in present]
    if not missing:
        return
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    silent = [host for host in hosts if host not in present.values()]
    where = f", those of {', '.join(silent)} among them" if silent else ""
    yield Finding(f"{ranks} did not join{where}")
    for host in silent:
        yield Finding("none of its ranks joined", host)


def differences(facts: Iterable[Facts]) -> Iterator[Finding]:
    """What is not alike on all nodes, and GPUs that two ranks share."""
    nodes_of = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    ranks_of = defaultdict[tuple[str, str], list[int]](list)
    for one in facts:
        for key, value in one.same.items():
            if one.node not in nodes_of[key][value]:
                nodes_of[key][value].append(one.node)
        if one.gpu:
            ranks_of[one.node, one.gpu].append(one.rank)
    for key, found in nodes_of.items():
        if len(found) < 2:
            continue
        usual, nodes = max(found.items(), key=lambda pair: len(pair[1]))
        if 2 * len(nodes) <= sum(map(len, found.values())):
            told = "; ".join(f"{value} on {', '.join(on)}" for value, on in found.items())
            yield Finding(f"{key} differs: {told}")
            continue
        for value, odd in found.items():
            for node in odd if value != usual else ():
                yield Finding(f"{key} is {value}, but {usual} on {len(nodes)} other nodes", node)
    for (node, _), ranks in ranks_of.items():
        if len(ranks) > 1:
            yield Finding(f"ranks {', '.join(map(str, ranks))} share a GPU", node)


def skews(clocks: Mapping[int, Sequence[float]], node_of: Sequence[str]) -> dict[str, float]:
    """Seconds that each node's clock is ahead of the median.

    clocks: of ranks, seconds since 1970 at moments that they have in common.
    """
    moments = [statistics.median(times) for times in zip(*clocks.values(), strict=True)]
    found = dict[str, float]()
    for rank, times in clocks.items():
        ahead = [one - moment for one, moment in zip(times, moments, strict=True)]
        found.setdefault(node_of[rank], statistics.median(ahead) if ahead else 0.0)
    return found


def odd_clocks(found: Mapping[str, float]) -> Iterator[Finding]:
    """Notes on clocks that would put logs out of order."""
    for node, ahead in found.items():
        if abs(ahead) > _SKEW_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            text = f"its clock is {abs(ahead):.1f} s {way} the others'"
            yield Finding(text, node, is_note=True)


def slow(links: Sequence[Link], node_of: Sequence[str]) -> Iterator[Finding]:
    """Nodes that are slow; then single slow links of other nodes, which are notes."""
    named = set[str]()
    for scope, own in by_scope(links, node_of).items():
        for what, most in (("seconds a byte", _too_slow), ("latency", _too_late)):
            figures = {link: _figure(link, what) for link in own}
            nodes = _of_nodes(figures, node_of, scope)
            if len(nodes) < _FEWEST:
                continue
            limit = most(median := statistics.median(nodes.values()))
            for node, figure in nodes.items():
                if figure > limit:
                    named.add(node)
                    told, usual = _told(what, figure), _told(what, median)
                    yield Finding(f"slow {scope}: {told}, the median node has {usual}", node)
            for link, figure in figures.items():
                a, b = link.pair.a, link.pair.b
                if figure > limit and not {node_of[a], node_of[b]} & named:
                    text = f"slow link of ranks {a} on {node_of[a]} and {b} on {node_of[b]}"
                    yield Finding(f"{text}: {_told(what, figure)}", is_note=True)


def by_scope(links: Iterable[Link], node_of: Sequence[str]) -> dict[Scope, list[Link]]:
    """Links inside of nodes, which differ by nature from those between them."""
    found: dict[Scope, list[Link]] = {"within a node": [], "between nodes": []}
    for link in links:
        is_within = node_of[link.pair.a] == node_of[link.pair.b]
        found["within a node" if is_within else "between nodes"].append(link)
    return found


def _figure(link: Link, what: str) -> float:
    """Smaller is better."""
    return link.latency_seconds if what == "latency" else 1 / link.bytes_per_second


def _too_slow(median: float) -> float:
    return _SLOWER * median


def _too_late(median: float) -> float:
    return max(_LATENCY_SLOWER * median, median + _LATENCY_SECONDS)


def _told(what: str, figure: float) -> str:
    return f"{figure * 1e6:.0f} us" if what == "latency" else f"{1e-9 / figure:.2f} GB/s"


def _of_nodes(
    figures: Mapping[Link, float], node_of: Sequence[str], scope: Scope
) -> dict[str, float]:
    """A node's network is as good as its best link; inside, it is as good as its worst rank."""
    best = dict[int, float]()
    for link, figure in figures.items():
        for rank in (link.pair.a, link.pair.b):
            best[rank] = min(figure, best.get(rank, figure))
    found = dict[str, float]()
    choose = min if scope == "between nodes" else max
    for rank, figure in best.items():
        node = node_of[rank]
        found[node] = choose(figure, found.get(node, figure))
    return found


def in_words(findings: Sequence[Finding], present: Sequence[str]) -> list[str]:
    """Lines for people: each sentence once, with its nodes; last what to leave out."""
    nodes_of = defaultdict[tuple[str, bool], list[str]](list)
    for one in dict.fromkeys(findings):
        nodes_of[one.text, one.is_note] += [one.node] if one.node else []
    lines = []
    for (text, is_note), nodes in sorted(nodes_of.items(), key=lambda pair: pair[0][1]):
        where = ", ".join(nodes) if len(nodes) < max(2, len(present)) else "all nodes"
        lines.append(f"{'note' if is_note else 'BROKEN'}: {where}{': ' * bool(nodes)}{text}")
    if named := to_exclude(findings, present):
        lines.append(f"leave out: --exclude={','.join(named)}")
    return lines


def to_exclude(findings: Iterable[Finding], present: Iterable[str]) -> list[str]:
    """The nodes whose fault something is; none if no other node is left. present: who has come."""
    named = {one.node for one in findings if one.node and not one.is_note}
    return sorted(named) if set(present) - named else []
