"""What an engine gives to whoever writes and reads checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

MASTER = "fp32_param"
"""Kind of an optimizer's tensor: the master weight of a 16-bit parameter."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of an optimizer's tensors: those of Adam."""
STEP = "step"
"""Kind of an optimizer's tensor: one number, how many updates the parameter has had."""
EMA = "ema"
"""Kind of an optimizer's tensor: the moving average of a parameter that learns."""


def key_of(kind: str, key: str) -> str:
    """The key of what an optimizer keeps, by kind, of the parameter of this key."""
    return f"{EMA}.{key}" if kind == EMA else f"optimizer.{kind}.{key}"


def kind_of(key: str) -> tuple[str, str]:
    """The inverse of `key_of`: kind and parameter's key; "" for the parameter itself."""
    beginning, _, rest = key.partition(".")
    if beginning == EMA:
        return EMA, rest
    if beginning != "optimizer":
        return "", key
    kind, _, parameter = rest.partition(".")
    return kind, parameter


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor: what a rank writes, or where it wants to have what it reads.

    The tensor is seen as a matrix of its first dimension by all others; a vector has one column.

    key: the tensor's name. shape: of the whole tensor. row, column: of the first element.
    values: (rows, columns), the owner's memory, so that writing to it changes the model.
    """

    key: str
    shape: tuple[int, ...]
    row: int
    column: int
    values: Tensor

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the whole tensor."""
        return self.shape[0], math.prod(self.shape[1:])
