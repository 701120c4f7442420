"""Megatron's bridge between two modules, for the benchmark to compare ours with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.engines.megatron.groups import HyperCommGrid


def megatron_bridge(
    source: HyperCommGrid, destination: HyperCommGrid, dtype: torch.dtype, backend: str
) -> BridgeCommunicator:
    """`BridgeCommunicator` on two grids, for flat rows (N, H) of one dtype.

    Every rank of the world builds it. The backend that Megatron hard-codes in its group calls is
    mapped to ``backend``.
    """
    adapt_to_machine()

    def mapped(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make(*args, **{**kwargs, "backend": backend})

    with ExitStack() as patches:
        for name in ("new_group", "new_subgroups_by_enumeration"):
            patches.enter_context(mock.patch.object(dist, name, mapped(getattr(dist, name))))
        return BridgeCommunicator(source, destination, comm_dtype=dtype, tensor_ndim=2)
