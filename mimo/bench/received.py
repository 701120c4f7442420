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
    """Bytes that came from other ranks."""

    num_bytes: int = 0


@contextmanager
def count_received() -> Iterator[Received]:
    """Count what messages and broadcasts bring to this rank while the context is open.

    It does not matter who makes the call: `recv`, `irecv` and `batch_isend_irecv` all go through
    `irecv`. A broadcast brings its tensor to all ranks but its source.
    """
    received = Received()
    depth = 0

    def wrap(call: Callable[..., Any], size_of: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            # A public call may come back through a torch function mode.
            if depth == 0:
                received.num_bytes += size_of(*args, **kwargs)
            depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                depth -= 1

        return counted

    with ExitStack() as patches:
        for name, size_of in (("irecv", _irecv), ("broadcast", _broadcast)):
            counted = wrap(getattr(distributed_c10d, name), size_of)
            # In both modules, because the calls find each other in the second.
            for module in (dist, distributed_c10d):
                patches.enter_context(mock.patch.object(module, name, counted))
        yield received


def _irecv(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    return tensor.nbytes


def _broadcast(tensor: Tensor, src: int, *args: Any, **kwargs: Any) -> int:
    return 0 if src == dist.get_rank() else tensor.nbytes
