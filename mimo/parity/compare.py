"""Compares what the ranks of a layout computed with transformers, in forward order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mimo.families.keymap import Weight
from mimo.parity.results import INPUTS, LOGITS, OursOnRank, Part, Theirs
from mimo.verify.compare import Comparison, IncomparableError, compare, is_worse
from mimo.verify.results import Reference, ReferenceParameter, Shard

TOLERANCE = 1e-5  # fp32
_SMALLEST_SCALE = 1e-30

Measure = Literal["difference", "relative", "unequal"]


@dataclass(frozen=True)
class Line:
    """One point. error: "difference" is max|Δ|, "relative" is max|Δ| / max|reference|, "unequal"
    is the number of entries that differ where none may.

    where: the module and rank that are furthest off.
    """

    point: str
    measure: Measure
    error: float
    where: str
    passed: bool


@dataclass(frozen=True)
class Parity:
    """lines: the points in forward order. step: loss and gradients, and weights as imported.

    compared, total: numbers of parameters; a large model's largest gradients are left out.
    """

    lines: list[Line]
    step: Comparison
    tolerance: float
    compared: int
    total: int

    @property
    def first(self) -> Line | None:
        """The first module that diverges."""
        return next((line for line in self.lines if not line.passed), None)

    @property
    def passed(self) -> bool:
        """Whether nothing diverges."""
        return self.first is None and self.step.first is None


def compare_points(results: Sequence[OursOnRank], theirs: Theirs, tolerance: float) -> list[Line]:
    """Compare every rank's part of every point. If an input differs, nothing else is compared.

    Raises IncomparableError if the ranks together do not have a whole tensor.
    """
    parts: dict[str, list[Part]] = {}
    for part in (part for result in results for part in result.parts):
        parts.setdefault(part.point, []).append(part)
    if extra := parts.keys() - theirs.points.keys():
        raise IncomparableError(f"only our side has {', '.join(sorted(extra))}")
    lines: list[Line] = []
    for point, whole in theirs.points.items():
        if any(line.point in INPUTS and not line.passed for line in lines) and point not in INPUTS:
            break
        lines.append(_line(point, whole, parts.get(point, []), tolerance))
    return lines


def _line(point: str, whole: np.ndarray, parts: Sequence[Part], tolerance: float) -> Line:
    measure: Measure = "relative"
    if point in INPUTS:
        measure, tolerance = "unequal", 0
    elif point == LOGITS:
        measure = "difference"
    covered = np.zeros(whole.shape, bool)
    worst, where = 0.0, ""
    for part in parts:
        got = part.values
        if point == LOGITS:  # our vocabulary may be padded further
            got = got[:, : max(whole.shape[1] - part.columns, 0)]
        columns = slice(part.columns, part.columns + got.shape[1])
        fits = columns.stop <= whole.shape[1] or not got.shape[1]
        if part.index.max(initial=-1) >= len(whole) or not fits:
            return Line(point, measure, math.inf, part.where, passed=False)
        expected = whole[part.index, columns]
        covered[part.index, columns] = True
        error = _error(measure, got, expected, whole)
        if not where or is_worse(error, worst):
            worst, where = error, part.where
    if not covered.all() and point in INPUTS:  # we have fewer of them
        return Line(point, measure, math.inf, where, passed=False)
    if not covered.all():
        raise IncomparableError(
            f"{point}: no rank has {int((~covered).any(axis=1).sum())} of {len(whole)} rows"
        )
    return Line(point, measure, worst, where, passed=worst <= tolerance)


def _error(measure: Measure, got: np.ndarray, expected: np.ndarray, whole: np.ndarray) -> float:
    if measure == "unequal":
        return float((got != expected).sum())
    error = float(np.abs(got - expected).max(initial=0.0))
    if measure == "relative":
        error /= max(float(np.abs(whole).max(initial=0.0)), _SMALLEST_SCALE)
    return error


def compare_step(
    results: Sequence[OursOnRank],
    theirs: Theirs,
    weights: Mapping[str, Sequence[Weight]],
    tolerance: float,
) -> Comparison:
    """Compare loss, gradient norm, gradients, and the weights before the step.

    weights: by module, those to compare.
    Raises IncomparableError for parameters that only one side has.
    """
    shards = {shard.name: shard for result in results for shard in result.steps.shards}
    parameters = {}
    for module, own in weights.items():
        for weight in own:
            name = f"{module}.{weight.name}"
            shard = shards.get(name)
            if shard is None:
                raise IncomparableError(f"no rank has {name}")
            parameters[name] = ReferenceParameter(
                gradients=[_pack(weight, theirs.gradients, shard)],
                weights=[_pack(weight, theirs.weights, shard)],
            )
    step = {
        "loss": theirs.loss,
        "loss_tokens": theirs.loss_tokens,
        "grad_norm": theirs.gradient_norm,
    }
    return compare([result.steps for result in results], Reference([step], parameters), tolerance)


def _pack(weight: Weight, tensors: Mapping[str, np.ndarray], shard: Shard) -> np.ndarray:
    """Our parameter, made from theirs, with the rows of zeros that pad ours."""
    keys = [source.key for source in weight.sources]
    packed = weight.pack({key: torch.from_numpy(tensors[key]) for key in keys}).numpy()
    rows = shard.weights[0].shape[0] * (shard.tp_size if shard.dim == 0 else 1)
    return np.pad(packed, [(0, rows - len(packed)), *[(0, 0)] * (packed.ndim - 1)])
