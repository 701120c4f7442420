"""GPUs by their data sheets, and rates: how fast ranks compute and send, or fitted to runs.

A pass of a module takes its FLOPs times the module's seconds per FLOP, plus the time of a call for
each layer and one for the pass. On a CPU, small layers spend most of their time in calls.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from mimo.errors import InputError

_GIB = 2**30
_EFFICIENCY = 0.45
"""Share of the peak FLOP/s that a layer reaches over all its kernels; assumed."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of a cluster. memory: bytes that tensors may take.

    flops: peak of dense bf16 products per second. node, network: bytes per second that it sends to
    a GPU of its node, and of another.
    """

    name: str
    memory: float
    flops: float
    node: float
    network: float


# From NVIDIA's data sheets: NVLink in one direction; one network card per GPU, 200 Gbit/s for an
# A100, else 400. `memory` leaves room for the driver, the CUDA context and NCCL.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 78 * _GIB, 989e12, 450e9, 50e9),
        Gpu("h200", 138 * _GIB, 989e12, 450e9, 50e9),
        Gpu("b200", 176 * _GIB, 2250e12, 900e9, 50e9),
        Gpu("a100-40", 38 * _GIB, 312e12, 300e9, 25e9),
        Gpu("a100-80", 78 * _GIB, 312e12, 300e9, 25e9),
    )
}


def parse_gpu(text: str) -> Gpu:
    """Return a GPU by its name, or an H100 with this many GiB. Raises InputError."""
    if text in GPUS:
        return GPUS[text]
    with suppress(ValueError):
        if 0 < (gib := float(text)) < 1e6:
            return replace(GPUS["h100"], name=f"{text} GiB", memory=gib * _GIB)
    raise InputError(f"--gpu: got {text!r}; give one of {', '.join(GPUS)}, or its memory in GiB")


@dataclass(frozen=True)
class Rates:
    """Times of one rank's work.

    source: what they come from. forward, backward: seconds per FLOP by module, "" for all others;
    on a CPU, of one thread. call, call_back: more seconds of each layer's forward and backward, and
    of each pass. element: seconds of gradients and update per element that a rank updates. step:
    seconds of a step beyond these. node, network: bytes per second that a rank sends inside a node
    and to another. latency: seconds of a message. cores: ranks that compute at full speed at the
    same time. peak: FLOP/s of a rank; 0 if unknown.
    """

    source: str
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    call: float = 0.0
    call_back: float = 0.0
    element: float = 0.0
    step: float = 0.0
    node: float = math.inf
    network: float = math.inf
    latency: float = 0.0
    cores: float = math.inf
    peak: float = 0.0
    ranks_per_node: int = 8

    def seconds_per_flop(self, module: str) -> tuple[float, float]:
        """Return the seconds per FLOP of a module's forward and backward."""
        forward = self.forward.get(module, self.forward.get("", 0.0))
        return forward, self.backward.get(module, self.backward.get("", 0.0))

    def with_threads(self, threads: int | None, ranks: int) -> "Rates":
        """Return the rates of ranks with ``threads``, by default an equal share of the cores.

        Threads divide the time of FLOPs, not that of calls.
        """
        if math.isinf(self.cores):
            return self
        count = threads or max(1, int(self.cores) // ranks)
        forward = {module: seconds / count for module, seconds in self.forward.items()}
        backward = {module: seconds / count for module, seconds in self.backward.items()}
        return replace(self, forward=forward, backward=backward)

    def message[T: (float, np.ndarray)](self, num_bytes: T, span: int) -> T:
        """Return the seconds of a message to a rank whose number differs by ``span``."""
        link = self.node if span < self.ranks_per_node else self.network
        return self.latency + num_bytes / link

    def collective[T: (float, np.ndarray)](self, num_bytes: T, ranks: int, span: int) -> T:
        """Return the seconds of a ring that gathers ``num_bytes`` in all on each of ``ranks``.

        span: number of ranks from the first of the group to the last.
        """
        if ranks == 1:
            return num_bytes * 0.0
        return self.latency + self.message(num_bytes * (ranks - 1) / ranks, span - 1)


def rates_of_gpu(gpu: Gpu, ranks_per_node: int) -> Rates:
    """Return assumed rates of a GPU."""
    per_flop = {"": 1 / (gpu.flops * _EFFICIENCY)}
    return Rates(
        source=f"{gpu.name}: data sheet, {100 * _EFFICIENCY:.0f} % of its peak (assumed)",
        forward=per_flop,
        backward=per_flop,
        call=40e-6,
        call_back=80e-6,
        element=40 / 2e12,  # bytes of a bf16 weight and fp32 states, read and written at 2 TB/s
        node=gpu.node,
        network=gpu.network,
        latency=20e-6,
        peak=gpu.flops,
        ranks_per_node=ranks_per_node,
    )
