"""fp64 all the way, so that a difference in it is no rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def all_in(precision: str) -> AbstractContextManager[Any]:
    """Inside it modules of transformers compute in fp64 alone, if that is the precision.

    They go down to fp32 for norms and rotary positions, whatever they are given.
    """
    return _NeverLess() if precision == "fp64" else nullcontext()


class _NeverLess(TorchFunctionMode):
    """What would turn fp64 into fp32 leaves it as it is, also where a backward computes again."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(_wide(value) for value in args)
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
