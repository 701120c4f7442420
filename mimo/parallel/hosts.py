"""Which ranks are on one host: they share its memory and its cores."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mimo.device import local_device, send

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Host:
    """This rank's host.

    ranks: those on it, ascending. job: a name that only the ranks of this world have. free_bytes:
    of its shared memory; 0 without. cores_per_rank: of those that this rank may use.
    """

    ranks: tuple[int, ...]
    job: str
    free_bytes: int
    cores_per_rank: int


def find_host() -> Host:
    """Every rank of the world calls it, together."""
    cores, free = os.sched_getaffinity(0), 0
    with suppress(OSError):
        free = shutil.disk_usage(SHARED_MEMORY).free
    job = int.from_bytes(os.urandom(7))
    own = torch.tensor([_number(_identity()), _number(sorted(cores)), free, job])
    own = send(own, local_device())
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    everyone = torch.stack(gathered).tolist()
    host, same_cores, *_ = everyone[dist.get_rank()]
    here = [rank for rank, one in enumerate(everyone) if one[0] == host]
    sharing = sum(everyone[rank][1] == same_cores for rank in here)
    return Host(
        ranks=tuple(here),
        job=f"{everyone[0][3]:014x}",
        free_bytes=min(everyone[rank][2] for rank in here),
        cores_per_rank=len(cores) // sharing,
    )


def _identity() -> list[object]:
    """What processes have in common that see the same shared memory and temporary files."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else socket.gethostname()
    folders = [path for path in (SHARED_MEMORY, Path(tempfile.gettempdir())) if path.is_dir()]
    return [name, os.getuid(), *((str(path), path.stat().st_dev) for path in folders)]


def _number(value: object) -> int:
    """A number of 56 bits that differs where the value does."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])
