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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.device import choose_before_fork, initialize_distributed
from mimo.errors import InputError, StartError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.runtime.meeting import Meeting, Refused
from mimo.runtime.ranks import RankEnv, hosts_of, launch, node_name, rank_environment
from mimo.slurm.facts import KERNELS, facts_of
from mimo.slurm.links import Link, Measured, Pair, best_of, measure, pairs_of, rounds_of
from mimo.slurm.table import PREFLIGHT, Table
from mimo.slurm.verdict import Facts, Finding, absent, differences, odd_clocks, skews, slow

_JOIN_SECONDS = 120.0  # how far apart ranks may come: containers start slowly
_ROUNDS_SECONDS = 30.0  # after which no more pairs begin to talk
_TALK_SECONDS = 60.0  # after which a rank that still talks is stuck
_NAMED_TALKS = 5
_LISTS_OF_COMPONENTS = "SLURM_JOB_NODELIST_HET_GROUP_"


def main(
    path: Path, overrides: Sequence[str], num_ranks: int | None = None, site: Path | None = None
) -> int:
    """Check this machine, or be one rank of a srun or torchrun job; returns an exit code.

    site: a file whose keys lie over the recipe's `cluster:`.
    """
    environment = rank_environment()
    if environment is not None:
        code = be_a_rank(path, overrides, site, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal end could wait for a backend that waits for other ranks
    _, _, layout = _read(path, overrides, site, num_ranks)
    if (note := choose_before_fork(layout.world_size)) is not None:
        print(note)
    own = "mimo.slurm.preflight"
    return launch(f"{own}:run_rank", (path, tuple(overrides), site), layout.world_size, (own,))


def run_rank(path: Path, overrides: Sequence[str], site: Path | None) -> int:
    """Be one rank of those that `main` starts on this machine."""
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    return be_a_rank(path, overrides, site, environment)


def be_a_rank(path: Path, overrides: Sequence[str], site: Path | None, environment: RankEnv) -> int:
    """Check this rank's node together with the others; the same exit code on all ranks."""
    problem, read = None, None
    try:
        read = _read(path, overrides, site, environment.world_size)
    except InputError as error:
        problem = error
    try:
        meeting = Meeting(environment, _JOIN_SECONDS)
    except InputError as error:  # rank 0 is not there
        if environment.local_rank == 0:
            print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    try:
        table = _meet(meeting, problem)
        if read is not None and not table.findings:
            _check(meeting, environment, table, *read)
        return meeting.from_rank_0(lambda: _conclude(table, read and read[0].run_dir))
    except Refused as refused:
        return refused.exit_code
    finally:
        meeting.leave()


def _read(
    path: Path, overrides: Sequence[str], site: Path | None, num_ranks: int | None
) -> tuple[PhasedRecipe, Recipe, Layout]:
    """The recipe, and that of the phase with the most ranks, with its layout. Raises InputError."""
    phased = load_phases(path, overrides, None if site is None else {"cluster": site})
    found = phased.each(lambda recipe: (recipe, check_recipe(recipe, num_ranks)))
    return phased, *max(found, key=lambda one: one[1].world_size)


def _meet(meeting: Meeting, problem: InputError | None) -> Table:
    """Who is there, and on which node; with findings if the job cannot go on.

    Raises Refused where all ranks have the same problem.
    """
    own = "" if problem is None else str(problem)
    said = meeting.gather(json.dumps([node_name(), own]))

    def judge() -> Table:
        present = {rank: json.loads(one) for rank, one in enumerate(said) if one is not None}
        if problem is not None and all(text == own for _, text in present.values()):
            raise problem
        node_of = {rank: node for rank, (node, _) in present.items()}
        findings = [*absent(node_of, _hosts(), len(said))]
        findings += [Finding(text, node) for node, text in present.values() if text]
        return Table([node_of.get(rank, "") for rank in range(len(said))], findings)

    return meeting.from_rank_0(judge)


def _hosts() -> list[str]:
    """Of the job, if SLURM says them: in a heterogeneous one each component has a list."""
    lists = [os.environ[one] for one in sorted(os.environ) if one.startswith(_LISTS_OF_COMPONENTS)]
    lists.append(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))
    return [*dict.fromkeys(host for one in lists for host in hosts_of(one))]


def _conclude(table: Table, run_dir: Path | None) -> int:
    if run_dir is not None:
        try:
            table.write(run_dir)
        except OSError as error:
            table.findings.append(Finding(f"{run_dir / PREFLIGHT} cannot be written: {error}"))
    print("\n".join(table.lines()), flush=True)
    return table.exit_code


def _check(
    meeting: Meeting,
    environment: RankEnv,
    table: Table,
    phased: PhasedRecipe,
    recipe: Recipe,
    layout: Layout,
) -> None:
    """What ranks see by themselves; then, where they can, how they talk. Fills rank 0's table."""
    folder = (phased.run_dir / PREFLIGHT).parent

    def write() -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".preflight-", dir=folder)
        except OSError as error:
            raise StartError(f"{folder}: cannot write there: {error}") from error
        os.close(descriptor)
        return Path(name)

    word = meeting.from_rank_0(write)
    facts = facts_of(phased, recipe, layout, environment, word)
    told = meeting.gather(json.dumps(asdict(facts)))

    def judge() -> bool:
        word.unlink(missing_ok=True)
        table.facts = [Facts(**json.loads(one)) for one in told if one is not None]
        table.findings += [Finding(one, own.node) for own in table.facts for one in own.problems]
        table.findings += differences(table.facts)
        kernels = dict.fromkeys(one.same[KERNELS] for one in table.facts if KERNELS in one.same)
        table.findings += [Finding(f"kernels: {one}", is_note=True) for one in kernels]
        table.findings += _silent(table.nodes, told, "did not say what it sees")
        return None not in told and len({one.same["device"] for one in table.facts}) == 1

    if not meeting.from_rank_0(judge):
        return
    own, rank = Measured([], []), environment.rank
    rounds = rounds_of(pairs_of(layout, table.nodes), table.nodes)
    size, local_rank = environment.world_size, environment.local_rank
    initialize_distributed(rank, size, meeting.store, 2 * _TALK_SECONDS, local_rank)
    given = (own, rounds, _ROUNDS_SECONDS, rank, local_rank)
    thread = threading.Thread(target=measure, args=given, daemon=True)
    thread.start()
    thread.join(_TALK_SECONDS)
    told = meeting.gather(json.dumps(asdict(own)))
    if rank == 0:
        _judge_talks(table, told)


def _judge_talks(table: Table, told: Sequence[str | None]) -> None:
    found = {rank: _measured(one) for rank, one in enumerate(told) if one is not None}
    table.links = best_of(link for one in found.values() for link in one.links)
    table.findings += _silent(table.nodes, told, "did not come back from talking to others")
    table.findings += failed_talks(found, table.nodes)
    if all(one.is_done for one in found.values()):
        table.clocks = skews({rank: one.clock for rank, one in found.items()}, table.nodes)
        table.findings += odd_clocks(table.clocks)
    table.findings += slow(table.links, table.nodes)
    if left_out := max((one.num_left_out for one in found.values()), default=0):
        text = f"{left_out} pairs were not tried for lack of time"
        table.findings.append(Finding(text, is_note=True))


def _silent(node_of: Sequence[str], told: Sequence[str | None], text: str) -> Iterator[Finding]:
    for rank, one in enumerate(told):
        if one is None:
            yield Finding(f"rank {rank} {text}", node_of[rank])


def _measured(told: str) -> Measured:
    given = json.loads(told)
    now = given["now"] and Pair(**given["now"])
    links = [Link(**{**one, "pair": Pair(**one["pair"])}) for one in given["links"]]
    return Measured(**{**given, "now": now, "links": links})


def failed_talks(found: Mapping[int, Measured], node_of: Sequence[str]) -> Iterator[Finding]:
    """Of pairs that failed or do not answer; with none, whatever else kept ranks from ending."""
    failed = {one.now: one.error or "no answer" for one in found.values() if one.now is not None}
    for pair, error in [*failed.items()][:_NAMED_TALKS]:
        ends = " and ".join(f"rank {rank} on {node_of[rank]}" for rank in (pair.a, pair.b))
        yield Finding(f"{ends} cannot talk ({pair.kind}): {error}")
    if not failed:
        for error in {one.error or "no answer" for one in found.values() if not one.is_done}:
            yield Finding(f"the ranks cannot talk together: {error}")
    counts = Counter(
        node for pair in failed for node in {node_of[pair.a], node_of[pair.b]}
    ).most_common(2)
    # Two nodes alone could blame each other.
    if counts and counts[0][1] > max([1, *(count for _, count in counts[1:])]):
        yield Finding(f"{counts[0][1]} of its talks failed", counts[0][0])
