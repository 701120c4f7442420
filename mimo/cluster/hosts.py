"""Hosts without SLURM: the command of torchrun that a person starts on each."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mimo.cluster.placement import Placement, in_order
from mimo.cluster.script import Job
from mimo.errors import InputError

_PORT = 29500  # torchrun's own


def torchrun_lines(
    job: Job, hosts: Sequence[str], recipe: Path, overrides: Sequence[str]
) -> Iterator[str]:
    """A line of bash for each host, the first of which rank 0 runs on.

    torchrun counts ranks from host to host, as many on each as its line says, so a placement that
    would mix them up is left for the plain order. Raises InputError for another number of hosts.
    """
    nodes = _counted(job.placement) or _counted(in_order(job.phased, job.layouts))
    assert nodes is not None, "ranks in order are in order"
    if len(hosts) != len(nodes) or len(set(hosts)) != len(hosts):
        raise InputError(
            f"--hosts: got {', '.join(hosts)}, but {sum(nodes)} ranks, at most "
            f"{job.cluster.places_per_node} on a host, need {len(nodes)} different hosts; "
            f"name them, or change cluster.ranks_per_node"
        )
    interface = job.cluster.interface
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    variables = {"MIMO_JOB_SECRET": secrets.token_hex(16), "HF_HUB_OFFLINE": "1"}
    variables |= {name: str(interface) for name in names} | job.cluster.environment
    for number, (host, num_ranks) in enumerate(zip(hosts, nodes, strict=True)):
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        words += [
            *(shlex.quote(sys.executable), "-m", "torch.distributed.run"),
            f"--nnodes={len(hosts)}",
            f"--node-rank={number}",
            f"--nproc-per-node={num_ranks}",
            shlex.quote(f"--master-addr={hosts[0]}"),
            f"--master-port={_PORT}",
            *("-m", "mimo.cli", "train"),
            shlex.join([str(recipe), *overrides]),
        ]
        where = f"cd {shlex.quote(str(job.folder))}"
        yield f"{where} && {' '.join(words)} # on {shlex.quote(host)}"


def _counted(placement: Placement) -> list[int] | None:
    """Ranks of each node; None if they are not in order from node to node."""
    ranks = [rank for node in placement.nodes for rank in node]
    return [len(node) for node in placement.nodes] if ranks == sorted(ranks) else None
