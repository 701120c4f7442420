"""`mimo preflight` and `mimo launch`: from a recipe to a job on a cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mimo.cli.options import ClusterOption, NumRanksOption, OverridesArgument, RecipeArgument
from mimo.errors import InputError

if TYPE_CHECKING:
    from mimo.slurm.script import Job


def preflight(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    cluster: ClusterOption = None,
) -> int | None:
    """Check devices, versions, folders and bandwidth: of this machine, or as one rank of a job."""
    from mimo.slurm.preflight import main as run

    return run(recipe, overrides or [], num_ranks, cluster)


def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    cluster: ClusterOption = None,
    submit: Annotated[bool, Option("--submit", help="Submit the job to SLURM.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the script; write nothing.")] = False,
    explain: Annotated[
        bool, Option("--explain", help="Print rank, node, module and grid coordinates.")
    ] = False,
    hetjob: Annotated[
        bool, Option("--hetjob", help="Put disjoint encoders on separate nodes.")
    ] = False,
    chain: Annotated[
        int | None, Option(min=2, help="Submit this many jobs, one after another.")
    ] = None,
    array: Annotated[
        bool, Option("--array", help="Submit several recipes, arguments without `=`, as an array.")
    ] = False,
    hosts: Annotated[
        str | None, Option(help="Hosts without SLURM, such as a,b: print the command for each.")
    ] = None,
) -> int | None:
    """Write a recipe's batch script, or submit it. Without SLURM, train on this machine."""
    from mimo.slurm.placement import split_groups
    from mimo.slurm.script import prepare, write
    from mimo.slurm.submit import array_scripts, torchrun_lines, variables_of

    overrides = overrides or []
    others = [Path(word) for word in overrides if "=" not in word] if array else []
    overrides = [word for word in overrides if Path(word) not in others]
    if (chain or array) and not (submit or dry_run or explain):
        raise InputError("--chain and --array submit jobs; add --submit, or --dry-run to look")
    if chain and array:
        raise InputError("--chain and --array: a chain runs one recipe; remove one of the two")
    if dry_run and submit:
        raise InputError("--dry-run only prints what --submit would submit; remove one of the two")
    if hosts is not None and (submit or hetjob or chain or array):
        raise InputError("--hosts is for hosts without SLURM; remove the options of SLURM jobs")
    jobs = [prepare(path, overrides, cluster, hetjob) for path in (recipe, *others)]
    job = jobs[0]
    lines = (line for each in jobs for line in split_groups(each.layouts, each.placement))
    for line in dict.fromkeys(lines):
        print(f"warning: {line}", file=sys.stderr)
    if explain:
        for each in jobs:
            print(each.placement_text, end="")
    if hosts is not None:
        for line in torchrun_lines(job, hosts.split(","), recipe, overrides, cluster):
            print(line)
    elif dry_run:
        scripts = [each.text for each in jobs]
        scripts += [text for _, text in array_scripts(jobs)] if array else []
        print("".join(scripts), end="")
    elif submit:
        _submit(jobs, chain, array)
    elif explain:
        pass
    elif shutil.which("sbatch") is not None:
        script = write(job)
        _print_resume_point(job)
        print(f"wrote {script}; submit it with\n  sbatch {shlex.quote(str(script))}")
    else:
        from mimo.train.main import main as train

        print("no SLURM found: training on this machine", flush=True)
        os.environ.update(variables_of(job.cluster))
        return train(recipe, overrides, site=cluster)
    return None


def _submit(jobs: list[Job], chain: int | None, array: bool) -> None:
    from mimo.slurm.submit import submit, submit_array, submit_chain

    for job in jobs:
        _print_resume_point(job)
    if chain is not None:
        numbers = submit_chain(jobs[0], chain)
    else:
        numbers = submit_array(jobs) if array else [submit(jobs[0])]
    print(f"submitted {', '.join(numbers)}; follow it with\n  mimo status {jobs[0].run}")


def _print_resume_point(job: Job) -> None:
    from mimo.checkpoint.resume import candidates

    if checkpoints := candidates(job.phased, True, None):
        print(f"the job resumes from {checkpoints[0]}; move {job.run} away to start afresh")
