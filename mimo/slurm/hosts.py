"""Hosts without SLURM: the line of torchrun that a person starts on each."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from mimo.config.cluster import Cluster
from mimo.errors import InputError, RecipeError
from mimo.slurm.containers import Container
from mimo.slurm.placement import Placement, in_order
from mimo.slurm.rendezvous import FIRST_PORT, NUM_PORTS
from mimo.slurm.script import Job


def torchrun_lines(
    job: Job, hosts: Sequence[str], recipe: Path, overrides: Sequence[str], site: Path | None
) -> Iterator[str]:
    """A line of bash for each host, the first of which rank 0 runs on. site: as of `prepare`.

    torchrun counts ranks from host to host, as many on each as its line says, so a placement that
    would mix them up is left for the plain order. Raises InputError for another number of hosts,
    and RecipeError for a container that only srun can start.
    """
    nodes = _counted(job.placement) or _counted(in_order(job.phased, job.layouts))
    assert nodes is not None, "ranks in order are in order"
    if len(hosts) != len(nodes) or len(set(hosts)) != len(hosts):
        raise InputError(
            f"--hosts: got {', '.join(hosts)}, but {sum(nodes)} ranks, at most "
            f"{job.cluster.places_per_node} on a host, need {len(nodes)} different hosts; "
            f"name them, or change cluster.ranks_per_node"
        )
    cluster, interface = job.cluster, job.cluster.interface
    first = [f"cd {shlex.quote(str(job.folder))}"]
    first += [f"module load {shlex.quote(module)}" for module in cluster.modules]
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    variables = {
        "MIMO_JOB_SECRET": secrets.token_hex(16),
        **dict.fromkeys(("HF_HUB_OFFLINE", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"), "1"),
        **{name: str(interface) for name in names},
        **variables_of(cluster),
    }
    before = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    before += [*_python(job), "-m", "mimo.runtime.agent", f"--nnodes={len(hosts)}"]
    before += ["--rdzv-backend=mimo"]
    # The door tries the next ports if this one is taken by then.
    endpoint = f"{hosts[0]}:{FIRST_PORT + secrets.randbelow(NUM_PORTS)}"
    after = ["-m", "mimo.cli.main", "train", str(recipe), *overrides]
    after += ["--cluster", str(site)] if site is not None else []
    for number, (host, num_ranks) in enumerate(zip(hosts, nodes, strict=True)):
        own = [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=rank={number}"]
        line = " ".join([*before, shlex.join([*own, f"--nproc-per-node={num_ranks}", *after])])
        yield f"{' && '.join([*first, line])} # on {shlex.quote(host)}"


def variables_of(cluster: Cluster) -> dict[str, str]:
    """What ranks have in their environment, whichever network they use."""
    variables = dict[str, str]()
    if cluster.cpus_per_rank is not None:
        variables["OMP_NUM_THREADS"] = str(cluster.cpus_per_rank)
    if cluster.local_logs is not None:
        variables["MIMO_LOCAL_LOGS"] = cluster.local_logs
    return variables | cluster.environment


def _python(job: Job) -> Iterator[str]:
    """The words of bash that call Python on a host, in the recipe's container."""
    venv, container = job.cluster.venv, job.cluster.container
    bin = job.bin if venv is None else job.folder / venv / "bin"
    if container is not None and container.runtime != "apptainer":
        key = ("cluster", "container", "runtime")
        message = (
            f"got {container.runtime!r}, which only srun starts; for --hosts choose apptainer, or "
            f"leave cluster.container out"
        )
        raise RecipeError(job.recipe.problem(key, message))
    yield from map(shlex.quote, Container(job.phased, job.folder).words)
    yield "python" if container is not None and venv is None else shlex.quote(str(bin / "python"))


def _counted(placement: Placement) -> list[int] | None:
    """Ranks of each node; None if they are not in order from node to node."""
    ranks = [rank for node in placement.nodes for rank in node]
    return [len(node) for node in placement.nodes] if ranks == sorted(ranks) else None
