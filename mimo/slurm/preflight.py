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
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
import torch.distributed as dist

from mimo import device
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import PhasedRecipe
from mimo.errors import InputError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.connections import bridge_ends
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import RankEnv, end_at_once, launch, node_name, rank_environment
from mimo.runtime.rendezvous import Refused, Rendezvous
from mimo.runtime.run_files import versions
from mimo.slurm.script import folders_read

_JOIN_SECONDS = 120.0  # in which all ranks must join: containers start slowly
_VISIBLE_SECONDS = 10.0  # in which other nodes must see a new file
_MEASURE_SECONDS = 60.0  # after which a rank that still measures is stuck
_SKEW_SECONDS = 1.0
_MESSAGE_BYTES, _NUM_TRIES = 8 * 2**20, 3


@dataclass
class Facts:
    """One rank's view of its node.

    exit_code: of its problems, which are sentences. same: what must not differ between nodes.
    figures: free GiB and bandwidths, by name. clock: seconds since 1970 at a common moment.
    """

    rank: int
    node: str
    exit_code: int = 1
    problems: list[str] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    clock: float = 0.0


def find_faults(ranks: Sequence[Facts | None]) -> Iterator[str]:
    """Yield what is wrong, and where. ranks: None for an absent one."""
    facts = [rank for rank in ranks if rank is not None]
    if missing := [number for number, rank in enumerate(ranks) if rank is None]:
        yield f"rank{'s' * (len(missing) > 1)} {_listed(missing)} did not join"
    nodes_by_value = defaultdict[str, dict[str, list[str]]](dict)
    nodes_by_problem: dict[str, list[str]] = {}
    for f in facts:
        for key, value in f.same.items():
            nodes_by_value[key].setdefault(value, []).append(f.node)
        for problem in f.problems:
            nodes_by_problem.setdefault(problem, []).append(f.node)
    for key, nodes in nodes_by_value.items():
        if len(nodes) > 1:
            places = (f"{value} on {_listed(names)}" for value, names in nodes.items())
            yield f"{key} is {', but '.join(places)}"
    yield from (f"{_listed(names)}: {text}" for text, names in nodes_by_problem.items())


def _listed(items: Iterable[object]) -> str:
    names = [*dict.fromkeys(map(str, items))]
    return f"{', '.join(names[:8])}{', ...' * (len(names) > 8)}"


def report(ranks: Sequence[Facts | None]) -> int:
    """Print the report; return the exit code, that of bad input if no rank can read the recipe."""
    facts, faults = [rank for rank in ranks if rank is not None], [*find_faults(ranks)]
    lines = [f"preflight: {len(facts)} ranks on {_listed(f.node for f in facts)}"]
    for name in dict.fromkeys(name for f in facts for name in f.figures):
        least = min((f for f in facts if name in f.figures), key=lambda f: f.figures[name])
        value, place = least.figures[name], f"rank {least.rank} on {least.node}"
        lines.append(f"  {name}: at least {value:.2f} ({place})")
    median = statistics.median(f.clock for f in facts)
    for node, ahead in {f.node: f.clock - median for f in facts}.items():
        if abs(ahead) > _SKEW_SECONDS:
            lines.append(f"note: {node}: its clock differs by {ahead:+.1f} s")
    lines += [f"BROKEN: {fault}" for fault in faults]
    print("\n".join([*lines, f"preflight: {'do not begin' if faults else 'ok'}"]), flush=True)
    return min(f.exit_code for f in facts) if faults else 0


# ------------------------------------------------------------------------------- whole check


def main(path: Path, overrides: Sequence[str], num_ranks: int | None, site: Path | None) -> int:
    """Check this machine, or be one rank of a srun or torchrun job; return an exit code.

    site: a file whose keys are merged over the recipe's `cluster:`.
    """
    if rank_environment() is not None:
        # A normal exit could wait for a backend that waits for other ranks.
        return end_at_once(be_a_rank(path, overrides, site))
    _, layout = _read(path, overrides, site, num_ranks)
    if (note := device.choose_before_fork(layout.world_size)) is not None:
        print(note)
    args = (path, tuple(overrides), site)
    return launch(f"{__name__}:be_a_rank", args, layout.world_size, (__name__,))


def be_a_rank(path: Path, overrides: Sequence[str], site: Path | None) -> int:
    """Check this rank's node together with all other ranks; return the same code on all of them."""
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    meeting = Rendezvous(environment, _JOIN_SECONDS)
    facts, checked, probe = Facts(environment.rank, node_name()), None, None
    try:
        checked = _read(path, overrides, site, environment.world_size)
        if environment.rank == 0:
            folder = checked[0].run_dir / "launch"
            folder.mkdir(parents=True, exist_ok=True)
            probe = Path(tempfile.mkstemp(prefix=".preflight-", dir=folder)[1])
    except InputError as error:
        facts.problems.append(str(error))
        facts.exit_code = error.exit_code
    except OSError as error:
        facts.problems.append(f"the run folder: {error}")

    def gather() -> list[Facts | None]:
        """Return the facts of all ranks on rank 0, none elsewhere."""
        texts = meeting.gather(json.dumps(asdict(facts)))
        return [None if text is None else Facts(**json.loads(text)) for text in texts]

    try:
        probe = meeting.from_rank_0(lambda: probe)
        if checked and probe:
            _check_node(facts, *checked, environment.local_rank, probe)
        ranks = gather()
        if probe and environment.rank == 0:
            probe.unlink()
        if meeting.from_rank_0(lambda: not [*find_faults(ranks)]) and checked:
            _measure_in_time(facts, checked[1], environment, meeting)
            ranks = gather()
        return meeting.from_rank_0(lambda: report(ranks))
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


def _check_node(
    facts: Facts, phased: PhasedRecipe, layout: Layout, local_rank: int, probe: Path
) -> None:
    """Check this rank's node. probe: a file that rank 0 has just written."""
    gpu, problems = None, facts.problems
    try:
        gpu = device.gpu_of(local_rank)
    except Exception as error:  # a broken driver may raise anything
        problems.append(f"its GPU does not work: {error}".splitlines()[0])
    cluster = phased.phases[0].recipe.cluster
    is_explicit = "gpus_per_node" in cluster.model_fields_set or "SLURM_STEP_ID" in os.environ
    if gpu is not None:
        facts.figures["GiB free on the GPU"] = gpu.free / 2**30
    elif is_explicit and cluster.gpus_per_node > 0 and not problems:
        problems.append("it sees no GPU, but cluster.gpus_per_node asks for them")
    modules = " and ".join(layout.modules_of(facts.rank))
    facts.same[f"the device of {modules}"] = "the CPU" if gpu is None else gpu.name
    if not probe.exists():
        time.sleep(_VISIBLE_SECONDS)  # nodes cache the folders of a shared file system
    if not probe.exists():
        problems.append(f"{probe.parent}: it does not see a file of rank 0; use a shared folder")
    if local_rank == 0:  # what the ranks of a node share
        facts.same |= versions() | device.library_versions()
        facts.same["python"] = platform.python_version()
        facts.figures["GiB free in memory"] = device.machine_memory().available / 2**30
        facts.figures["GiB free in the run folder"] = shutil.disk_usage(probe.parent).free / 2**30
        unreadable = [path for path in folders_read(phased) if not os.access(path, os.R_OK)]
        problems += [f"{path}: cannot be read" for path in unreadable]


# -------------------------------------------------------------------------------- bandwidth


def links_of(layout: Layout) -> dict[str, list[tuple[int, int]]]:
    """Return pairs of sender and receiver in tensor-parallel groups and bridges, by name."""
    pairs = defaultdict[str, list[tuple[int, int]]](list)
    for name, grid in layout.grids.items():
        for first in grid.ranks[:: grid.tp] if grid.tp > 1 else ():
            ring = [(first + n, first + (n + 1) % grid.tp) for n in range(grid.tp)]
            pairs[f"GB/s in tp of {name}"] += ring
    for edge in (edge for name in layout.encoders for edge in layout.links_of(name)):
        for senders, receivers in bridge_ends(layout, edge):
            for n in range(max(len(senders), len(receivers))):
                ends = senders[n % len(senders)], receivers[n % len(receivers)]
                if ends[0] != ends[1]:
                    pairs[f"GB/s on the bridge of {edge.name}"].append(ends)
    return pairs


def _measure_in_time(
    facts: Facts, layout: Layout, environment: RankEnv, meeting: Rendezvous
) -> None:
    """Measure clock and bandwidths; add a problem if that fails or takes too long."""
    try:
        measuring = ThreadPool(1).apply_async(_measure, (facts, layout, environment, meeting))
        measuring.get(_MEASURE_SECONDS)
    except Exception as error:  # if it took too long, it has no text
        reason = str(error) or f"not within {_MEASURE_SECONDS:g} s"
        facts.problems.append(f"rank {facts.rank} cannot talk: {reason}".splitlines()[0])


def _measure(facts: Facts, layout: Layout, environment: RankEnv, meeting: Rendezvous) -> None:
    """Measure links, those of one name at a time. Every rank of the world calls it."""
    size, local_rank = environment.world_size, environment.local_rank
    device.initialize_distributed(facts.rank, size, meeting.store, 2 * _MEASURE_SECONDS, local_rank)
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device.local_device())
    device.barrier()
    facts.clock = time.time()
    for name, pairs in links_of(layout).items():
        sends = [(dist.isend, b) for a, b in pairs if a == facts.rank]
        receives = [(dist.irecv, a) for a, b in pairs if b == facts.rank]
        gigabytes = max(len(sends), len(receives)) * _MESSAGE_BYTES / 1e9
        for _ in range(_NUM_TRIES):  # the last one counts: the first one connects
            operations = [dist.P2POp(do, message.clone(), peer) for do, peer in sends + receives]
            device.barrier()
            start = time.perf_counter()
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            device.synchronize()
            if operations:
                facts.figures[name] = gigabytes / (time.perf_counter() - start)
