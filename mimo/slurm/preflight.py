"""`mimo preflight`: check the nodes of a job within two minutes, before its ranks train.

Each rank checks its node; then the ranks of each tensor-parallel group and of each edge of a bridge
measure their bandwidth. Results go to rank 0 through the store of the rendezvous, so that a rank
or a network that is stuck does not delay the report.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from braceexpand import braceexpand

from data.index.remote import is_remote
from data.index.shards import find_shards
from mimo import device
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.errors import InputError, StartError
from mimo.model.dataset import SPLITS, sources_of
from mimo.model.recipe_checks import check_recipe
from mimo.ops.acceleration import LOADS, NOT_INSTALLED, kernel_states
from mimo.parallel.connections import bridge_ends
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import RankEnv, hosts_of, launch, node_name, rank_environment
from mimo.runtime.rendezvous import Refused, Rendezvous
from mimo.runtime.run_files import versions

_JOIN_SECONDS = 120.0  # in which all ranks must join: containers start slowly
_VISIBLE_SECONDS = 10.0  # in which other nodes must see a new file
_MEASURE_SECONDS = 60.0  # after which a rank that still measures is stuck
_SKEW_SECONDS = 1.0
_MESSAGE_BYTES, _NUM_TRIES = 8 * 2**20, 3


@dataclass
class Facts:
    """One rank's view of its node.

    same: versions that must not differ between nodes. problems: sentences. gpu: the identity of its
    GPU, or "". kernels: which attention kernels load on it. free: bytes of memories and folders.
    clock: seconds since 1970 at a common moment. speeds: bytes per second by name of the link.
    """

    rank: int
    node: str
    problems: list[str] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    gpu: str = ""
    kernels: str = ""
    free: dict[str, int] = field(default_factory=dict)
    clock: float = 0.0
    speeds: dict[str, float] = field(default_factory=dict)


def find_faults(ranks: Sequence[Facts | None], hosts: Sequence[str] = ()) -> Iterator[str]:
    """Yield what is wrong, and where. ranks: None for an absent one. hosts: of the job."""
    facts = [rank for rank in ranks if rank is not None]
    if missing := [number for number, rank in enumerate(ranks) if rank is None]:
        yield f"rank{'s' * (len(missing) > 1)} {_listed(missing)} did not join"
        if silent := [host for host in hosts if host not in {f.node for f in facts}]:
            yield f"{_listed(silent)}: no rank joined"
    for key in dict.fromkeys(key for f in facts for key in f.same):
        nodes = _nodes_by((f.same[key], f.node) for f in facts if key in f.same)
        values = sorted(nodes.items(), key=lambda pair: len(pair[1]))
        if len(values) > 1:
            yield f"{key} is {', but '.join(f'{v} on {_listed(names)}' for v, names in values)}"
    for (node, _), count in Counter((f.node, f.gpu) for f in facts if f.gpu).items():
        if count > 1:
            yield f"{node}: {count} ranks share a GPU"
    for text, names in _nodes_by((text, f.node) for f in facts for text in f.problems).items():
        yield f"{_listed(names)}: {text}"


def _nodes_by(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the nodes of each text."""
    nodes = defaultdict[str, list[str]](list)
    for text, node in pairs:
        nodes[text].append(node)
    return nodes


def _listed(items: Iterable[object]) -> str:
    names = [*dict.fromkeys(map(str, items))]
    return f"{', '.join(names[:8])}{', ...' * (len(names) > 8)}"


def _hosts() -> list[str]:
    """Return the hosts of the job; a heterogeneous job has a list for each component."""
    names = [n for n in sorted(os.environ) if n.startswith("SLURM_JOB_NODELIST_HET_GROUP_")]
    lists = [os.environ[n] for n in (*names, "SLURM_STEP_NODELIST") if n in os.environ]
    return [*dict.fromkeys(host for nodes in lists for host in hosts_of(nodes))]


def report_lines(facts: Sequence[Facts], faults: Sequence[str]) -> Iterator[str]:
    """Yield the report for people."""
    yield f"preflight: {len(facts)} ranks on {_listed(f.node for f in facts)}"
    for name in dict.fromkeys(name for f in facts for name in f.free):
        size, node = min((f.free[name], f.node) for f in facts if name in f.free)
        yield f"  {name}: {size / 2**30:.1f} GiB free at least ({node})"
    yield from dict.fromkeys(f"  kernels: {f.kernels}" for f in facts if f.kernels)
    for name in dict.fromkeys(name for f in facts for name in f.speeds):
        speed, rank = min((f.speeds[name], f.rank) for f in facts if name in f.speeds)
        yield f"  {name}: at least {speed / 1e9:.2f} GB/s (rank {rank})"
    median = statistics.median(f.clock for f in facts)
    for node, ahead in {f.node: f.clock - median for f in facts}.items():
        if abs(ahead) > _SKEW_SECONDS:
            yield f"note: {node}: its clock differs by {ahead:+.1f} s"
    yield from (f"BROKEN: {fault}" for fault in faults)
    yield f"preflight: {'do not begin' if faults else 'ok'}"


def _conclude(ranks: Sequence[Facts | None]) -> int:
    """Print the report; return the exit code."""
    facts, faults = [rank for rank in ranks if rank is not None], [*find_faults(ranks, _hosts())]
    print("\n".join(report_lines(facts, faults)), flush=True)
    return int(bool(faults))


# ------------------------------------------------------------------------------- whole check


def main(
    path: Path, overrides: Sequence[str], num_ranks: int | None = None, site: Path | None = None
) -> int:
    """Check this machine, or be one rank of a srun or torchrun job; return an exit code.

    site: a file whose keys are merged over the recipe's `cluster:`.
    """
    environment = rank_environment()
    if environment is not None:
        code = be_a_rank(path, overrides, site, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal exit could wait for a backend that waits for other ranks
    _, layout = _read(path, overrides, site, num_ranks)
    if (note := device.choose_before_fork(layout.world_size)) is not None:
        print(note)
    arguments = (path, tuple(overrides), site)
    return launch(f"{__name__}:be_a_rank", arguments, layout.world_size, (__name__,))


def be_a_rank(
    path: Path, overrides: Sequence[str], site: Path | None, environment: RankEnv | None = None
) -> int:
    """Check this rank's node together with all other ranks; return the same code on all of them."""
    environment = environment or rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    facts = Facts(environment.rank, node_name())
    checked, problem = None, None
    try:
        checked = _read(path, overrides, site, environment.world_size)
    except InputError as error:
        problem = error
        facts.problems.append(str(problem))
    try:
        meeting = Rendezvous(environment, _JOIN_SECONDS)
    except InputError as error:  # rank 0 is not there
        if environment.local_rank == 0:
            print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    run_dir = None if checked is None else checked[0].run_dir

    def gather() -> list[Facts | None]:
        """Return the facts of all ranks on rank 0, none elsewhere."""
        texts = meeting.gather(json.dumps(asdict(facts)))
        return [None if text is None else Facts(**json.loads(text)) for text in texts]

    def is_sound() -> bool:
        if probe:
            probe.unlink()
        if problem is not None and all(f is None or f.problems == facts.problems for f in ranks):
            raise problem
        return not [*find_faults(ranks)]

    try:
        probe = meeting.from_rank_0(lambda: run_dir and _write_probe(run_dir / "launch"))
        if checked is not None and probe is not None:
            _check_node(facts, *checked, environment, probe)
        ranks = gather()
        if meeting.from_rank_0(is_sound) and checked is not None:
            _measure_in_time(facts, checked[1], environment, meeting)
            ranks = gather()
        return meeting.from_rank_0(lambda: _conclude(ranks))
    except Refused as refused:
        return refused.exit_code
    finally:
        meeting.leave()


def _read(
    path: Path, overrides: Sequence[str], site: Path | None, num_ranks: int | None
) -> tuple[PhasedRecipe, Layout]:
    """Read all phases, and the layout of the largest one. Raises InputError."""
    phased = load_phases(path, overrides, site)
    layouts = phased.each(lambda recipe: check_recipe(recipe, num_ranks))
    return phased, max(layouts, key=lambda layout: layout.world_size)


def _write_probe(folder: Path) -> Path:
    """Write a file that all nodes must see. Raises StartError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".preflight-{os.getpid()}"
        probe.touch()
        return probe
    except OSError as error:
        raise StartError(f"{folder}: cannot write there: {error}") from error


def _check_node(
    facts: Facts, phased: PhasedRecipe, layout: Layout, environment: RankEnv, probe: Path
) -> None:
    """Check this rank's node; the first rank of a node also checks what its ranks share.

    probe: a file that rank 0 has just written.
    """
    gpu, problems = None, facts.problems
    try:
        gpu = device.gpu_of(environment.local_rank)
    except Exception as error:  # a broken driver may raise anything
        problems.append(f"its GPU does not work: {error}".splitlines()[0])
    cluster = phased.phases[0].recipe.cluster
    is_explicit = "gpus_per_node" in cluster.model_fields_set or "SLURM_STEP_ID" in os.environ
    if gpu is not None:
        states = kernel_states()
        facts.gpu, facts.free["GPU"] = gpu.identity, gpu.free
        facts.same[f"GPU of {' and '.join(layout.modules_of(facts.rank))}"] = gpu.name
        facts.kernels = ", ".join(f"{name} {state}" for name, state in states.items())
        problems += {*states.values()} - {LOADS, NOT_INSTALLED}
    elif is_explicit and cluster.gpus_per_node > 0 and not problems:
        problems.append("it sees no GPU, but cluster.gpus_per_node asks for them")
    facts.same["device"] = "CPU" if gpu is None else "GPU"
    if environment.local_rank == 0:
        facts.same |= versions() | {"python": platform.python_version()}
        facts.same |= device.library_versions()
        for phase in phased.phases:
            problems += _unreadable(phase.recipe)
        facts.free["run folder"] = shutil.disk_usage(probe.parent).free
        facts.free["memory"] = device.machine_memory().available
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not probe.exists():
        if time.monotonic() > deadline:
            problems.append(
                f"{probe.parent}: it does not see a file of rank 0 within {_VISIBLE_SECONDS:g} s; "
                f"put the run folder on a file system of all nodes"
            )
            return
        time.sleep(0.1)


def _unreadable(recipe: Recipe) -> Iterator[str]:
    """Name the folders and shards of a recipe that this node cannot read."""
    folders = {"init_from": recipe.init_from, "data.tokenizer": recipe.data.tokenizer}
    for key, folder in folders.items():
        try:
            if folder is not None and not os.listdir(folder):
                yield f"{key}: {folder} is empty"
        except OSError as error:
            yield f"{key}: {folder} cannot be read: {error}"
    for split in SPLITS:
        for path in (source.path for source in sources_of(recipe, split)):
            try:
                # At a URL only the first: many nodes would ask for all shards at once.
                find_shards(next(braceexpand(path, escape=False)) if is_remote(path) else path)
            except ValueError as error:
                yield f"data.{split}: {error}"


# -------------------------------------------------------------------------------- bandwidth


def links_of(layout: Layout) -> dict[str, list[tuple[int, int]]]:
    """Return pairs of sender and receiver in tensor-parallel groups and bridges, by name."""
    pairs = defaultdict[str, list[tuple[int, int]]](list)
    for name, grid in layout.grids.items():
        for first in grid.ranks[:: grid.tp] if grid.tp > 1 else ():
            ring = [(first + n, first + (n + 1) % grid.tp) for n in range(grid.tp)]
            pairs[f"tp of {name}"] += ring
    for edge in (edge for name in layout.encoders for edge in layout.links_of(name)):
        for senders, receivers in bridge_ends(layout, edge):
            ends = zip(cycle(senders), cycle(receivers), strict=False)
            crossing = islice(ends, max(len(senders), len(receivers)))
            pairs[f"bridge of {edge.name}"] += [(a, b) for a, b in crossing if a != b]
    return pairs


def _measure_in_time(
    facts: Facts, layout: Layout, environment: RankEnv, meeting: Rendezvous
) -> None:
    """Measure clock and bandwidths; add a problem if that fails or takes too long."""
    rank, size, local_rank = environment.rank, environment.world_size, environment.local_rank
    device.initialize_distributed(rank, size, meeting.store, 2 * _MEASURE_SECONDS, local_rank)

    def measure() -> None:
        try:
            _measure(facts, layout, local_rank)
        except Exception as error:
            facts.problems.append(f"rank {rank} cannot talk: {error}".splitlines()[0])

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(_MEASURE_SECONDS)
    if thread.is_alive():
        facts.problems.append(f"rank {rank} cannot talk within {_MEASURE_SECONDS:g} s")


def _measure(facts: Facts, layout: Layout, local_rank: int) -> None:
    """Measure links, those of one name at a time. Every rank of the world calls it."""
    place = device.local_device(local_rank)  # a thread has its own current device
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=place)
    device.barrier()
    facts.clock = time.time()
    for name, pairs in links_of(layout).items():
        sends = [(dist.isend, b) for a, b in pairs if a == facts.rank]
        receives = [(dist.irecv, a) for a, b in pairs if b == facts.rank]
        num_bytes = max(len(sends), len(receives)) * _MESSAGE_BYTES
        for _ in range(_NUM_TRIES):
            messages = [(call, message.clone(), peer) for call, peer in sends + receives]
            operations = [dist.P2POp(*parts) for parts in messages]
            device.barrier()
            start = time.perf_counter()
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            device.synchronize()
            speed = num_bytes / (time.perf_counter() - start)
            if operations:
                facts.speeds[name] = max(speed, facts.speeds.get(name, 0.0))
