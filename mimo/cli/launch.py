"""`mimo launch`: from a recipe to a running job; and what its script runs before the ranks."""

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimo.cli._shared import ClusterOption, OverridesArgument, RecipeArgument
from mimo.errors import InputError

if TYPE_CHECKING:
    from mimo.slurm.script import Job


def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    cluster: ClusterOption = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job to SLURM.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script; write nothing.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print where ranks go, and what crosses nodes.")
    ] = False,
    hetjob: Annotated[
        bool, typer.Option("--hetjob", help="Disjoint encoders on nodes of their own.")
    ] = False,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Begin with fewer nodes too, on fewer lanes.")
    ] = False,
    chain: Annotated[
        int | None, typer.Option(min=2, max=1000, help="Submit so many jobs, one after another.")
    ] = None,
    array: Annotated[
        bool,
        typer.Option("--array", help="Several recipes (arguments without `=`), in one array."),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(help="Hosts without SLURM, such as a,b: print a line to start on each."),
    ] = None,
) -> int | None:
    """Write the batch script of a recipe, submit it; without SLURM, train here."""
    from mimo.slurm.hosts import torchrun_lines, variables_of
    from mimo.slurm.script import Form, prepare
    from mimo.slurm.submit import array_scripts

    given = overrides or []
    others = [Path(one) for one in given if "=" not in one] if array else []
    given = [one for one in given if Path(one) not in others]
    if hetjob and elastic:
        raise InputError("--hetjob and --elastic: a heterogeneous job has a fixed number of nodes")
    if (chain or array) and not (submit or dry_run or explain):
        raise InputError("--chain and --array submit jobs: add --submit, or --dry-run to see them")
    if chain and array:
        raise InputError("--chain and --array: a chain is of one recipe; leave one of them out")
    if dry_run and submit:
        raise InputError("--dry-run and --submit: to see the script, or to submit it; leave one")
    if hosts is not None and (submit or hetjob or elastic or chain or array):
        raise InputError("--hosts is for hosts without SLURM: leave the options of jobs out")
    form: Form = "heterogeneous" if hetjob else "elastic" if elastic else "fixed"
    jobs = [prepare(path, given, cluster, form) for path in (recipe, *others)]
    job = jobs[0]
    if explain:
        for one in jobs:
            print(one.placement_text, end="")
    if hosts is not None:
        for line in torchrun_lines(job, hosts.split(","), recipe, given, cluster):
            print(line)
    elif dry_run:
        scripts = [one.text for one in jobs]
        scripts += [text for _, text in array_scripts(jobs)] if array else []
        print("".join(scripts), end="")
    elif submit:
        _submit(jobs, chain, array)
    elif explain:
        pass
    elif shutil.which("sbatch") is not None:
        _write(job)
    else:
        from mimo.train.main import main as train

        print("there is no SLURM here: training on this machine", flush=True)
        os.environ.update(variables_of(job.cluster))
        return train(recipe, given, site=cluster)
    return None


def _write(job: "Job") -> None:
    from mimo.slurm.script import write

    script = write(job)
    _say_continues(job)
    print(f"wrote {script}; submit it with\n  sbatch {shlex.quote(str(script))}")


def _submit(jobs: "list[Job]", chain: int | None, array: bool) -> None:
    from mimo.slurm.submit import submit, submit_array, submit_chain

    for job in jobs:
        _say_continues(job)
    if chain is not None:
        numbers = submit_chain(jobs[0], chain)
    else:
        numbers = submit_array(jobs) if array else [submit(jobs[0])]
    print(f"submitted {', '.join(numbers)}; follow it with\n  mimo status {jobs[0].run}")


def _say_continues(job: "Job") -> None:
    from mimo.checkpoint.resume import candidates

    if found := candidates(job.phased, True, None):
        print(f"{found[0]} is there: the job goes on from it (move {job.run} away to begin anew)")


def rendezvous(
    interface: Annotated[str | None, typer.Option(help="A network interface.")] = None,
) -> None:
    """Print this host's address and a free port, for the ranks of a job to meet."""
    from mimo.slurm.rendezvous import address_and_port

    print(*address_and_port(interface))
