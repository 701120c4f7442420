"""Lets Megatron-core run on a machine without a GPU.

Megatron names the GPU in many places (``device="cuda"``, ``torch.cuda.current_device()``,
``Tensor.cuda()``). Without one, a process-wide torch function mode maps these to the CPU, and
the few ``torch.cuda`` functions that Megatron calls get CPU equivalents. Its linears get faster
products of matrices. With a GPU, nothing happens here.
"""

from __future__ import annotations

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
    """Maps every request for a CUDA device to the CPU.

    Kept thin: it sees every torch call of the process. A subclass given to `install` first may do
    more, such as count what a device would have to wait for.
    """

    device = torch.device("cpu")
    """What `torch.cuda.current_device` answers."""

    def synchronize(self, device: Any = None) -> None:
        """What `torch.cuda.synchronize` does."""

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


def _with_faster_products(megatrons: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_forward_impl` of Megatron's parallel linears, but with `linear` where it sends nothing."""

    def forward(module: Any, **given: Any) -> Tensor:
        if given["sequence_parallel"] or given["allreduce_dgrad"]:
            return megatrons(module, **given)
        output = linear(given["input"], given["weight"])
        return output if given["bias"] is None else output + given["bias"]

    return forward


_installed: CudaToCpu | None = None


def adapt_to_machine() -> None:
    """Install the mapping once per process when there is no GPU; call before building models."""
    if _installed is None and not torch.cuda.is_available():
        install(CudaToCpu())


def install(mapping: CudaToCpu) -> None:
    """Answer what Megatron asks of a GPU by ``mapping`` from now on; once per process."""
    global _installed
    assert _installed is None, "what stands for a GPU has been chosen already"
    _installed = mapping
    mapping.__enter__()
    # Megatron's linears ask for it under tensor parallelism; it matters only on a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    from megatron.core.tensor_parallel import layers, random

    linears: tuple[Any, ...] = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    for one in linears:
        one._forward_impl = _with_faster_products(one._forward_impl)

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
