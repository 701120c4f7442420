"""Megatron's bridge between two modules, for the benchmark to compare ours with.

Letters: N rows of one lane, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from torch import Tensor

from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.engines.megatron.groups import HyperCommGrid


@contextmanager
def _groups_on(backend: str) -> Iterator[None]:
    """Map the backend that Megatron hard-codes in its group calls to ``backend``."""

    def mapped(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            return make(*args, **{**kwargs, "backend": backend})

        return made

    with ExitStack() as patches:
        for name in ("new_group", "new_subgroups_by_enumeration"):
            patches.enter_context(mock.patch.object(dist, name, mapped(getattr(dist, name))))
        yield


class MegatronBridge:
    """`BridgeCommunicator` on two grids, for flat rows (N, H) of one dtype.

    Every rank of the world builds it. Afterwards each rank calls only its side's methods; all
    tensor-parallel ranks of a lane call them, with equal tensors.
    """

    def __init__(
        self, source: HyperCommGrid, destination: HyperCommGrid, dtype: torch.dtype, backend: str
    ) -> None:
        adapt_to_machine()
        with _groups_on(backend):
            self._bridge = BridgeCommunicator(source, destination, comm_dtype=dtype, tensor_ndim=2)

    def send_rows(self, rows: Tensor) -> None:
        """An encoder lane's rows (N, H), split evenly over its language lanes."""
        self._bridge.send_forward(rows)

    def receive_rows(self) -> Tensor:
        """A language lane's rows (N, H), on every rank of the lane."""
        return self._bridge.recv_forward()

    def send_gradients(self, gradient: Tensor) -> None:
        """A language lane's gradient (N, H), complete on every rank of the lane."""
        self._bridge.send_backward(gradient)

    def receive_gradients(self) -> Tensor:
        """An encoder lane's gradient (N, H), on every rank of the lane."""
        return self._bridge.recv_backward()
