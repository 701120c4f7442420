"""What one rank of `mimo preflight` checks on its node, and how it measures bandwidth."""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from data.index.remote import is_remote
from data.index.shards import find_shards, without_braces
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.device import (
    Memory,
    barrier,
    gpu_of,
    library_versions,
    local_device,
    machine_memory,
    synchronize,
)
from mimo.errors import RecipeError
from mimo.model.dataset import SPLITS, sources_of
from mimo.model.memory import check_memory
from mimo.ops.acceleration import LOADS, NOT_INSTALLED, kernel_states
from mimo.parallel.connections import bridge_ends
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import RankEnv, node_name
from mimo.runtime.run_files import versions

_SEEN_SECONDS = 10.0  # in which other nodes must see a new file
_BYTES, _NUM_TRIES = 8 * 2**20, 3  # of one message


@dataclass(frozen=True)
class Facts:
    """What one rank has found on its node.

    same: versions and files that must not differ between nodes. problems: sentences. gpu: the
    identity of its GPU, or "". kernels: of its GPU, whether they load. free: bytes of memories and
    folders.
    """

    rank: int
    node: str
    same: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    gpu: str = ""
    kernels: str = ""
    free: Mapping[str, int] = field(default_factory=dict)


type Link = tuple[str, tuple[tuple[int, int], ...]]
"""Name of a kind of link, and the pairs of sender and receiver: of a group or of an edge."""


@dataclass
class Measured:
    """One rank's measurements; another thread may read them before they are complete.

    clock: seconds since 1970 at a moment that all ranks share. speeds: bytes per second by number
    of the link. doing: the kind of link that is being measured.
    """

    clock: float = 0.0
    speeds: dict[int, float] = field(default_factory=dict)
    doing: str = "first barrier"
    error: str = "no answer"
    is_done: bool = False


def facts_of(
    phased: PhasedRecipe, recipe: Recipe, layout: Layout, environment: RankEnv, probe: Path
) -> Facts:
    """Check this rank's node; the first rank of a node also checks what its ranks share.

    recipe: that of the phase with the layout. probe: a file that rank 0 has just written.
    """
    problems, same, free = list[str](), dict[str, str](), dict[str, int]()
    gpu, memory, kernels = None, None, ""
    ranks = range(environment.rank, environment.rank + 1)
    try:
        gpu = gpu_of(environment.local_rank)
    except Exception as error:  # a broken driver may raise anything
        problems.append(f"its GPU does not work: {error}".splitlines()[0])
    asks_for_gpus = recipe.cluster.gpus_per_node > 0 and (
        "gpus_per_node" in recipe.cluster.model_fields_set or "SLURM_STEP_ID" in os.environ
    )
    if gpu is not None:
        same[f"GPU of {' and '.join(layout.modules_of(environment.rank))}"] = gpu.name
        states = kernel_states()
        kernels = ", ".join(f"{name} {state}" for name, state in states.items())
        problems += set(states.values()) - {LOADS, NOT_INSTALLED}
        free["GPU"], memory = gpu.free, Memory("the GPU of each rank", gpu.free, False)
    elif not problems and asks_for_gpus:
        problems.append("it sees no GPU, but cluster.gpus_per_node asks for them")
    same["device"] = "CPU" if gpu is None else "GPU"
    if environment.local_rank == 0:
        same |= {"python": platform.python_version(), **versions(), **library_versions()}
        problems += _unreadable([phase.recipe for phase in phased.phases])
        free["run folder"] = shutil.disk_usage(probe.parent).free
        free["memory"] = machine_memory().available
        if gpu is None and not problems:
            memory, ranks = machine_memory(), environment.ranks_here
    try:
        if memory is not None:
            check_memory(recipe, layout, ranks, memory)
    except RecipeError as error:
        problems.append(str(error))
    deadline = time.monotonic() + _SEEN_SECONDS
    while not probe.exists():
        if time.monotonic() > deadline:
            problems.append(
                f"{probe.parent}: it does not see a file of rank 0 within {_SEEN_SECONDS:g} s; the "
                f"run folder has to be on a file system of all nodes"
            )
            break
        time.sleep(0.1)
    identity, problems = "" if gpu is None else gpu.identity, [*dict.fromkeys(problems)]
    return Facts(environment.rank, node_name(), same, problems, identity, kernels, free)


def _unreadable(recipes: Sequence[Recipe]) -> Iterator[str]:
    """Name the folders and shards of recipes that this node cannot read."""
    for recipe in recipes:
        folders = {"init_from": recipe.init_from, "data.tokenizer": recipe.data.tokenizer}
        for key, path in folders.items():
            try:
                if path is not None and not os.listdir(path):
                    yield f"{key}: {path} is empty"
            except OSError as error:
                yield f"{key}: {path} cannot be read: {error}"
        for split in SPLITS:
            for source in sources_of(recipe, split):
                # Of shards at URLs only the first: many nodes would ask for all of them at once.
                remote = is_remote(source.path)
                try:
                    find_shards(next(without_braces(source.path)) if remote else source.path)
                except ValueError as error:
                    yield f"data.{split}: {error}"


# -------------------------------------------------------------------------------- bandwidth


def links_of(layout: Layout) -> list[Link]:
    """Return a ring for each tensor-parallel group, and pairs for each edge of a bridge."""
    links = list[Link]()
    for name, grid in layout.grids.items():
        for first in grid.ranks[:: grid.tp] if grid.tp > 1 else ():
            group = range(first, first + grid.tp)
            pairs = zip(group, [*group[1:], first], strict=True)
            links.append((f"tp of {name}", tuple(pairs)))
    for edge in (edge for name in layout.encoders for edge in layout.links_of(name)):
        for senders, receivers in bridge_ends(layout, edge):
            count, m, n = max(len(senders), len(receivers)), len(senders), len(receivers)
            pairs = ((senders[k % m], receivers[k % n]) for k in range(count))
            if crossing := tuple((a, b) for a, b in pairs if a != b):
                links.append((f"bridge of {edge.name}", crossing))
    return links


def measure(measured: Measured, links: Sequence[Link], rank: int, local_rank: int) -> None:
    """Measure all links of one name at a time. Every rank of the world calls it."""
    try:
        device = local_device(local_rank)  # a thread has its own
        barrier()
        measured.clock = time.time()
        for kind in dict.fromkeys(kind for kind, _ in links):
            measured.doing = kind
            numbers = [n for n, (other, _) in enumerate(links) if other == kind]
            pairs = [pair for n in numbers for pair in links[n][1]]
            sends = [b for a, b in pairs if a == rank]
            receives = [a for a, b in pairs if b == rank]
            best = math.inf
            for _ in range(_NUM_TRIES):
                calls = [(dist.isend, b) for b in sends] + [(dist.irecv, a) for a in receives]
                operations = [
                    dist.P2POp(call, torch.zeros(_BYTES, dtype=torch.uint8, device=device), peer)
                    for call, peer in calls
                ]
                barrier()
                start = time.perf_counter()
                for work in dist.batch_isend_irecv(operations) if operations else ():
                    work.wait()
                synchronize()
                best = min(best, time.perf_counter() - start)
            num_bytes = max(len(sends), len(receives)) * _BYTES
            measured.speeds |= {n: num_bytes / best for n in numbers if rank in ranks_of(links[n])}
        measured.is_done = True
    except Exception as error:  # reported by the thread that waits for this one
        measured.error = f"{type(error).__name__}: {error}".splitlines()[0]


def ranks_of(link: Link) -> list[int]:
    """Return the ranks of a link, ascending."""
    return sorted({rank for pair in link[1] for rank in pair})
