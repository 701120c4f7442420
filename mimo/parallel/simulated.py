"""A world of ranks in one process, for dry runs: its collectives return at once, unfilled."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mimo.parallel.grids import Layout
from mimo.parallel.groups import Topology, build_topology


@contextmanager
def simulated_topology(layout: Layout, rank: int) -> Iterator[Topology]:
    """Provide the groups of one rank of the layout; the process must belong to no world."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(layout.world_size)  # read by Megatron's grids
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield build_topology(layout)
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
