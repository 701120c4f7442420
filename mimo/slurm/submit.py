"""Start jobs: by sbatch on a SLURM cluster, or by one line of torchrun for each host without it.

Submitted jobs are recorded in `launch/jobs.jsonl` of their run.
"""

import json
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mimo.config.cluster import Cluster
from mimo.errors import InputError, RecipeError
from mimo.slurm.script import Container, Job, template, write

_SBATCH_SECONDS = 120.0  # a busy controller answers late
_TORCHRUN_PORT = 29500  # torchrun's own default


def submit(job: Job) -> str:
    """Write and submit the job's script; return the job's number. Raises InputError."""
    script = write(job)
    return _record(job, _sbatch(script), "job", script)


def submit_chain(job: Job, num_jobs: int) -> list[str]:
    """Submit a chain of jobs: each begins when the one before has ended. Return their numbers."""
    script, chain = write(job), job.launch / time.strftime("chain_%Y%m%dT%H%M%S")
    numbers: list[str] = []
    for _ in range(num_jobs):
        after = [f"--dependency=afterany:{numbers[-1]}"] if numbers else []
        numbers.append(_record(job, _sbatch(script, after, [str(chain)]), "chain", script))
        with chain.open("a") as file:
            print(numbers[-1], file=file)
    return numbers


def submit_array(jobs: Sequence[Job]) -> list[str]:
    """Submit runs as arrays, one for each kind of nodes; return a number for each run."""
    numbers: dict[str, str] = {}
    for group, text in array_scripts(jobs):
        scripts = [write(job) for job in group]
        array = group[0].launch / "array.sh"
        array.write_text(text, encoding="utf-8")
        number = _sbatch(array)
        for index, (job, script) in enumerate(zip(group, scripts, strict=True)):
            numbers[job.name] = _record(job, f"{number}_{index}", "array", script)
    return [numbers[job.name] for job in jobs]


def array_scripts(jobs: Sequence[Job]) -> list[tuple[list[Job], str]]:
    """Return the jobs and the script of each array. Raises InputError if one fits in none."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        if job.name in {other.name for group in groups.values() for other in group}:
            raise InputError(f"two runs of the array are called {job.name}; give each a name")
        if len(job.placement.components) > 1:
            raise InputError(f"{job.name}: SLURM has no arrays of heterogeneous jobs; submit it")
        shell = "bash -l" if job.cluster.modules else "bash"  # which knows `module`
        groups.setdefault((str(job.folder), shell, *job.directives()), []).append(job)
    return [(group, _array(group, *options[1:])) for options, group in groups.items()]


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SBATCH_SECONDS)
    except FileNotFoundError:
        raise InputError("sbatch: not found; --submit needs a host of a SLURM cluster") from None
    except subprocess.TimeoutExpired:
        message = (
            f"sbatch did not answer within {_SBATCH_SECONDS:g} s, but may have queued the job: see "
            f"`squeue --me` before you submit it again"
        )
        raise InputError(message) from None
    if done.returncode != 0:
        raise InputError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # of `number;cluster`


def _record(job: Job, number: str, kind: str, script: Path) -> str:
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    line = {"time": now, "job_id": number, "kind": kind, "script": str(script)}
    # One write, because the job may append a line at the same time.
    with (job.launch / "jobs.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")
    return number


def torchrun_lines(
    job: Job, hosts: Sequence[str], recipe: Path, overrides: Sequence[str], site: Path | None
) -> Iterator[str]:
    """Yield the command line of each host; rank 0 runs on the first one.

    Raises InputError for another number of hosts, RecipeError for a container that needs srun.
    """
    sizes = [*map(len, job.placement.nodes)]
    if len(hosts) != len(sizes) or len(set(hosts)) != len(hosts):
        raise InputError(
            f"--hosts: got {', '.join(hosts)}, but {sum(sizes)} ranks, at most "
            f"{job.cluster.places_per_node} on a host, need {len(sizes)} different hosts; "
            f"name them, or change cluster.ranks_per_node"
        )
    cluster = job.cluster
    commands = [f"cd {shlex.quote(str(job.folder))}"]
    commands += [f"module load {shlex.quote(module)}" for module in cluster.modules]
    variables = dict.fromkeys(("HF_HUB_OFFLINE", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"), "1")
    variables |= variables_of(cluster)
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    words += [*_torchrun(job), f"--nnodes={len(hosts)}"]
    train = ["-m", "mimo.cli.main", "train", str(recipe), *overrides]
    train += ["--cluster", str(site)] if site is not None else []
    for number, (host, num_ranks) in enumerate(zip(hosts, sizes, strict=True)):
        options = [f"--node-rank={number}", f"--nproc-per-node={num_ranks}"]
        options += [f"--master-addr={hosts[0]}", f"--master-port={_TORCHRUN_PORT}"]
        line = " ".join([*words, shlex.join([*options, *train])])
        yield f"{' && '.join([*commands, line])} # on {shlex.quote(host)}"


def variables_of(cluster: Cluster) -> dict[str, str]:
    """Return the environment variables of ranks that do not depend on the network."""
    threads = cluster.cpus_per_rank
    return ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}) | cluster.environment


def _torchrun(job: Job) -> Iterator[str]:
    """Yield the words of bash that call torchrun on a host, in the recipe's container."""
    cluster, container = job.cluster, job.cluster.container
    if container is not None and container.runtime != "apptainer":
        key = ("cluster", "container", "runtime")
        message = (
            f"got {container.runtime!r}, which only srun starts; for --hosts choose apptainer, or "
            f"leave cluster.container out"
        )
        raise RecipeError(job.recipe.problem(key, message))
    yield from map(shlex.quote, Container(job.phased, job.folder).words)
    is_on_path = container is not None and cluster.venv is None
    yield "torchrun" if is_on_path else shlex.quote(str(job.venv_bin / "torchrun"))
