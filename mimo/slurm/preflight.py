"""`mimo preflight`: check the nodes of a job within two minutes, before its ranks train.

Each rank checks its node; then tensor-parallel groups and edges of bridges measure their bandwidth.
The store of the rendezvous carries results, so a stuck rank or network does not delay the report.
"""

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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from mimo import device
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import PhasedRecipe
from mimo.errors import InputError, StartError
from mimo.model.recipe_checks import largest_layout, unreadable_inputs
from mimo.ops.acceleration import LOADS, NOT_INSTALLED, kernel_states
from mimo.parallel.connections import sender_receiver_pairs
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import RankEnv, end_at_once, launch, node_name, rank_environment
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

    problems: sentences. exit_code: that they lead to. same: values that must not differ by node.
    gpu: the identity of its GPU, or "". kernels: which attention kernels load on it. figures: free
    GiB and bandwidths, by name. clock: seconds since 1970 at a common moment.
    """

    rank: int
    node: str
    exit_code: int = 1
    problems: list[str] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    gpu: str = ""
    kernels: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    clock: float = 0.0


def find_faults(ranks: Sequence[Facts | None]) -> Iterator[str]:
    """Yield each fault with its nodes. ranks: facts by rank, None for an absent rank."""
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
    for (node, _), count in Counter((f.node, f.gpu) for f in facts if f.gpu).items():
        if count > 1:
            yield f"{node}: {count} ranks share a GPU"
    yield from (f"{_listed(names)}: {text}" for text, names in nodes_by_problem.items())


def _listed(items: Iterable[object]) -> str:
    names = [*dict.fromkeys(map(str, items))]
    return f"{', '.join(names[:8])}{', ...' * (len(names) > 8)}"


def report(ranks: Sequence[Facts | None]) -> int:
    """Print the report; return the exit code, that of bad input if no rank can read the recipe."""
    facts, faults = [rank for rank in ranks if rank is not None], [*find_faults(ranks)]
    lines = [f"preflight: {len(facts)} ranks on {_listed(f.node for f in facts)}"]
    for name in dict.fromkeys(name for f in facts for name in f.figures):
        figures = ((f.figures[name], f.rank, f.node) for f in facts if name in f.figures)
        value, rank, node = min(figures)
        lines.append(f"  {name}: at least {value:.2f} (rank {rank} on {node})")
    lines += dict.fromkeys(f"  kernels: {f.kernels}" for f in facts if f.kernels)
    median = statistics.median(f.clock for f in facts)
    for node, ahead in {f.node: f.clock - median for f in facts}.items():
        if abs(ahead) > _SKEW_SECONDS:
            lines.append(f"note: {node}: its clock differs by {ahead:+.1f} s")
    lines += [f"BROKEN: {fault}" for fault in faults]
    print("\n".join([*lines, f"preflight: {'do not begin' if faults else 'ok'}"]), flush=True)
    return min(f.exit_code for f in facts) if faults else 0


def main(path: Path, overrides: Sequence[str], num_ranks: int | None, site: Path | None) -> int:
    """Check this machine, or be one rank of a srun or torchrun job; return an exit code.

    site: a file whose keys are merged over the recipe's `cluster:`.
    """
    if rank_environment() is not None:
        # A normal exit could wait for a backend that waits for other ranks.
        return end_at_once(be_a_rank(path, overrides, site))
    layout = largest_layout(load_phases(path, overrides, site), num_ranks)
    if (note := device.choose_before_fork(layout.world_size)) is not None:
        print(note)
    args = (path, tuple(overrides), site)
    return launch(f"{__name__}:be_a_rank", args, layout.world_size, (__name__,))


def be_a_rank(path: Path, overrides: Sequence[str], site: Path | None) -> int:
    """Check this rank's node together with all other ranks; return the same code on all of them."""
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    facts, checked = Facts(environment.rank, node_name()), None
    try:
        rendezvous = Rendezvous(environment, _JOIN_SECONDS)
    except InputError as error:  # rank 0 is not there
        if environment.local_rank == 0:
            print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    try:
        phased = load_phases(path, overrides, site)
        checked = phased, largest_layout(phased, environment.world_size)
    except InputError as error:
        facts.problems.append(str(error))
        facts.exit_code = error.exit_code

    def gather() -> list[Facts | None]:
        texts = rendezvous.gather(json.dumps(asdict(facts)))
        return [None if text is None else Facts(**json.loads(text)) for text in texts]

    try:
        probe = rendezvous.from_rank_0(lambda: checked and _write_probe(checked[0].run_dir))
        if checked and probe:
            _check_node(facts, *checked, environment.local_rank, probe)
        ranks = gather()
        if probe and environment.rank == 0:
            with suppress(OSError):  # an empty file that stays does no harm
                probe.unlink()
        if rendezvous.from_rank_0(lambda: not [*find_faults(ranks)]) and checked:
            _measure_in_time(facts, checked[1], environment, rendezvous)
            ranks = gather()
        return rendezvous.from_rank_0(lambda: report(ranks))
    except Refused as refused:
        return refused.exit_code
    finally:
        rendezvous.leave()


def _write_probe(run_dir: Path) -> Path:
    folder = run_dir / "launch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".preflight-{os.getpid()}"
        probe.touch()
        return probe
    except OSError as error:
        raise StartError(f"{folder}: cannot write there: {error}") from error


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
        facts.gpu, facts.figures["GiB free on the GPU"] = gpu.identity, gpu.free / 2**30
        facts.same[f"GPU of {' and '.join(layout.modules_of(facts.rank))}"] = gpu.name
        states = kernel_states()
        facts.kernels = ", ".join(f"{name} {state}" for name, state in states.items())
        problems += {*states.values()} - {LOADS, NOT_INSTALLED}
    elif is_explicit and cluster.gpus_per_node > 0 and not problems:
        problems.append("it sees no GPU, but cluster.gpus_per_node asks for them")
    facts.same["device"] = "CPU" if gpu is None else "GPU"
    if local_rank == 0:  # what the ranks of a node share
        facts.same |= versions() | device.library_versions() | {"python": platform.python_version()}
        facts.figures["GiB free in memory"] = device.machine_memory().available / 2**30
        for phase in phased.phases:
            problems += unreadable_inputs(phase.recipe)
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not os.path.exists(probe) and time.monotonic() < deadline:
        time.sleep(0.1)  # nodes cache the folders of a shared file system
    if not os.path.exists(probe):
        problems.append(f"{probe.parent}: it does not see a file of rank 0; use a shared folder")
    elif local_rank == 0:
        facts.figures["GiB free in the run folder"] = shutil.disk_usage(probe.parent).free / 2**30


def _measure_in_time(facts: Facts, layout: Layout, env: RankEnv, rendezvous: Rendezvous) -> None:
    """Measure clock and bandwidths; add a problem if that fails or takes too long."""
    rank, size, store = env.rank, env.world_size, rendezvous.store

    def measure() -> None:
        try:
            _measure(facts, layout, env.local_rank)
        except Exception as error:
            facts.problems.append(f"rank {rank} cannot talk: {error}".splitlines()[0])

    try:
        device.initialize_distributed(rank, size, store, 2 * _MEASURE_SECONDS, env.local_rank)
    except Exception as error:
        facts.problems.append(f"rank {rank} cannot connect: {error}".splitlines()[0])
        return
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
    for name, pairs in sender_receiver_pairs(layout).items():
        sends = [(dist.isend, b) for a, b in pairs if a == facts.rank]
        receives = [(dist.irecv, a) for a, b in pairs if b == facts.rank]
        gigabytes = max(len(sends), len(receives)) * _MESSAGE_BYTES / 1e9
        for _ in range(_NUM_TRIES):  # the last try counts; the first connects
            operations = [dist.P2POp(do, message.clone(), peer) for do, peer in sends + receives]
            device.barrier()
            start = time.perf_counter()
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            device.synchronize()
            if operations:
                facts.figures[f"GB/s, {name}"] = gigabytes / (time.perf_counter() - start)
