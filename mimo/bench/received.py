"""Counts the bytes that this rank receives from others, by wrapping torch.distributed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


@dataclass
class Received:
    """Bytes that came from other ranks, and the calls that brought them."""

    num_bytes: int = 0
    num_calls: int = 0


@contextmanager
def count_received() -> Iterator[Received]:
    """Count what arrives at this rank while the context is open.

    It does not matter who makes the call: `recv`, `irecv` and `batch_isend_irecv` all go through
    `irecv`. A broadcast brings its tensor to all ranks but its source; a gather brings all parts
    but the rank's own; a reduction is counted as if done in a ring, which needs the fewest bytes.
    """
    received = Received()
    depth = 0

    def wrap(call: Callable[..., Any], size_of: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            # A public call may call others, or come back through a torch function mode.
            if depth == 0:
                received.num_bytes += size_of(*args, **kwargs)
                received.num_calls += 1
            depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                depth -= 1

        return counted

    with ExitStack() as patches:
        for name, size_of in _SIZES.items():
            if not hasattr(distributed_c10d, name):
                continue
            counted = wrap(getattr(distributed_c10d, name), size_of)
            # In both modules, because the calls find each other in the second.
            for module in (dist, distributed_c10d):
                patches.enter_context(mock.patch.object(module, name, counted))
        yield received


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _irecv(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    return _size(tensor)


def _broadcast(
    tensor: Tensor, src: int | None = None, group: Any = None, *args: Any, **kwargs: Any
) -> int:
    group_src = kwargs.get("group_src")
    root = src if group_src is None else dist.get_global_rank(group, group_src)
    return 0 if root == dist.get_rank() else _size(tensor)


def _all_gather(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    return _size(output) - _size(tensor)


def _all_gather_list(
    outputs: list[Tensor], tensor: Tensor, group: Any = None, *args: Any, **kwargs: Any
) -> int:
    return sum(map(_size, outputs)) - _size(tensor)


def _reduce_scatter(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    return _size(tensor) - _size(output)


def _all_reduce(
    tensor: Tensor, op: Any = None, group: Any = None, *args: Any, **kwargs: Any
) -> int:
    ranks = dist.get_world_size(group)
    return 2 * _size(tensor) * (ranks - 1) // ranks


def _all_to_all(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    *args: Any,
    **kwargs: Any,
) -> int:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if not output_split_sizes:
        return _size(output) * (ranks - 1) // ranks
    own = output[: output_split_sizes[rank]]
    return _size(output) - _size(own)


_SIZES: dict[str, Callable[..., int]] = {
    "irecv": _irecv,
    "broadcast": _broadcast,
    "all_gather": _all_gather_list,
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all_single": _all_to_all,
}
