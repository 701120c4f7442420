"""`mimo preflight`: are the nodes of a job fit for it, and who is not, within a minute.

All ranks meet, say what they see, and talk in pairs. What one finds out goes to rank 0 through the
store of the meeting, so that a rank or a network that is stuck does not keep the verdict back.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from mimo.cluster.facts import facts_of
from mimo.cluster.links import Link, Measured, Pair, measure, pairs_of, rounds_of
from mimo.cluster.verdict import (
    Facts,
    Finding,
    absent,
    by_scope,
    differences,
    in_words,
    odd_clocks,
    skews,
    slow,
    to_exclude,
)
from mimo.device import choose_before_fork, initialize_distributed
from mimo.errors import InputError
from mimo.hf.recipes import load_phases
from mimo.launch.meeting import Meeting, Refused
from mimo.launch.ranks import RankEnv, hosts_of, launch, node_name, rank_environment
from mimo.layout.grids import Layout
from mimo.model.recipe_checks import check_recipe
from mimo.recipe.phases import PhasedRecipe

PREFLIGHT = "launch/preflight.json"
"""The table, in the run folder."""
_JOIN_SECONDS = 120.0  # how far apart ranks may come: containers start slowly
_ROUNDS_SECONDS = 30.0  # after which no more pairs begin to talk
_TALK_SECONDS = 60.0  # after which a rank that still talks is stuck
_NAMED_ERRORS = 5


def main(path: Path, overrides: Sequence[str], num_ranks: int | None = None) -> int:
    """Check this machine, or be one rank of a srun or torchrun job; returns an exit code."""
    environment = rank_environment()
    if environment is not None:
        code = be_a_rank(path, overrides, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal end could wait for a backend that waits for other ranks
    _, layouts = _read(path, overrides, num_ranks)
    size = max(layout.world_size for layout in layouts)
    if (note := choose_before_fork(size)) is not None:
        print(note)
    return launch(
        "mimo.cluster.preflight:run_rank",
        (path, tuple(overrides)),
        size,
        ("mimo.cluster.preflight",),
    )


def run_rank(path: Path, overrides: Sequence[str]) -> int:
    """Be one rank of those that `main` starts on this machine."""
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    return be_a_rank(path, overrides, environment)


def be_a_rank(path: Path, overrides: Sequence[str], environment: RankEnv) -> int:
    """Check this rank's node together with the others; the same exit code on all ranks."""
    problem, read = "", None
    try:
        read = _read(path, overrides, environment.world_size)
    except InputError as error:
        problem = str(error)
    try:
        meeting = Meeting(environment, _JOIN_SECONDS)
    except InputError as error:  # rank 0 is not there
        if environment.local_rank == 0:
            print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    try:
        table = _meet(meeting, environment, problem)
        if table is None or read is None:
            return 1
        return _check(meeting, environment, table, *read)
    except Refused as refused:
        return refused.exit_code
    finally:
        meeting.leave()


def _read(
    path: Path, overrides: Sequence[str], num_ranks: int | None
) -> tuple[PhasedRecipe, list[Layout]]:
    phased = load_phases(path, overrides)
    return phased, phased.each(lambda recipe: check_recipe(recipe, num_ranks))


@dataclass
class Table:
    """What is known of the job. nodes: that of each rank; empty of one that did not come."""

    nodes: list[str]
    findings: list[Finding] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The nodes, in the order of their first ranks."""
        return [*dict.fromkeys(filter(None, self.nodes))]

    @property
    def exit_code(self) -> int:
        """1 if the job had better not begin on these nodes."""
        return int(any(not one.is_note for one in self.findings))

    def lines(self) -> list[str]:
        """For people."""
        nodes, links = self.names, by_scope(self.links, self.nodes)
        shown = f"{', '.join(nodes[:4])}{', ...' * (len(nodes) > 4)}"
        lines = [f"preflight: {len(self.nodes)} ranks, {len(nodes)} nodes: {shown}"]
        least = defaultdict[str, list[tuple[int, str]]](list)
        for one in self.facts:
            for name, size in one.free.items():
                least[name].append((size, one.node))
        for name, found in least.items():
            size, node = min(found)
            lines.append(f"  {name:<26} {size / 2**30:8.1f} GiB free at least ({node})")
        for scope, own in links.items():
            for kind in dict.fromkeys(one.pair.kind for one in own):
                lines.append(_of_kind(f"{kind}, {scope}", [o for o in own if o.pair.kind == kind]))
        lines += in_words(self.findings, nodes)
        return [*lines, f"preflight: {'do not begin' if self.exit_code else 'ok'}"]

    def write(self, run_dir: Path) -> None:
        """For programs."""
        found = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ok": self.exit_code == 0,
            "exclude": to_exclude(self.findings, self.names),
            "findings": [asdict(one) for one in self.findings],
            "nodes": self.nodes,
            "seconds_ahead": self.clocks,
            "ranks": [asdict(one) for one in self.facts],
            "links": [asdict(one) for one in self.links],
        }
        path = run_dir / PREFLIGHT
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(partial, path)


def _of_kind(name: str, links: Sequence[Link]) -> str:
    slowest = min(links, key=lambda one: one.bytes_per_second)
    speeds, latencies = (
        [one.bytes_per_second / 1e9 for one in links],
        [one.latency_seconds * 1e6 for one in links],
    )
    return (
        f"  {name}: {len(links)} pairs, {median(speeds):.2f} GB/s ({min(speeds):.2f} of ranks "
        f"{slowest.pair.a} and {slowest.pair.b}), {median(latencies):.0f} us (at most "
        f"{max(latencies):.0f})"
    )


def _meet(meeting: Meeting, environment: RankEnv, problem: str) -> Table | None:
    """Who is there, and on which node; None, told by rank 0, if the job cannot go on.

    Raises Refused where all ranks find the input wrong.
    """
    said = meeting.gather(json.dumps([node_name(), problem]))

    def judge() -> list[str] | None:
        present = {rank: json.loads(one) for rank, one in enumerate(said) if one is not None}
        problems = {text for _, text in present.values()}
        if len(problems) == 1 and "" not in problems:
            raise InputError(problem)
        nodes = [present[rank][0] if rank in present else "" for rank in range(len(said))]
        listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
        here = {rank: node for rank, (node, _) in present.items()}
        findings = [*absent(here, [*hosts_of(listed)], len(said))]
        findings += [Finding(text, node) for node, text in present.values() if text]
        if not findings:
            return nodes
        print("\n".join(Table(nodes, findings).lines()), flush=True)
        return None

    nodes = meeting.from_rank_0(judge)
    return None if nodes is None else Table(nodes)


def _check(
    meeting: Meeting,
    environment: RankEnv,
    table: Table,
    phased: PhasedRecipe,
    layouts: Sequence[Layout],
) -> int:
    def write() -> Path:
        folder = phased.run_dir / "launch"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".preflight-", dir=folder)
        except OSError as error:
            raise InputError(f"{folder}: cannot write there: {error}") from error
        os.close(descriptor)
        return Path(name)

    word = meeting.from_rank_0(write)
    facts = facts_of(phased, layouts, environment, word)
    told = meeting.gather(json.dumps(asdict(facts)))

    def judge_facts() -> bool:
        word.unlink(missing_ok=True)
        table.facts = [Facts(**json.loads(one)) for one in told if one is not None]
        table.findings += [Finding(one, own.node) for own in table.facts for one in own.problems]
        table.findings += differences(table.facts)
        table.findings += _silent(table, told, "did not say what it sees: is a file system stuck?")
        kinds = {one.same.get("device") for one in table.facts}
        return None not in told and len(kinds) == 1

    if meeting.from_rank_0(judge_facts):
        _talk(meeting, environment, table, max(layouts, key=lambda one: one.world_size))

    def conclude() -> int:
        try:
            table.write(phased.run_dir)
        except OSError as error:
            table.findings.append(Finding(f"{phased.run_dir / PREFLIGHT} not written: {error}"))
        print("\n".join(table.lines()), flush=True)
        return table.exit_code

    return meeting.from_rank_0(conclude)


def _silent(table: Table, told: Sequence[str | None], text: str) -> list[Finding]:
    return [
        Finding(f"rank {rank} {text}", table.nodes[rank])
        for rank, one in enumerate(told)
        if one is None
    ]


def _talk(meeting: Meeting, environment: RankEnv, table: Table, layout: Layout) -> None:
    """Measure all pairs; on rank 0 the table gets what came of it."""
    own, rank = Measured([], []), environment.rank
    rounds = rounds_of(pairs_of(layout, table.nodes), table.nodes)
    initialize_distributed(
        rank, environment.world_size, meeting.store, 2 * _TALK_SECONDS, environment.local_rank
    )
    thread = threading.Thread(
        target=measure,
        args=(own, rounds, _ROUNDS_SECONDS, rank, environment.local_rank),
        daemon=True,
    )
    thread.start()
    thread.join(_TALK_SECONDS)
    told = meeting.gather(json.dumps(asdict(own)))
    if rank != 0:
        return
    found = {n: _measured(one) for n, one in enumerate(told) if one is not None}
    table.links = [link for one in found.values() for link in one.links]
    table.findings += _silent(table, told, "did not come back from talking to others")
    table.findings += _failed_talks(found, table.nodes)
    if all(one.is_done for one in found.values()) and None not in told:
        table.clocks = skews({rank: one.clock for rank, one in found.items()}, table.nodes)
        table.findings += odd_clocks(table.clocks)
    table.findings += slow(table.links, table.nodes)
    if own.num_left_out:
        text = f"{own.num_left_out} pairs were not tried for lack of time"
        table.findings.append(Finding(text, is_note=True))


def _measured(told: str) -> Measured:
    given = json.loads(told)
    now = given["now"] and Pair(**given["now"])
    links = [Link(**{**one, "pair": Pair(**one["pair"])}) for one in given["links"]]
    return Measured(**{**given, "now": now, "links": links})


def _failed_talks(found: dict[int, Measured], node_of: Sequence[str]) -> list[Finding]:
    """Talks that failed or still go on; if there are none, whatever else kept ranks from ending."""
    failed = {one.now: one.error or "no answer" for one in found.values() if one.now is not None}
    texts = [
        f"rank {pair.a} on {node_of[pair.a]} and rank {pair.b} on {node_of[pair.b]} cannot talk "
        f"({pair.kind}): {error}"
        for pair, error in failed.items()
    ]
    if not texts:
        errors = {one.error or "no answer" for one in found.values() if not one.is_done}
        texts = [f"the ranks cannot talk together: {error}" for error in sorted(errors)]
    findings = [Finding(text) for text in texts[:_NAMED_ERRORS]]
    counts = defaultdict[str, int](int)
    for pair in failed:
        for node in {node_of[pair.a], node_of[pair.b]}:
            counts[node] += 1
    # Whoever is in several of the failed talks; two nodes alone could blame each other.
    worst = max(counts.values(), default=0)
    named = [node for node, count in counts.items() if count == worst]
    if worst > 1 and len(named) == 1:
        findings.append(Finding(f"{worst} of its talks failed", named[0]))
    return findings
