"""Megatron's bridge between two modules, for the benchmark to compare ours with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import bridge_communicator

from mimo.engines.megatron.config import HyperCommGrid
from mimo.engines.megatron.cpu import adapt_to_machine


def megatron_bridge(
    source: HyperCommGrid,
    destination: HyperCommGrid,
    dtype: torch.dtype,
    backend: str,
    file: Path | None = None,
) -> Any:
    """Build a `BridgeCommunicator` on two grids, for flat rows (N, H) of one dtype.

    Every rank of the world builds it. The backend that Megatron hard-codes in its group calls is
    mapped to ``backend``. file: a module to take the class from instead of the installed one.
    """
    adapt_to_machine()
    module = bridge_communicator if file is None else _load(file)

    def mapped(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make(*args, **{**kwargs, "backend": backend})

    with ExitStack() as patches:
        for name in ("new_group", "new_subgroups_by_enumeration"):
            patches.enter_context(mock.patch.object(dist, name, mapped(getattr(dist, name))))
        return module.BridgeCommunicator(source, destination, comm_dtype=dtype, tensor_ndim=2)


def _load(file: Path) -> ModuleType:
    spec = spec_from_file_location("bridge_communicator_from_file", file)
    assert spec is not None and spec.loader is not None, "the command takes .py files only"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
