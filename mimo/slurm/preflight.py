"""`mimo preflight`: check the nodes of a job within two minutes, before its ranks train.

Each rank checks its node; then the ranks of each tensor-parallel group and of each edge of a bridge
measure their bandwidth. Results go to rank 0 through the store of the rendezvous, so that a rank
or a network that is stuck does not delay the report.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

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


class Finding(NamedTuple):
    """A sentence about what is wrong, and the node at fault, "" if that is unknown."""

    text: str
    node: str = ""


class Link(NamedTuple):
    """A tensor-parallel group or an edge of a bridge, as pairs of sender and receiver."""

    name: str
    pairs: Sequence[tuple[int, int]]


class Report:
    """What ranks say of their nodes, None for an absent rank. links: those that were measured."""

    def __init__(self, ranks: Sequence[Facts | None], links: Sequence[Link] = ()) -> None:
        self.nodes = ["" if facts is None else facts.node for facts in ranks]
        self.facts = [facts for facts in ranks if facts is not None]
        self.findings = [*absent(self.nodes, _hosts()), *differences(self.facts)]
        self.findings += [Finding(text, f.node) for f in self.facts for text in f.problems]
        named = {finding.node for finding in self.findings} - {""}
        self.exclude = sorted(named) if {*self.nodes} - named - {""} else []
        self.speeds = list[tuple[str, list[int], float]]()
        for name, pairs in links if not self.findings else ():
            members = sorted({*chain(*pairs)})
            least = min(self.facts[rank].speeds[name] for rank in members)
            self.speeds.append((name, members, least))

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        present = [*dict.fromkeys(filter(None, self.nodes))]
        yield f"preflight: {len(self.nodes)} ranks, {len(present)} nodes: {_listed(present)}"
        for name in dict.fromkeys(name for facts in self.facts for name in facts.free):
            size, node = min((f.free[name], f.node) for f in self.facts if name in f.free)
            yield f"  {name}: {size / 2**30:.1f} GiB free at least ({node})"
        yield from dict.fromkeys(f"  kernels: {f.kernels}" for f in self.facts if f.kernels)
        for name in dict.fromkeys(name for name, _, _ in self.speeds):
            least, ranks = min((speed, ranks) for key, ranks, speed in self.speeds if key == name)
            yield f"  {name}: at least {least / 1e9:.2f} GB/s (ranks {_listed(ranks)})"
        median = statistics.median(facts.clock for facts in self.facts)
        for node, ahead in {f.node: f.clock - median for f in self.facts}.items():
            if abs(ahead) > _SKEW_SECONDS:
                yield f"note: {node}: its clock differs by {ahead:+.1f} s"
        nodes_of = defaultdict[str, dict[str, None]](dict)
        for text, node in self.findings:
            nodes_of[text] |= {node: None} if node else {}
        for text, nodes in nodes_of.items():
            where = ", ".join(nodes) if len(nodes) < max(2, len(present)) else "all nodes"
            yield f"BROKEN: {where}{': ' * bool(nodes)}{text}"
        if self.exclude:
            yield f"leave out: --exclude={','.join(self.exclude)}"
        yield f"preflight: {'do not begin' if self.findings else 'ok'}"

    def conclude(self, run_dir: Path | None) -> int:
        """Print the report and write it into the run folder; return the exit code."""
        print("\n".join(self.lines()), flush=True)
        if run_dir is not None:
            facts = [asdict(facts) for facts in self.facts]
            table = {"ok": not self.findings, **vars(self), "facts": facts}
            path = run_dir / "launch/preflight.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(table, indent=1) + "\n")
        return int(bool(self.findings))


def _listed(items: Sequence[object]) -> str:
    return f"{', '.join(map(str, items[:8]))}{', ...' * (len(items) > 8)}"


def _hosts() -> list[str]:
    """Return the hosts of the job; a heterogeneous job has a list for each component."""
    names = [n for n in sorted(os.environ) if n.startswith("SLURM_JOB_NODELIST_HET_GROUP_")]
    lists = [os.environ[n] for n in (*names, "SLURM_STEP_NODELIST") if n in os.environ]
    return [*dict.fromkeys(host for nodes in lists for host in hosts_of(nodes))]


def absent(nodes: Sequence[str], hosts: Sequence[str]) -> Iterator[Finding]:
    """Name the ranks that did not join, and the hosts of the job without any rank."""
    missing = [rank for rank, node in enumerate(nodes) if not node]
    if missing:
        yield Finding(f"rank{'s' * (len(missing) > 1)} {_listed(missing)} did not join")
        yield from (Finding("no rank joined", host) for host in hosts if host not in nodes)


def differences(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Name the nodes that differ from most others, and GPUs that two ranks share."""
    nodes_of = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    ranks_of = defaultdict[tuple[str, str], list[int]](list)
    for facts in all_facts:
        for key, value in facts.same.items():
            if facts.node not in nodes_of[key][value]:
                nodes_of[key][value].append(facts.node)
        if facts.gpu:
            ranks_of[facts.node, facts.gpu].append(facts.rank)
    for key, values in nodes_of.items():
        usual, most = max(values.items(), key=lambda pair: len(pair[1]))
        is_majority = 2 * len(most) > sum(map(len, values.values()))
        for value, nodes in values.items():
            text = f"{key} is {value} on {_listed(nodes)}, but {usual} on {_listed(most)}"
            for node in nodes if value != usual else ():
                yield Finding(text, node if is_majority else "")
    for (node, _), ranks in ranks_of.items():
        if len(ranks) > 1:
            yield Finding(f"ranks {_listed(ranks)} share a GPU", node)


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
    _, _, layout = _read(path, overrides, site, num_ranks)
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
    checked, problem = None, None
    try:
        checked = _read(path, overrides, site, environment.world_size)
    except InputError as error:
        problem = error
    try:
        meeting = Rendezvous(environment, _JOIN_SECONDS)
    except InputError as error:  # rank 0 is not there
        if environment.local_rank == 0:
            print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    run_dir = None if checked is None else checked[0].run_dir
    facts, links = Facts(environment.rank, node_name()), list[Link]()
    if problem is not None:
        facts.problems.append(str(problem))

    def gather() -> Report:
        """Return the report on rank 0, an empty one elsewhere."""
        texts = meeting.gather(json.dumps(asdict(facts)))
        ranks = [None if text is None else Facts(**json.loads(text)) for text in texts]
        return Report(ranks, links if texts else [])

    def is_sound() -> bool:
        if probe:
            probe.unlink()
        if problem is not None and all(f.problems == facts.problems for f in report.facts):
            raise problem
        return not report.findings

    try:
        probe = meeting.from_rank_0(lambda: run_dir and _write_probe(run_dir / "launch"))
        if checked is not None and probe is not None:
            _check_node(facts, *checked, environment, probe)
        report = gather()
        if meeting.from_rank_0(is_sound) and checked is not None:
            links += links_of(checked[2])
            _measure_in_time(facts, links, environment, meeting)
            report = gather()
        return meeting.from_rank_0(lambda: report.conclude(run_dir))
    except Refused as refused:
        return refused.exit_code
    finally:
        meeting.leave()


def _read(
    path: Path, overrides: Sequence[str], site: Path | None, num_ranks: int | None
) -> tuple[PhasedRecipe, Recipe, Layout]:
    """Read all phases, and the recipe and layout of the largest one. Raises InputError."""
    phased = load_phases(path, overrides, None if site is None else {"cluster": site})
    phases = phased.each(lambda recipe: (recipe, check_recipe(recipe, num_ranks)))
    return phased, *max(phases, key=lambda phase: phase[1].world_size)


def _write_probe(folder: Path) -> Path:
    """Write a file that all nodes must see. Raises StartError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".preflight-", dir=folder, delete=False) as file:
            return Path(file.name)
    except OSError as error:
        raise StartError(f"{folder}: cannot write there: {error}") from error


def _check_node(
    facts: Facts,
    phased: PhasedRecipe,
    recipe: Recipe,
    layout: Layout,
    environment: RankEnv,
    probe: Path,
) -> None:
    """Check this rank's node; the first rank of a node also checks what its ranks share.

    recipe: that of the phase with the layout. probe: a file that rank 0 has just written.
    """
    gpu, problems = None, facts.problems
    try:
        gpu = device.gpu_of(environment.local_rank)
    except Exception as error:  # a broken driver may raise anything
        problems.append(f"its GPU does not work: {error}".splitlines()[0])
    cluster = recipe.cluster
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
        libraries = {"python": platform.python_version(), **device.library_versions()}
        facts.same |= libraries | versions()
        problems += _unreadable([phase.recipe for phase in phased.phases])
        facts.free["run folder"] = shutil.disk_usage(probe.parent).free
        facts.free["memory"] = device.machine_memory().available
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not probe.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if not probe.exists():
        problems.append(
            f"{probe.parent}: it does not see a file of rank 0 within {_VISIBLE_SECONDS:g} s; put "
            f"the run folder on a file system of all nodes"
        )


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
                path = source.path
                if is_remote(path):
                    path = next(iter(braceexpand(path, escape=False)))
                try:
                    find_shards(path)
                except ValueError as error:
                    yield f"data.{split}: {error}"


# -------------------------------------------------------------------------------- bandwidth


def links_of(layout: Layout) -> Iterator[Link]:
    """Yield a ring for each tensor-parallel group, and pairs for each edge of a bridge."""
    for name, grid in layout.grids.items():
        for first in grid.ranks[:: grid.tp] if grid.tp > 1 else ():
            group = range(first, first + grid.tp)
            yield Link(f"tp of {name}", [*zip(group, [*group[1:], first], strict=True)])
    for edge in (edge for name in layout.encoders for edge in layout.links_of(name)):
        for senders, receivers in bridge_ends(layout, edge):
            count, m, n = max(len(senders), len(receivers)), len(senders), len(receivers)
            pairs = [(senders[k % m], receivers[k % n]) for k in range(count)]
            if crossing := [(a, b) for a, b in pairs if a != b]:
                yield Link(f"bridge of {edge.name}", crossing)


def _measure_in_time(
    facts: Facts, links: Sequence[Link], environment: RankEnv, meeting: Rendezvous
) -> None:
    """Measure clock and bandwidths; add a problem if that fails or takes too long."""
    rank, size, local_rank = environment.rank, environment.world_size, environment.local_rank
    device.initialize_distributed(rank, size, meeting.store, 2 * _MEASURE_SECONDS, local_rank)

    def measure() -> None:
        try:
            _measure(facts, links, local_rank)
        except Exception as error:
            facts.problems.append(f"rank {rank} cannot talk: {error}".splitlines()[0])

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(_MEASURE_SECONDS)
    if thread.is_alive():
        facts.problems.append(f"rank {rank} cannot talk within {_MEASURE_SECONDS:g} s")


def _measure(facts: Facts, links: Sequence[Link], local_rank: int) -> None:
    """Measure links, those of one name at a time. Every rank of the world calls it."""
    place = device.local_device(local_rank)  # a thread has its own current device
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=place)
    device.barrier()
    facts.clock = time.time()
    for name in dict.fromkeys(link.name for link in links):
        pairs = [pair for link in links if link.name == name for pair in link.pairs]
        sends = [(dist.isend, b) for a, b in pairs if a == facts.rank]
        receives = [(dist.irecv, a) for a, b in pairs if b == facts.rank]
        num_bytes, best = max(len(sends), len(receives)) * _MESSAGE_BYTES, math.inf
        for _ in range(_NUM_TRIES):
            operations = [
                dist.P2POp(call, message.clone(), peer) for call, peer in sends + receives
            ]
            device.barrier()
            start = time.perf_counter()
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            device.synchronize()
            best = min(best, time.perf_counter() - start)
        if num_bytes:
            facts.speeds[name] = num_bytes / best
