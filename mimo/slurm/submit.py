"""Jobs are given to SLURM, and each is noted in its run's `launch/jobs.jsonl`."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from mimo.errors import InputError
from mimo.slurm.script import Job, template, write

_SBATCH_SECONDS = 120.0  # a controller that is busy takes its time


def submit(job: Job) -> str:
    """Write the job's script and submit it; returns the job's number. Raises InputError."""
    script = write(job)
    return _noted(job, _sbatch(script), "job", script)


def submit_chain(job: Job, num_jobs: int) -> list[str]:
    """Submit jobs each of which begins when the one before has ended; returns their numbers.

    A job that is done, or whose input is wrong, cancels those after it. Raises InputError.
    """
    script, chain = write(job), job.launch / time.strftime("chain_%Y%m%dT%H%M%S")
    found: list[str] = []
    for _ in range(num_jobs):
        after = [f"--dependency=afterany:{found[-1]}"] if found else []
        found.append(_noted(job, _sbatch(script, after, [str(chain)]), "chain", script))
        with chain.open("a") as file:
            print(found[-1], file=file)
    return found


def submit_array(jobs: Sequence[Job]) -> list[str]:
    """Submit several runs as arrays, one for each kind of nodes; returns a number for each run.

    Raises InputError.
    """
    numbers: dict[str, str] = {}
    for group, text in array_scripts(jobs):
        scripts = [write(job) for job in group]
        array = group[0].launch / "array.sh"
        array.write_text(text, encoding="utf-8")
        number = _sbatch(array)
        for index, (job, script) in enumerate(zip(group, scripts, strict=True)):
            numbers[job.name] = _noted(job, f"{number}_{index}", "array", script)
    return [numbers[job.name] for job in jobs]


def array_scripts(jobs: Sequence[Job]) -> list[tuple[list[Job], str]]:
    """The jobs of each array, one for each kind of nodes, and its script; writes nothing.

    Raises InputError for jobs that cannot be in an array.
    """
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        if job.name in {other.name for group in groups.values() for other in group}:
            raise InputError(f"two runs of the array are called {job.name}; give each a name")
        if len(job.placement.components) > 1:
            raise InputError(f"{job.name}: SLURM has no arrays of heterogeneous jobs; submit it")
        shell = "bash -l" if job.cluster.modules else "bash"  # which knows `module`
        groups.setdefault((str(job.folder), shell, *job.directives()), []).append(job)
    return [(group, _array(group, *asked[1:])) for asked, group in groups.items()]


def _array(group: Sequence[Job], shell: str, *directives: str) -> str:
    first = group[0]
    return template("array.sh.j2").render(
        runs=[job.run for job in group],
        logs=[job.logs for job in group],
        shell=shell,
        directives=[
            f"--job-name={first.name}-array",
            f"--array=0-{len(group) - 1}",
            *first.output("array_%A_%a.out"),
            *directives,
        ],
    )


def _sbatch(script: Path, options: Sequence[str] = (), arguments: Sequence[str] = ()) -> str:
    command = ["sbatch", "--parsable", *options, str(script), *arguments]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SBATCH_SECONDS
        )
    except FileNotFoundError:
        raise InputError("sbatch: not found; --submit needs a host of a SLURM cluster") from None
    except subprocess.TimeoutExpired:
        message = (
            f"sbatch did not answer within {_SBATCH_SECONDS:g} s, but may have queued the job: see "
            f"`squeue --me` before you submit it again"
        )
        raise InputError(message) from None
    if told.returncode != 0:
        raise InputError(f"sbatch refused {script}: {told.stderr.strip()}")
    return told.stdout.strip().partition(";")[0]  # of `number;cluster`


def _noted(job: Job, number: str, kind: str, script: Path) -> str:
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "job_id": number,
        "kind": kind,
        "script": str(script),
    }
    with (job.launch / "jobs.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")  # at once: the job may be adding a line of its own
    return number
