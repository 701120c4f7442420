"""What is chosen for speed where a recipe leaves it open: by layout and device, in this one place.

`mimo check` prints it. None of it changes what is computed. docs/performance.md gives the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimo.config.schema import Train
from mimo.parallel.grids import Layout
from mimo.runtime.environment import Variable


@dataclass(frozen=True)
class Overlap:
    """Which exchanges of data-parallel ranks run while something else is computed."""

    grad_reduce: bool
    param_gather: bool


def overlap_of(train: Train, on_gpu: bool) -> Overlap:
    """The recipe's choice; its `auto` is yes on GPUs.

    On a CPU the exchange would take the cores from what it is to overlap with.
    """
    reduce = on_gpu if train.overlap_grad_reduce == "auto" else train.overlap_grad_reduce
    gather = train.overlap_param_gather
    if gather == "auto":
        gather = reduce and train.distributed_optimizer
    elif gather:
        reduce = True
    return Overlap(reduce, gather)


def variables_of(layout: Layout, rank: int) -> tuple[Variable, ...]:
    """Variables of this rank's environment that depend on its place in the layout.

    At an end of a disjoint encoder's bridge kernels are loaded at the start. Loading one at its
    first use may wait for the device, and so for a transfer that is posted ahead, whose sender may
    wait for the kernel. Elsewhere kernels load as they are used: all of them take 1 to 2 GiB.

    With one hardware queue a GPU starts kernels in the order of their launch, so that the exchange
    inside a tensor-parallel layer starts before the matrix product that it overlaps with. But one
    wait holds up all streams: ranks with transfers that are posted ahead (an end of a disjoint
    encoder's bridge, context parallelism, FSDP2) keep the device's default of several.
    """
    grids = [layout.grids[name] for name in layout.modules_of(rank)]
    if _at_end_of_bridge(layout, rank):
        return (Variable("CUDA_MODULE_LOADING", "EAGER"),)
    posts_ahead = any(grid.cp > 1 or grid.engine == "fsdp" for grid in grids)
    if posts_ahead or all(grid.tp == 1 for grid in grids):
        return ()
    return (Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)


def _at_end_of_bridge(layout: Layout, rank: int) -> bool:
    """Whether rows of a disjoint encoder come from this rank or arrive at it."""
    for name, grid in layout.encoders.items():
        if name in layout.colocated:
            continue
        if rank in grid.ranks and grid.coords(rank).pp == grid.pp - 1:
            return True
        if rank in layout.language.ranks:
            stage = layout.language.coords(rank).pp
            if any(link.stage == stage for link in layout.links_of(name)):
                return True
    return False
