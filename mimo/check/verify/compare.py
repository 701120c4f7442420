"""Compares what the ranks of a layout hold with the one-rank run; see docs/parallelism.md.

Both come as plain arrays, so comparing needs no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NOISE = 1e-6  # of the global gradient norm
_SCALARS = ("loss_tokens", "loss", "grad_norm")

Fault = Callable[[], None]
"""A deliberate bug: called in every rank before anything is built, at the top of its module."""


class IncomparableError(Exception):
    """A layout's parameters are not those of one rank: some are missing or differ in shape."""


@dataclass
class Shard:
    """A rectangle of a parameter that a rank holds; tensors are matrices of their rows.

    name: in the whole model, such as `language.decoder.layers.3.mlp.linear_fc1.weight`.
    shape: of the whole parameter. row, column: of the first element.
    gradients, weights: of each step, gradients before clipping; a frozen parameter has none.
    """

    name: str
    module: str
    rank: int
    stage: int
    lane: int
    cp: int
    tp: int
    shape: tuple[int, ...]
    row: int = 0
    column: int = 0
    gradients: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)

    @property
    def where(self) -> str:
        """For example `language, rank 5 (stage 1 · lane 0 · tp 1)`."""
        cp = f" · cp {self.cp}" if self.cp else ""
        place = f"stage {self.stage} · lane {self.lane}{cp} · tp {self.tp}"
        return f"{self.module}, rank {self.rank} ({place})"


@dataclass
class RankSteps:
    """Metrics of each step, and this rank's parameters."""

    metrics: list[dict[str, Any]]
    shards: list[Shard]


@dataclass
class ReferenceParameter:
    """For each step, the gradient before clipping (none if frozen) and the weights.

    weight_floors: weights below it are rounding noise; without one the gradients' floor applies.
    """

    gradients: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    weight_floors: list[float] = field(default_factory=list)


@dataclass
class Reference:
    """steps: `loss` per token, `loss_tokens` and `grad_norm` of each.

    parameters: by name, in the order of the model.
    """

    steps: list[dict[str, float]]
    parameters: dict[str, ReferenceParameter]


@dataclass(frozen=True)
class Difference:
    """Where a layout first departs from the one-rank run.

    step: counts from 1. what: "gradient", "weight", or the name of one of the step's metrics.
    where: module, rank and pipeline stage. index: of the largest difference in the whole tensor,
    seen as a matrix.
    """

    step: int
    what: str
    name: str
    where: str
    index: tuple[int, ...]
    got: float
    expected: float
    error: float

    def __str__(self) -> str:
        place = f" at {list(self.index)}" if self.index else ""
        return (
            f"step {self.step}: {self.what} of {self.name}{place} on {self.where}: "
            f"{self.got:.9g}, one rank has {self.expected:.9g} (error {self.error:.1e})"
        )


@dataclass
class Comparison:
    """Errors of a layout against one rank.

    scalars: error by step and name. gradients, weights: by parameter, the worst error of all ranks
    in each step. first: the first difference above the tolerance; within a step gradients come
    before weights, both in model order. largest: of the same step and kind; an error in the forward
    pass reaches every gradient, and the largest is often nearer to its origin.
    """

    scalars: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, list[float]] = field(default_factory=dict)
    first: Difference | None = None
    largest: Difference | None = None

    @property
    def error(self) -> float:
        """The largest error of anything that was compared."""
        return largest(self.worst(what) for what in ("gradients", "weights", *_SCALARS))

    def worst(self, what: str) -> float:
        """The largest error over all steps, in "gradients", "weights" or a metric of the steps."""
        if what in _SCALARS:
            return largest(step[what] for step in self.scalars)
        return largest(error for own in getattr(self, what).values() for error in own)

    def note(self, difference: Difference, tolerance: float) -> None:
        """Keep a difference that is above the tolerance, as NaN is, if first or largest."""
        if difference.error <= tolerance:
            return
        if self.first is None or self.largest is None:
            self.first = self.largest = difference
        same_kind = (difference.step, difference.what) == (self.first.step, self.first.what)
        if same_kind and badness(difference.error) > badness(self.largest.error):
            self.largest = difference


def badness(error: float) -> tuple[bool, float]:
    """Orders errors: NaN is larger than anything."""
    return math.isnan(error), error


def largest(errors: Iterable[float]) -> float:
    """The maximum; 0 if there are no errors."""
    return max(errors, key=badness, default=0.0)


def gradient_floor(gradients: Iterable[np.ndarray]) -> float:
    """1e-6 of the global norm; a tensor below it is rounding noise, such as a key bias's gradient.

    gradients: of the one-rank run.
    """
    return _NOISE * math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))


def update_floor(gradient_norm: float, rate: float, eps: float | None) -> float:
    """How far the optimizer moves a weight in one step for a gradient at `gradient_floor`.

    SGD moves it by rate · g, Adam by about rate · g / (g + eps). A weight that starts at zero is
    the sum of its updates, so the sum over all steps is its floor. gradient_norm: of all modules.
    eps: Adam's, None for SGD.
    """
    floor = _NOISE * gradient_norm
    return rate * floor if eps is None else rate * floor / (floor + eps)


def compare(results: Sequence[RankSteps], reference: Reference, tolerance: float) -> Comparison:
    """Compare every metric and every rank's part of every tensor, after every step.

    Raises IncomparableError if the layout's parameters are not those of one rank.
    """
    found, shards = Comparison(), _by_name(results)
    if shards.keys() != reference.parameters.keys():
        alone = sorted(shards.keys() ^ reference.parameters.keys())
        raise IncomparableError(f"only the layout or only one rank has {', '.join(alone)}")
    for name, own in shards.items():
        whole = reference.parameters[name].weights[0]
        shapes = {shard.shape for shard in own}
        if any(_matrix(shape) != _matrix(whole.shape) for shape in shapes):
            raise IncomparableError(f"{name} has shape {shapes}, one rank's has {whole.shape}")
        # Rectangles are equal or do not overlap.
        places = {(shard.row, shard.column): shard.weights[0].size for shard in own}
        if (held := sum(places.values())) != whole.size:
            raise IncomparableError(f"{name}: ranks hold {held} of {whole.size} elements")
    for step, expected in enumerate(reference.steps):
        floor = gradient_floor(
            p.gradients[step] for p in reference.parameters.values() if p.gradients
        )
        for what in ("gradient", "weight"):
            errors = getattr(found, f"{what}s")
            for name, whole in reference.parameters.items():
                has_own = what == "weight" and whole.weight_floors
                own_floor = whole.weight_floors[step] if has_own else floor
                worst = _worst_part(shards[name], whole, step, what, own_floor)
                if worst is not None:
                    errors.setdefault(name, []).append(worst.error)
                    found.note(worst, tolerance)
        scalars = [_worst_scalar(results, expected[name], step, name) for name in _SCALARS]
        for worst in scalars:
            found.note(worst, tolerance)
        found.scalars.append({worst.what: worst.error for worst in scalars})
    return found


def assembled(results: Sequence[RankSteps], floors: Mapping[str, list[float]]) -> Reference:
    """What a layout's ranks hold, as whole tensors, as a reference for another run.

    Of replicas the last rank's counts. floors: `ReferenceParameter.weight_floors`, by parameter in
    the order of the model. Raises IncomparableError for parameters that no rank has.
    """
    shards = _by_name(results)
    if missing := [name for name in floors if name not in shards]:
        raise IncomparableError(f"no rank of the other layout has {', '.join(missing)}")
    whole = {
        name: ReferenceParameter(
            joined(shards[name], "gradients"), joined(shards[name], "weights"), floor
        )
        for name, floor in floors.items()
    }
    steps = [{name: float(step[name]) for name in _SCALARS} for step in results[0].metrics]
    return Reference(steps, whole)


def joined(shards: Sequence[Shard], what: str) -> list[np.ndarray]:
    """The "gradients" or "weights" of a parameter in each step, whole."""
    found = []
    for step, like in enumerate(getattr(shards[0], what)):
        whole = np.full(_matrix(shards[0].shape), np.nan, like.dtype)
        for shard in shards:
            slice_of(whole, shard)[...] = getattr(shard, what)[step]
        found.append(whole.reshape(shards[0].shape))
    return found


def slice_of(whole: np.ndarray, shard: Shard) -> np.ndarray:
    """The rectangle of a whole tensor that the shard's rank holds, as a view."""
    rows, columns = shard.weights[0].shape
    matrix = whole.reshape(_matrix(whole.shape))
    return matrix[shard.row : shard.row + rows, shard.column : shard.column + columns]


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _by_name(results: Sequence[RankSteps]) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for shard in (shard for result in results for shard in result.shards):
        found.setdefault(shard.name, []).append(shard)
    return found


def _worst_part(
    shards: Sequence[Shard], parameter: ReferenceParameter, step: int, what: str, floor: float
) -> Difference | None:
    """The worst difference over all ranks' parts of a parameter; None if frozen in both runs."""
    steps = getattr(parameter, f"{what}s")
    scale = max(float(np.abs(steps[step]).max()), floor) if steps else floor
    found = []
    for shard in shards:
        parts = getattr(shard, f"{what}s")
        if not parts and not steps:
            continue
        # If only one of the two has a gradient, the other's is zero.
        wanted = slice_of(steps[step], shard) if steps else np.zeros_like(parts[step])
        got = parts[step] if parts else np.zeros_like(wanted)
        if got.shape != wanted.shape:
            raise IncomparableError(
                f"{shard.name} on {shard.where} has shape {got.shape}, the part of one rank's is "
                f"{wanted.shape}"
            )
        delta = np.abs(got - wanted)
        if not delta.size:
            continue
        index = tuple(int(i) for i in np.unravel_index(int(delta.argmax()), delta.shape))
        values = float(got[index]), float(wanted[index]), float(delta[index]) / scale
        index = (shard.row + index[0], shard.column + index[1])[: len(shard.shape)]
        found.append(Difference(step + 1, what, shard.name, shard.where, index, *values))
    return max(found, key=lambda one: badness(one.error), default=None)


def _worst_scalar(
    results: Sequence[RankSteps], expected: float, step: int, name: str
) -> Difference:
    found = []
    for rank, result in enumerate(results):
        got = float(result.metrics[step][name])
        error = abs(got - expected) / max(abs(expected), 1e-12)
        found.append(
            Difference(step + 1, name, "the step", f"rank {rank}", (), got, expected, error)
        )
    return max(found, key=lambda one: badness(one.error))
