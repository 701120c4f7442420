"""Compares what the ranks of a layout computed with transformers, in forward order.

A point is a place in the model where a tensor is compared. Its whole tensor has a row for each
token of all samples, or for each patch or row of all items, in the order of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mimo.check.verify.compare import (
    Comparison,
    IncomparableError,
    RankSteps,
    Reference,
    ReferenceParameter,
    Shard,
    assembled,
    badness,
    compare,
)
from mimo.families.keymap import Weight

TOLERANCE = 1e-5  # fp32
TOKENS, PIXELS, POSITIONS = "tokens", "pixels", "positions"
INPUTS = (TOKENS, PIXELS, POSITIONS)
"""Points at which both sides must have the same numbers."""
LOGITS = "language.head"
_PARTS = ("embedding", "blocks", "rows", "level", "layers", "norm", "head")  # in forward order
_SMALLEST_SCALE = 1e-30

Measure = Literal["difference", "relative", "unequal"]


def level_point(number: int) -> str:
    """The point of a tower's rows: 0 is the embeddings, other numbers are levels."""
    return "vision.rows" if number == 0 else f"vision.level {number - 1}"


@dataclass(frozen=True)
class Part:
    """What one rank holds of a point.

    index: (n,) rows of the whole tensor. columns: the first column. values: (n, k).
    """

    point: str
    where: str
    index: np.ndarray
    values: np.ndarray
    columns: int = 0


@dataclass(frozen=True)
class OursOnRank:
    """parts: of every point that this rank holds a part of. steps: one step, and its shards."""

    parts: list[Part]
    steps: RankSteps


@dataclass(frozen=True)
class Theirs:
    """What transformers computed, sample by sample.

    points: whole tensors by point, in forward order. reference: the step, and by key of the
    checkpoint the gradients and the first weights that were asked for.
    """

    points: dict[str, np.ndarray]
    reference: Reference


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


def compare_points(
    results: Sequence[OursOnRank], points: Mapping[str, np.ndarray], tolerance: float
) -> list[Line]:
    """Compare every rank's part of every point. If an input differs, nothing else is compared.

    points: as of `Theirs`. Raises IncomparableError if the ranks together do not have a whole
    tensor.
    """
    parts = _by_point(results)
    if extra := parts.keys() - points.keys():
        raise IncomparableError(f"only our side has {', '.join(sorted(extra))}")
    lines: list[Line] = []
    for point, whole in points.items():
        if any(line.point in INPUTS and not line.passed for line in lines) and point not in INPUTS:
            break
        lines.append(_line(point, whole, parts.get(point, []), tolerance))
    return lines


def whole_points(
    results: Sequence[OursOnRank], others: Sequence[OursOnRank]
) -> dict[str, np.ndarray]:
    """What a layout's ranks have, as whole tensors in forward order, to compare ``others`` with.

    Of replicas the last rank's counts; of the vocabulary, only what both sides have. Raises
    IncomparableError if the ranks together do not have a whole tensor.
    """
    mine, found = _by_point(results), {}
    for point in sorted(mine, key=_forward_order):
        parts = mine[point]
        shape = _shape(parts)
        whole, covered = np.zeros(shape, parts[0].values.dtype), np.zeros(shape, bool)
        for part in parts:
            place = part.index, slice(part.columns, part.columns + part.values.shape[1])
            whole[place], covered[place] = part.values, True
        if not covered.all():
            raise IncomparableError(f"{point}: the other layout has only a part of it")
        found[point] = whole
    if (logits := _by_point(others).get(LOGITS)) and LOGITS in found:
        found[LOGITS] = found[LOGITS][:, : _shape(logits)[1]]
    return found


def _by_point(results: Sequence[OursOnRank]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in (part for result in results for part in result.parts):
        found.setdefault(part.point, []).append(part)
    return found


def _shape(parts: Sequence[Part]) -> tuple[int, int]:
    rows = 1 + max(int(part.index.max(initial=-1)) for part in parts)
    return rows, max(part.columns + part.values.shape[1] for part in parts)


def _forward_order(point: str) -> tuple[int, int, int]:
    if point in INPUTS:
        return 0, INPUTS.index(point), 0
    module, _, name = point.partition(".")
    kind, _, number = name.replace(" ", ".").partition(".")
    return 1 + (module == "language"), _PARTS.index(kind), int(number or 0)


def _line(point: str, whole: np.ndarray, parts: Sequence[Part], tolerance: float) -> Line:
    measure: Measure = "difference" if point == LOGITS else "relative"
    if point in INPUTS:
        measure, tolerance = "unequal", 0
    covered = np.zeros(whole.shape, bool)
    errors = []
    for part in parts:
        got = part.values
        if point == LOGITS:  # our vocabulary may be padded further
            got = got[:, : max(whole.shape[1] - part.columns, 0)]
        columns = slice(part.columns, part.columns + got.shape[1])
        fits = columns.stop <= whole.shape[1] or not got.shape[1]
        if part.index.max(initial=-1) >= len(whole) or not fits:
            return Line(point, measure, math.inf, part.where, passed=False)
        covered[part.index, columns] = True
        errors.append((_error(measure, got, whole[part.index, columns], whole), part.where))
    error, where = max(errors, key=lambda one: badness(one[0]), default=(0.0, ""))
    if not covered.all():
        if point in INPUTS:  # we have fewer of them
            return Line(point, measure, math.inf, where, passed=False)
        rows = int((~covered).any(axis=1).sum())
        raise IncomparableError(f"{point}: no rank has {rows} of {len(whole)} rows")
    return Line(point, measure, error, where, passed=error <= tolerance)


def _error(measure: Measure, got: np.ndarray, expected: np.ndarray, whole: np.ndarray) -> float:
    if measure == "unequal":
        return float((got != expected).sum())
    error = float(np.abs(got - expected).max(initial=0.0))
    if measure == "relative":
        error /= max(float(np.abs(whole).max(initial=0.0)), _SMALLEST_SCALE)
    return error


def compare_step(
    results: Sequence[OursOnRank],
    theirs: Reference,
    weights: Mapping[str, Weight],
    tolerance: float,
) -> Comparison:
    """Compare loss, gradient norm, gradients, and the weights before the step.

    weights: those to compare, by our name.
    Raises IncomparableError for parameters that only one side has.
    """
    shards = {shard.name: shard for result in results for shard in result.steps.shards}
    if missing := weights.keys() - shards.keys():
        raise IncomparableError(f"no rank has {', '.join(sorted(missing))}")
    parameters = {}
    for name, weight in weights.items():
        sources = {source.key: theirs.parameters[source.key] for source in weight.sources}
        parameters[name] = ReferenceParameter(
            [_pack(weight, {k: s.gradients[0] for k, s in sources.items()}, shards[name])],
            [_pack(weight, {k: s.weights[0] for k, s in sources.items()}, shards[name])],
        )
    ours = [result.steps for result in results]
    return compare(ours, Reference(theirs.steps, parameters), tolerance)


def compare_layouts(
    results: Sequence[OursOnRank],
    others: Sequence[OursOnRank],
    names: Iterable[str],
    tolerance: float,
) -> Comparison:
    """Compare the step of a layout with that of another, as `compare_step`.

    names: of the parameters, in the order of the model.
    """
    reference = assembled([other.steps for other in others], {name: [] for name in names})
    return compare([result.steps for result in results], reference, tolerance)


def _pack(weight: Weight, tensors: Mapping[str, np.ndarray], shard: Shard) -> np.ndarray:
    """Our parameter, made from theirs, with the rows of zeros that pad ours."""
    packed = weight.pack({key: torch.from_numpy(own) for key, own in tensors.items()}).numpy()
    rows = shard.shape[0]
    return np.pad(packed, [(0, rows - len(packed)), *[(0, 0)] * (packed.ndim - 1)])
