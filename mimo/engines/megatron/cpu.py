"""Adapter that lets Megatron-core run on a machine without a GPU.

Megatron names the GPU in many places (``device="cuda"``, ``torch.cuda.current_device()``,
``Tensor.cuda()``). Without one, a process-wide torch function mode maps these to the CPU, and
the few ``torch.cuda`` functions that Megatron calls get CPU equivalents. Its linears get faster
matrix products. With a GPU nothing is changed.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mimo.ops.layers import linear

_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


class CudaToCpu(TorchFunctionMode):
    """Maps every request for a CUDA device to the CPU; thin, because it sees every torch call."""

    device = torch.device("cpu")
    """Result of `torch.cuda.current_device`."""

    def synchronize(self, device: Any = None) -> None:
        """Stand in for `torch.cuda.synchronize`: nothing to wait for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if kwargs:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs = {**kwargs, "device": torch.device("cpu")}
            # get_pos_emb_on_this_cp_rank asks for pinned memory, which needs a GPU.
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        else:
            kwargs = {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        # Megatron's optimizers sort parameters by their CUDA type names.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPE_NAMES.get(args[0].dtype, func(*args))
        return func(*args, **kwargs)


def _with_faster_products(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `_forward_impl` of Megatron's parallel linears: use `linear` where it sends nothing."""

    def forward(module: Any, **options: Any) -> Tensor:
        if options["sequence_parallel"] or options["allreduce_dgrad"]:
            return original(module, **options)
        output = linear(options["input"], options["weight"])
        return output if options["bias"] is None else output + options["bias"]

    return forward


_installed: CudaToCpu | None = None


def adapt_to_machine() -> None:
    """Install the mapping once per process when there is no GPU; call before building models."""
    if _installed is None and not torch.cuda.is_available():
        install(CudaToCpu())


def install(mapping: CudaToCpu) -> None:
    """Answer Megatron's requests for a GPU by ``mapping`` from now on; once per process."""
    global _installed
    assert _installed is None, "a mapping has been installed already"
    _installed = mapping
    mapping.__enter__()
    # Megatron's linears ask for it under tensor parallelism; it matters only on a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    from megatron.core.tensor_parallel import layers, random

    linears: tuple[Any, ...] = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    for kind in linears:
        kind._forward_impl = _with_faster_products(kind._forward_impl)

    cuda: Any = torch.cuda
    cuda.current_device = lambda *args: mapping.device
    cuda.synchronize = mapping.synchronize
    cuda.empty_cache = cuda.current_stream = lambda *args, **kwargs: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    patched: Any = random
    patched._get_cuda_rng_state, patched._set_cuda_rng_state = (
        cuda.get_rng_state,
        cuda.set_rng_state,
    )
