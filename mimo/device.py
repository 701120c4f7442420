"""The machine: which device tensors live on and which backend moves them.

The only file (beside the CPU adapter of the engine) that names a device or a backend.
"""

from __future__ import annotations

import datetime
import functools
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.cuda import nccl

_BRIDGE_CTAS = 4  # the H100 has 132 multiprocessors

# Of a container, by the two versions of control groups. What is used of it counts files as well.
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

_DRIVER = Path("/proc/driver/nvidia/version")

# NCCL 2.30 and later let ranks share a GPU where this is 1, as tests on one GPU do.
SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"

# Where tensors live when there is no GPU.
DEVICE_WITHOUT_GPU = torch.device("cpu")


def has_gpu() -> bool:
    """Whether this process trains on a GPU."""
    return torch.cuda.is_available()


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of this rank's GPU, such as (9, 0); None without. Initialises the GPU."""
    return torch.cuda.get_device_capability(local_device()) if has_gpu() else None


def choose_before_fork(num_ranks: int) -> str | None:
    """Settle the device of ``num_ranks`` ranks on this machine, before their processes exist.

    Counting GPUs must not initialise CUDA in a process that forks. With fewer GPUs than ranks
    the ranks use the CPU, because NCCL refuses two ranks on one device; where `SHARE_GPUS` is 1 in
    the environment it does not, and ranks take GPUs in turn.
    Returns a sentence for the console when GPUs are left unused, else None.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 or num_gpus >= num_ranks or os.environ.get(SHARE_GPUS) == "1":
        return None
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return f"{num_ranks} ranks, but {num_gpus} GPU(s): running on the CPU"


def local_device(local_rank: int | None = None) -> torch.device:
    """The device of this process; with ``local_rank`` on a GPU machine, makes it current."""
    if not has_gpu():
        return DEVICE_WITHOUT_GPU
    if local_rank is not None:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def backend() -> str:
    """The collective backend for tensors on `local_device`."""
    return "nccl" if has_gpu() else "gloo"


def bridge_group_options() -> Any:
    """Options of a bridge's process groups; None for the backend's own.

    Transfers run beside the layers, so they get few of the GPU's multiprocessors: NCCL takes one
    per CTA, by default as many as a collective of the whole job would need.
    """
    if not has_gpu():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, _BRIDGE_CTAS
    return options


def initialize_distributed(
    rank: int,
    world_size: int,
    rendezvous: str | Store,
    timeout_seconds: float,
    local_rank: int = 0,
) -> None:
    """Join the world. Called once by every rank.

    ``rendezvous`` is where the ranks meet: an ``init_method`` or a store that they share.
    ``timeout_seconds`` bounds every collective and every bridge transfer: a peer that is gone
    becomes an error of this rank, not a hang.
    """
    local_device(local_rank)
    # Megatron's grids look there; a shell may have left another job's size.
    os.environ["WORLD_SIZE"] = str(world_size)
    dist.init_process_group(
        backend=backend(),
        init_method=rendezvous if isinstance(rendezvous, str) else None,
        store=None if isinstance(rendezvous, str) else rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def barrier() -> None:
    """Wait until every rank of the world is here; each of them calls it.

    NCCL's barrier is a sum on a device. Told none, it guesses one from the rank's number.
    """
    device = local_device()
    dist.barrier(device_ids=None if device.index is None else [device.index])


@dataclass(frozen=True)
class Memory:
    """A memory that one or more ranks share.

    available: bytes. is_of_processes: the machine's own, in which their processes live as well.
    """

    name: str
    available: int
    is_of_processes: bool


def machine_memory() -> Memory:
    """Of this machine, as far as it is not in use; in a container what that may have."""
    available = psutil.virtual_memory().available
    for limit in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # absent, or "max"
            available = min(available, int(limit.read_text()))
    return Memory("this machine", available, is_of_processes=True)


def gpu_memory() -> Memory | None:
    """Of this rank's GPU, all of it; None where ranks run on the CPU. Initialises the GPU."""
    if not has_gpu():
        return None
    properties = torch.cuda.get_device_properties(local_device())
    return Memory("the GPU of each rank", properties.total_memory, is_of_processes=False)


@dataclass(frozen=True)
class Gpu:
    """That of a rank. identity: the same only for the same device. Sizes in bytes."""

    name: str
    identity: str
    free: int
    total: int


def gpu_of(local_rank: int) -> Gpu | None:
    """The GPU of a rank, after it has computed something; None without. Initialises the GPU.

    Raises RuntimeError where it does not work.
    """
    if not has_gpu():
        return None
    device = local_device(local_rank)
    if (found := torch.ones(1024, device=device).sum().item()) != 1024:
        raise RuntimeError(f"the sum of 1,024 ones on {device} is {found:g}")
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(properties.name, str(properties.uuid), free, total)


def library_versions() -> dict[str, str]:
    """Of what drives the GPUs; empty without any."""
    if not has_gpu():
        return {}
    found = {"cuda": str(torch.version.cuda)}
    found["nccl"] = ".".join(map(str, nccl.version()))
    with suppress(OSError):
        found["driver"] = _DRIVER.read_text().splitlines()[0]
    return found


def memory_in_use() -> dict[str, int]:
    """Bytes of this process, by what they are: on its GPU as its allocator counts, and resident."""
    found = {"resident memory": psutil.Process().memory_info().rss}
    if has_gpu():
        device = local_device()
        found |= {
            "allocated GPU memory": torch.cuda.memory_allocated(device),
            "allocated GPU memory at its peak": torch.cuda.max_memory_allocated(device),
            "reserved GPU memory": torch.cuda.memory_reserved(device),
        }
    return found


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on ``device``, by a copy that the host does not wait for.

    From pageable memory it would. One for the host comes back as it is.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(tensors: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Small host tensors where ``copy`` brings a host tensor, which it does once for all of them.

    They share one storage there.
    """
    parts = [t.reshape(-1).view(torch.uint8) for t in tensors]
    # Kernels read in steps of up to 16 bytes.
    starts = [0, *accumulate(-(-len(part) // 16) * 16 for part in parts)]
    host = torch.zeros(starts[-1], dtype=torch.uint8)
    for start, part in zip(starts, parts, strict=False):
        host[start : start + len(part)] = part
    sent = copy(host)
    return [
        sent[start : start + len(part)].view(t.dtype).view(t.shape)
        for start, part, t in zip(starts, parts, tensors, strict=False)
    ]


def host_memory(num_bytes: int) -> Tensor:
    """Memory (num_bytes,) uint8 of the host, to which a device copies beside the host's work.

    PyTorch's own page-locked memory takes up to twice the bytes, the next power of two, so this
    is locked where it is.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if has_gpu() and num_bytes:
        runtime: Any = torch.cuda.cudart()
        address = memory.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def release_memory() -> None:
    """Give back what a model that is not used any more held on the device."""
    gc.collect()  # modules and their hooks refer to each other
    if has_gpu():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait until the device has finished its queued work (for timing)."""
    if has_gpu():
        torch.cuda.synchronize()


Moment = float | torch.cuda.Event


def moment() -> Moment:
    """Now, on the clock of what computes: that of the host, or of the device's queue.

    The host waits for neither.
    """
    if not has_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Moment, last: Moment) -> float:
    """Between two moments, which a device must have passed."""
    if isinstance(first, float) and isinstance(last, float):
        return last - first
    assert isinstance(first, torch.cuda.Event), "both moments are of one clock"
    assert isinstance(last, torch.cuda.Event), "both moments are of one clock"
    return first.elapsed_time(last) / 1e3


def memory_taken() -> int:
    """Most bytes of the device that this rank's tensors ever took; without one, what it has now."""
    if has_gpu():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss


def device_name() -> str:
    """What this rank computes on, for people."""
    return torch.cuda.get_device_name() if has_gpu() else "CPU"


def traced_activities() -> list[torch.profiler.ProfilerActivity]:
    """What a profiler can see of this process."""
    known = torch.profiler.ProfilerActivity
    return [known.CPU, known.CUDA] if has_gpu() else [known.CPU]


@functools.cache
def copy_stream(to: Literal["device", "host"] = "device") -> torch.cuda.Stream | None:
    """The process's queue of the device for copies beside its other work; None without a device.

    One each way: a batch does not wait for a checkpoint. No more, because memory that is freed
    stays with the stream that it was allocated on.
    """
    return torch.cuda.Stream() if has_gpu() else None


@contextmanager
def copying_to_host(stream: torch.cuda.Stream | None, since: Moment) -> Iterator[None]:
    """Copies inside run beside the device's other work, after that moment; done on leaving.

    For a thread in the background. stream: of `copy_stream`, asked for by the one that computes.
    """
    if stream is None:
        yield
        return
    assert isinstance(since, torch.cuda.Event), "a moment of the device's queue"
    # A new thread's device is the first one, which a stream alone would go back to and so use.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        stream.wait_event(since)
        yield
    stream.synchronize()


class Staging:
    """What one step needs, on its way to the device.

    A thread in the background calls `copy` and `join`; the thread that computes calls `arrive`
    before it uses any of their tensors. Without a device, tensors are used where they are.
    stream: of `copy_stream`.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._copied: torch.cuda.Event | None = None  # after the last copy
        self._tensors: list[Tensor] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """The same on the device."""
        return tensor if self._stream is None else self._moved([tensor], self._stream)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts (n, ...), at least one, laid one after the other on the device."""
        return torch.cat(list(parts)) if self._stream is None else self._moved(parts, self._stream)

    def _moved(self, parts: Sequence[Tensor], stream: torch.cuda.Stream) -> Tensor:
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        # A new thread's device is the first one, as in `copying_to_host`.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            # Only from pinned memory does a copy run beside the host's work.
            pinned = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)
            torch.cat(list(parts), out=pinned)
            moved = pinned.to(stream.device, non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(stream)
        self._tensors.append(moved)
        return moved

    def arrive(self) -> None:
        """Let what the device is given from now on wait for the copies; the host does not wait."""
        if self._stream is None or self._copied is None:
            return
        computing = torch.cuda.current_stream(self._stream.device)
        computing.wait_event(self._copied)
        for tensor in self._tensors:
            tensor.record_stream(computing)  # else its memory could be reused too early
        self._tensors.clear()


def set_threads(num_threads: int | None, ranks_on_this_machine: int) -> int:
    """Set CPU threads of this rank; by default share the cores evenly, at least one each.

    Several one-thread ranks move more samples per second than one many-thread rank.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads or max(1, cores // max(1, ranks_on_this_machine)))
    return torch.get_num_threads()


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of this device, for model FLOP utilisation; None when unknown (CPU).

    Source: NVIDIA data sheets, figures without sparsity.
    """
    # In units of 1e12; the first that the name contains counts.
    known = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312, "B200": 2250}
    name = device_name()
    return next((1e12 * flops for key, flops in known.items() if key in name), None)
