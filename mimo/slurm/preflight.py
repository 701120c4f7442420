"""`mimo preflight`: check the nodes of a job within two minutes, before its ranks train.

Each rank checks its node; then the ranks of each tensor-parallel group and of each edge of a bridge
measure their bandwidth. Results go to rank 0 through the store of the rendezvous, so that a rank
or a network that is stuck does not delay the report.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.device import (
    choose_before_fork,
    initialize_distributed,
)
from mimo.errors import InputError, StartError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import RankEnv, hosts_of, launch, node_name, rank_environment
from mimo.runtime.rendezvous import Refused, Rendezvous
from mimo.slurm.node_checks import Facts, Link, Measured, facts_of, links_of, measure, ranks_of

PREFLIGHT = "launch/preflight.json"
"""The report for programs, in the run folder."""
_JOIN_SECONDS = 120.0  # in which all ranks must join: containers start slowly
_MEASURE_SECONDS = 60.0  # after which a rank that still measures is stuck
_SKEW_SECONDS = 1.0
_HETJOB_NODES = "SLURM_JOB_NODELIST_HET_GROUP_"


@dataclass(frozen=True)
class Finding:
    """A sentence about what is wrong, and the node at fault, "" where that is unknown."""

    text: str
    node: str = ""


@dataclass
class Report:
    """All results. nodes: the node of each rank, "" for an absent rank. speeds: kind, ranks and
    bytes per second of each link. clocks: seconds ahead of the median, by node.
    """

    nodes: list[str]
    findings: list[Finding] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    speeds: list[tuple[str, list[int], float]] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)

    @property
    def exclude(self) -> list[str]:
        """The nodes at fault; empty if that leaves none."""
        named = {finding.node for finding in self.findings} - {""}
        return sorted(named) if {*self.nodes} - named - {""} else []

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        present = [*dict.fromkeys(filter(None, self.nodes))]
        shown = f"{', '.join(present[:4])}{', ...' * (len(present) > 4)}"
        yield f"preflight: {_count(self.nodes, 'rank')}, {_count(present, 'node')}: {shown}"
        for name in dict.fromkeys(name for facts in self.facts for name in facts.free):
            size, node = min((f.free[name], f.node) for f in self.facts if name in f.free)
            yield f"  {name}: {size / 2**30:.1f} GiB free at least ({node})"
        yield from dict.fromkeys(f"  kernels: {f.kernels}" for f in self.facts if f.kernels)
        for kind in dict.fromkeys(kind for kind, _, _ in self.speeds):
            speeds = [(speed, ranks) for other, ranks, speed in self.speeds if other == kind]
            median, (least, ranks) = statistics.median(s for s, _ in speeds) / 1e9, min(speeds)
            where = f"at least {least / 1e9:.2f} (ranks {_listed(ranks)})"
            yield f"  {kind}: {_count(speeds, 'link')}, {median:.2f} GB/s, {where}"
        for node, ahead in self.clocks.items():
            if abs(ahead) > _SKEW_SECONDS:
                way = "ahead of" if ahead > 0 else "behind"
                yield f"note: {node}: its clock is {abs(ahead):.1f} s {way} the others'"
        nodes_of = defaultdict[str, list[str]](list)
        for finding in dict.fromkeys(self.findings):
            nodes_of[finding.text] += filter(None, [finding.node])
        for text, nodes in nodes_of.items():
            where = ", ".join(nodes) if len(nodes) < max(2, len(present)) else "all nodes"
            yield f"BROKEN: {where}{': ' * bool(nodes)}{text}"
        if self.exclude:
            yield f"leave out: --exclude={','.join(self.exclude)}"
        yield f"preflight: {'do not begin' if self.findings else 'ok'}"

    def write(self, run_dir: Path) -> None:
        """Write the report for programs. Raises OSError."""
        table = {"ok": not self.findings, "exclude": self.exclude, **asdict(self)}
        path = run_dir / PREFLIGHT
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}")
        partial.write_text(json.dumps(table, indent=1) + "\n")
        os.replace(partial, path)


def _count(items: Sequence[object], name: str) -> str:
    return f"{len(items)} {name}{'s' * (len(items) != 1)}"


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"


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
    if (note := choose_before_fork(layout.world_size)) is not None:
        print(note)
    module = "mimo.slurm.preflight"
    arguments = (path, tuple(overrides), site)
    return launch(f"{module}:be_a_rank", arguments, layout.world_size, (module,))


def be_a_rank(
    path: Path, overrides: Sequence[str], site: Path | None, environment: RankEnv | None = None
) -> int:
    """Check this rank's node together with all other ranks; return the same code on all of them."""
    environment = environment or rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    problem, recipes = None, None
    try:
        recipes = _read(path, overrides, site, environment.world_size)
    except InputError as error:
        problem = error
    try:
        meeting = Rendezvous(environment, _JOIN_SECONDS)
    except InputError as error:  # rank 0 is not there
        if environment.local_rank == 0:
            print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    try:
        report = _join(meeting, problem)
        if recipes is not None and not report.findings:
            _check_nodes(meeting, environment, report, *recipes)
        return meeting.from_rank_0(lambda: _conclude(report, recipes and recipes[0].run_dir))
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


def _join(meeting: Rendezvous, problem: InputError | None) -> Report:
    """Collect the nodes of all ranks. Raises Refused where all ranks have the same problem."""
    message = "" if problem is None else str(problem)
    texts = meeting.gather(json.dumps([node_name(), message]))

    def report() -> Report:
        present = {rank: json.loads(text) for rank, text in enumerate(texts) if text is not None}
        if problem is not None and all(other == message for _, other in present.values()):
            raise problem
        nodes = [present[rank][0] if rank in present else "" for rank in range(len(texts))]
        findings = [Finding(text, node) for node, text in present.values() if text]
        return Report(nodes, [*absent(nodes, _hosts()), *findings])

    return meeting.from_rank_0(report)


def _hosts() -> list[str]:
    """Return the hosts of the job; a heterogeneous job has a list for each component."""
    lists = [os.environ[name] for name in sorted(os.environ) if name.startswith(_HETJOB_NODES)]
    lists.append(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))
    return [*dict.fromkeys(host for nodes in lists for host in hosts_of(nodes))]


def _conclude(report: Report, run_dir: Path | None) -> int:
    if run_dir is not None:
        try:
            report.write(run_dir)
        except OSError as error:
            text = f"{run_dir / PREFLIGHT} cannot be written: {error}"
            report.findings.append(Finding(text))
    print("\n".join(report.lines()), flush=True)
    return int(bool(report.findings))


def _check_nodes(
    meeting: Rendezvous,
    environment: RankEnv,
    report: Report,
    phased: PhasedRecipe,
    recipe: Recipe,
    layout: Layout,
) -> None:
    """Check each node, then the bandwidth of links; fill rank 0's report. All ranks call it."""
    folder = (phased.run_dir / PREFLIGHT).parent

    def write_probe() -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".preflight-", dir=folder)
        except OSError as error:
            raise StartError(f"{folder}: cannot write there: {error}") from error
        os.close(descriptor)
        return Path(name)

    probe = meeting.from_rank_0(write_probe)
    facts = facts_of(phased, recipe, layout, environment, probe)
    texts = meeting.gather(json.dumps(asdict(facts)))

    def add_facts() -> bool:
        probe.unlink(missing_ok=True)
        report.facts = [Facts(**json.loads(text)) for text in texts if text is not None]
        for found in report.facts:
            report.findings += [Finding(text, found.node) for text in found.problems]
        report.findings += [*differences(report.facts), *_silent(report.nodes, texts)]
        devices = {found.same["device"] for found in report.facts}
        return None not in texts and len(devices) == 1

    if not meeting.from_rank_0(add_facts):
        return
    rank, measured, links = environment.rank, Measured(), links_of(layout)
    size, local_rank = environment.world_size, environment.local_rank
    initialize_distributed(rank, size, meeting.store, 2 * _MEASURE_SECONDS, local_rank)
    arguments = (measured, links, rank, local_rank)
    thread = threading.Thread(target=measure, args=arguments, daemon=True)
    thread.start()
    thread.join(_MEASURE_SECONDS)
    texts = meeting.gather(json.dumps(asdict(measured)))
    if rank == 0:
        report.findings += _silent(report.nodes, texts)
        _add_measurements(report, links, texts)


# ------------------------------------------------------------------------------------- rules


def absent(nodes: Sequence[str], hosts: Sequence[str]) -> Iterator[Finding]:
    """Name the ranks that did not join, and the hosts of the job without any rank."""
    missing = [rank for rank, node in enumerate(nodes) if not node]
    if missing:
        yield Finding(f"rank{'s' * (len(missing) > 1)} {_listed(missing)} did not join")
        yield from (Finding("no rank joined", host) for host in hosts if host not in nodes)


def _silent(nodes: Sequence[str], texts: Sequence[str | None]) -> Iterator[Finding]:
    for rank, text in enumerate(texts):
        if text is None:
            yield Finding(f"rank {rank} did not answer", nodes[rank])


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
        usual, nodes = max(values.items(), key=lambda pair: len(pair[1]))
        if len(values) > 1 and 2 * len(nodes) <= sum(map(len, values.values())):
            text = "; ".join(f"{value} on {', '.join(on)}" for value, on in values.items())
            yield Finding(f"{key} differs: {text}")
        else:
            for value in values.keys() - {usual}:
                text = f"{key} is {value}, but {usual} on {len(nodes)} other nodes"
                yield from (Finding(text, node) for node in values[value])
    for (node, _), ranks in ranks_of.items():
        if len(ranks) > 1:
            yield Finding(f"ranks {', '.join(map(str, ranks))} share a GPU", node)


def _add_measurements(report: Report, links: Sequence[Link], texts: Iterable[str | None]) -> None:
    """Add bandwidths and clocks, and name the ranks that could not measure them."""
    results = {rank: json.loads(text) for rank, text in enumerate(texts) if text is not None}
    stuck = defaultdict[str, list[int]](list)
    for rank, result in results.items():
        if not result["is_done"]:
            stuck[f"cannot talk ({result['doing']}): {result['error']}"].append(rank)
    report.findings += [Finding(f"ranks {_listed(ranks)} {text}") for text, ranks in stuck.items()]
    for number, link in enumerate(links):
        speeds = [result["speeds"].get(str(number), math.inf) for result in results.values()]
        if (least := min(speeds)) < math.inf:
            report.speeds.append((link[0], ranks_of(link), least))
    median = statistics.median(result["clock"] for result in results.values())
    for rank, result in results.items() if not stuck else ():
        report.clocks.setdefault(report.nodes[rank], result["clock"] - median)
