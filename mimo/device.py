"""The machine: the device of tensors, and the backend that moves them.

Only this file and the CPU adapter of Megatron name a device or a backend.
"""

import ctypes
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

# glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD. It accepts at most 32 MiB for the second.
_KEEP_MEMORY = (-1, 1 << 30), (-3, 1 << 25)

_BRIDGE_CTAS = 4  # the H100 has 132 multiprocessors

# Memory limit of a container in versions 2 and 1 of control groups. Usage would count files too.
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

_DRIVER = Path("/proc/driver/nvidia/version")

# With 1, NCCL 2.30 and later let ranks share a GPU, as tests on one GPU do.
SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"

# Where tensors live when there is no GPU.
DEVICE_WITHOUT_GPU = torch.device("cpu")


def has_gpu() -> bool:
    """Whether this process trains on a GPU."""
    return torch.cuda.is_available()


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of this rank's GPU, such as (9, 0), or None. Initialises the GPU."""
    return torch.cuda.get_device_capability(local_device()) if has_gpu() else None


def choose_before_fork(num_ranks: int) -> str | None:
    """Choose the device of `num_ranks` ranks on this machine, without initialising CUDA.

    With fewer GPUs than ranks they use the CPU, unless `SHARE_GPUS` is 1 in the environment.
    Returns a sentence for the console when GPUs are left unused, else None.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 or num_gpus >= num_ranks or os.environ.get(SHARE_GPUS) == "1":
        return None
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return f"{num_ranks} ranks, but {num_gpus} GPU(s): running on the CPU"


def local_device(local_rank: int | None = None) -> torch.device:
    """The device of this process; with `local_rank`, on a GPU machine, make it current."""
    if not has_gpu():
        return DEVICE_WITHOUT_GPU
    if local_rank is not None:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def backend() -> str:
    """The collective backend for tensors on `local_device`."""
    return "nccl" if has_gpu() else "gloo"


def bridge_group_options() -> Any:
    """Options of a bridge's process groups; None for the backend's defaults.

    Transfers run beside the layers, so they get few of the GPU's multiprocessors, one per CTA.
    """
    if not has_gpu():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, _BRIDGE_CTAS
    return options


def initialize_distributed(
    rank: int, world_size: int, rendezvous: str | Store, timeout_seconds: float, local_rank: int = 0
) -> None:
    """Join the world; every rank calls it once.

    rendezvous: an `init_method`, or a store that the ranks share. timeout_seconds: of collectives
    and transfers.
    """
    local_device(local_rank)
    # Megatron's grids read it; a shell may have left another job's size.
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
    """Wait for every rank of the world; all of them call it."""
    device = local_device()  # NCCL would guess it from the rank
    dist.barrier(device_ids=None if device.index is None else [device.index])


@dataclass(frozen=True)
class Memory:
    """A memory that one or more ranks share.

    available: bytes. is_of_processes: whether it is host memory, which also holds the processes.
    """

    name: str
    available: int
    is_of_processes: bool


def machine_memory() -> Memory:
    """Available memory of this machine, capped by the container's limit."""
    available = psutil.virtual_memory().available
    for limit in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # absent, or "max"
            available = min(available, int(limit.read_text()))
    return Memory("this machine", available, is_of_processes=True)


def gpu_memory() -> Memory | None:
    """Total memory of this rank's GPU; None on a CPU. Initialises the GPU."""
    if not has_gpu():
        return None
    properties = torch.cuda.get_device_properties(local_device())
    return Memory("the GPU of each rank", properties.total_memory, is_of_processes=False)


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank. identity: equal only for the same device. free: bytes of free memory."""

    name: str
    identity: str
    free: int


def gpu_of(local_rank: int) -> Gpu | None:
    """Initialise, test and describe a rank's GPU; return None without one.

    Raises RuntimeError if a small sum is wrong.
    """
    if not has_gpu():
        return None
    device = local_device(local_rank)
    if (result := torch.ones(1024, device=device).sum().item()) != 1024:
        raise RuntimeError(f"the sum of 1,024 ones on {device} is {result:g}")
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    return Gpu(properties.name, str(properties.uuid), free)


def library_versions() -> dict[str, str]:
    """Versions of the libraries that drive the GPUs; empty without GPUs."""
    if not has_gpu():
        return {}
    versions = {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl.version()))}
    with suppress(OSError):
        versions["driver"] = _DRIVER.read_text().splitlines()[0]
    return versions


def memory_in_use() -> dict[str, int]:
    """Bytes of this process by kind: resident, and on its GPU as its allocator counts."""
    usage = {"resident memory": psutil.Process().memory_info().rss}
    if has_gpu():
        device = local_device()
        usage |= {
            "allocated GPU memory": torch.cuda.memory_allocated(device),
            "allocated GPU memory at its peak": torch.cuda.max_memory_allocated(device),
            "reserved GPU memory": torch.cuda.memory_reserved(device),
        }
    return usage


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to `device`, from pinned memory so that the host is not blocked."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(tensors: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Copy several small host tensors by one call of `copy`; the copies share one storage."""
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
    """Allocate page-locked host memory (num_bytes,) uint8, to which a device copies in parallel.

    PyTorch's page-locked memory rounds up to a power of two, so plain memory is locked in place.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if has_gpu() and num_bytes:
        runtime: Any = torch.cuda.cudart()
        address = memory.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def release_memory() -> None:
    """Free device memory of models that are no longer used."""
    gc.collect()  # modules and their hooks refer to each other
    if has_gpu():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait until the device has finished its queued work (for timing)."""
    if has_gpu():
        torch.cuda.synchronize()


Timestamp = float | torch.cuda.Event


def record_time() -> Timestamp:
    """Take the time of the host, or of the device's queue; does not block the host."""
    if not has_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Timestamp, last: Timestamp) -> float:
    """Seconds between two times, which a device must have passed."""
    if isinstance(first, float) and isinstance(last, float):
        return last - first
    assert isinstance(first, torch.cuda.Event), "both times are of one clock"
    assert isinstance(last, torch.cuda.Event), "both times are of one clock"
    return first.elapsed_time(last) / 1e3


def peak_memory() -> int:
    """Peak bytes of this rank's tensors on the device; on a CPU, its resident memory now."""
    if has_gpu():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss


def device_name() -> str:
    """Name of this rank's device."""
    return torch.cuda.get_device_name() if has_gpu() else "CPU"


def traced_activities() -> list[torch.profiler.ProfilerActivity]:
    """Activities of this process that a profiler can trace."""
    known = torch.profiler.ProfilerActivity
    return [known.CPU, known.CUDA] if has_gpu() else [known.CPU]


@functools.cache
def copy_stream(to: Literal["device", "host"] = "device") -> torch.cuda.Stream | None:
    """Stream of the process for copies in one direction; None without a device.

    Not more of them, because freed memory stays with the stream that it was allocated on.
    """
    return torch.cuda.Stream() if has_gpu() else None


@contextmanager
def copying_to_host(stream: torch.cuda.Stream | None, since: Timestamp) -> Iterator[None]:
    """Run copies beside the device's other work, after the time `since`; finished on exit.

    For a background thread. stream: `copy_stream()` of the computing thread.
    """
    if stream is None:
        yield
        return
    assert isinstance(since, torch.cuda.Event), "a time of the device's queue"
    # A new thread's current device is the first one.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        stream.wait_event(since)
        yield
    stream.synchronize()


class Staging:
    """Copies the tensors of one step to the device, if there is one. stream: from `copy_stream`.

    A background thread calls `copy` and `join`; the computing thread calls `arrive` before it uses
    the tensors.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._copied: torch.cuda.Event | None = None  # after the last copy
        self._tensors: list[Tensor] = []

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor if self._stream is None else self._moved([tensor], self._stream)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate parts (n, ...), at least one, on the device."""
        return torch.cat(list(parts)) if self._stream is None else self._moved(parts, self._stream)

    def _moved(self, parts: Sequence[Tensor], stream: torch.cuda.Stream) -> Tensor:
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        # A new thread's device is the first one, as in `copying_to_host`.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            # Only a copy from pinned memory does not block the host.
            pinned = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)
            torch.cat(list(parts), out=pinned)
            moved = pinned.to(stream.device, non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(stream)
        self._tensors.append(moved)
        return moved

    def arrive(self) -> None:
        """Make later work of the device wait for the copies; does not block the host."""
        if self._stream is None or self._copied is None:
            return
        computing = torch.cuda.current_stream(self._stream.device)
        computing.wait_event(self._copied)
        for tensor in self._tensors:
            tensor.record_stream(computing)  # keeps its memory from being reused too early
        self._tensors.clear()


def keep_freed_memory() -> None:
    """Without a GPU, keep freed blocks below 32 MiB: mapping their pages anew costs a tenth."""
    libc = ctypes.CDLL(None)
    for parameter, num_bytes in _KEEP_MEMORY if hasattr(libc, "mallopt") and not has_gpu() else ():
        libc.mallopt(parameter, num_bytes)


def set_threads(num_threads: int | None, ranks_on_this_machine: int) -> int:
    """Set the CPU threads of this rank; by default an equal share of the cores, at least one."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads or max(1, cores // max(1, ranks_on_this_machine)))
    return torch.get_num_threads()


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of this device by NVIDIA's data sheets; None when unknown (CPU)."""
    # In units of 1e12; the first name contained in the device's name counts.
    known = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312, "B200": 2250}
    name = device_name()
    return next((1e12 * flops for key, flops in known.items() if key in name), None)
