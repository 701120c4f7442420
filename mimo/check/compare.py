"""Compare what the ranks of a layout hold with one rank, with transformers or with another layout.

The error of a tensor is max|Δ| / max(max|reference|, floor). The floor of a gradient is 1e-6 of the
global gradient norm: some gradients, such as that of a key bias, are zero in theory, and without a
floor the comparison would be of rounding noise. See docs/parallelism.md.

Both sides come as plain arrays, so comparing needs no engine; all become matrices.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
TOKENS, PIXELS, POSITIONS = "tokens", "pixels", "positions"
INPUTS = (TOKENS, PIXELS, POSITIONS)  # points at which both sides must have the same numbers
LOGITS = "language.head"

_NOISE = 1e-6  # of the global gradient norm
_SCALARS = ("loss_tokens", "loss", "grad_norm")
_LOSS = "loss_"  # of one module, in recipes with generators

Fault = Callable[[], None]
"""A deliberate bug: called in every rank before anything is built, at the top of its module."""


class IncomparableError(Exception):
    """One side lacks what the other has, or has it in another shape."""


# ------------------------------------------------------------------------- both sides


@dataclass(frozen=True)
class Part:
    """Values (n, k) of a tensor that one rank holds: its ``rows`` (n,), from ``column`` on."""

    where: str
    rows: np.ndarray
    column: int
    values: np.ndarray


@dataclass
class Shard:
    """A rectangle of a parameter that a rank holds.

    name: in the whole model, such as `language.decoder.layers.3.mlp.linear_fc1.weight`.
    where: such as `language, rank 5 (stage 1 · lane 0 · cp 0 · tp 1)`.
    shape: of the whole parameter. row, column: of the first element.
    gradients, weights: of each step, gradients before clipping; a frozen parameter has none.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    row: int = 0
    column: int = 0
    gradients: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)

    def part(self, values: np.ndarray) -> Part:
        """Return a gradient or weight as a part of the whole tensor. Raises IncomparableError."""
        if values.shape != self.weights[0].shape:
            shapes = f"shape {values.shape}, its weight {self.weights[0].shape}"
            raise IncomparableError(f"a gradient of {self.name} on {self.where} has {shapes}")
        return Part(self.where, self.row + np.arange(len(values)), self.column, values)


@dataclass
class RankSteps:
    """Metrics of each step, one rank's shards of parameters, and its parts of points by name."""

    metrics: list[dict[str, Any]]
    shards: list[Shard]
    points: dict[str, list[Part]] = field(default_factory=dict)


@dataclass
class ReferenceParameter:
    """The gradient before clipping of each step (none if frozen), the weights and their floors.

    Without ``weight_floors`` the gradient's floor applies.
    """

    gradients: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    weight_floors: list[float] = field(default_factory=list)


@dataclass
class Reference:
    """The values that a layout is compared with.

    steps: `loss` per token, `loss_tokens` and `grad_norm` of each. parameters: by name, in the
    order of the model. points: whole tensors in forward order, if activations are compared.
    """

    steps: list[dict[str, float]]
    parameters: dict[str, ReferenceParameter]
    points: dict[str, np.ndarray] = field(default_factory=dict)


def reference_of(results: Sequence[RankSteps], floors: Mapping[str, list[float]]) -> Reference:
    """Return a layout's steps as a reference without points; the last rank's replica counts.

    floors: of the weights, by parameter, in the order of the model.
    """
    shards, parameters = _shards_by_name(results), dict[str, ReferenceParameter]()
    for name in floors:
        gradients, weights = (join_shards(shards[name], what) for what in ("gradients", "weights"))
        parameters[name] = ReferenceParameter(gradients, weights, floors[name])
    steps = [
        {name: float(step[name]) for name in step if name in _SCALARS or name.startswith(_LOSS)}
        for step in results[0].metrics
    ]
    return Reference(steps, parameters)


def join_shards(shards: Sequence[Shard], what: str) -> list[np.ndarray]:
    """Return the whole "gradients" or "weights" of a parameter in each step."""
    tensors = []
    for step, like in enumerate(getattr(shards[0], what)):
        whole = np.full(_matrix(shards[0].shape), np.nan, like.dtype)
        for shard in shards:
            slice_of(whole, shard)[...] = getattr(shard, what)[step]
        tensors.append(whole.reshape(shards[0].shape))
    return tensors


def slice_of(whole: np.ndarray, shard: Shard) -> np.ndarray:
    """Return a view of the rectangle of a whole tensor that the shard's rank holds."""
    rows, columns = shard.weights[0].shape
    matrix = whole.reshape(_matrix(whole.shape))
    return matrix[shard.row : shard.row + rows, shard.column : shard.column + columns]


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _shards_by_name(results: Sequence[RankSteps]) -> dict[str, list[Shard]]:
    by_name = defaultdict[str, list[Shard]](list)
    for result in results:
        for shard in result.shards:
            by_name[shard.name].append(shard)
    return by_name


# ----------------------------------------------------------------- errors and floors


def badness(error: float) -> tuple[bool, float]:
    """Order errors: NaN is larger than anything."""
    return math.isnan(error), error


def largest(errors: Iterable[float]) -> float:
    """Return the maximum; 0 if there are no errors."""
    return max(errors, key=badness, default=0.0)


def gradient_floor(gradients: Iterable[np.ndarray]) -> float:
    """Return 1e-6 of the global norm of the reference's gradients."""
    return _NOISE * math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))


def update_floor(gradient_norm: float, rate: float, eps: float | None) -> float:
    """Return how far the optimizer moves a weight in one step for a gradient at its floor.

    SGD moves it by rate · g, Adam by about rate · g / (g + eps). gradient_norm: of all modules.
    eps: Adam's, None for SGD.
    """
    floor = _NOISE * gradient_norm
    return rate * floor if eps is None else rate * floor / (floor + eps)


@dataclass(frozen=True)
class Difference:
    """Where a layout departs from the reference.

    step: counts from 1. what: "activation", "gradient", "weight", or a metric of the step. where:
    module and rank. index: of the largest difference in the whole tensor, seen as a matrix.
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
            f"{self.got:.9g}, expected {self.expected:.9g} (error {self.error:.1e})"
        )


@dataclass
class Comparison:
    """Errors of a layout against a reference.

    points: by name. scalars: by step and name. gradients, weights: by parameter, the worst error
    of all ranks in each step. first: the first difference above the tolerance; points come before
    gradients and these before weights, all in model order. largest: of the same step and kind,
    which is often nearer to the origin of an error in the forward pass.
    """

    points: dict[str, Difference] = field(default_factory=dict)
    scalars: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, list[float]] = field(default_factory=dict)
    first: Difference | None = None
    largest: Difference | None = None

    @property
    def error(self) -> float:
        scalars = (name for step in self.scalars for name in step)
        return largest(self.worst(what) for what in ("gradients", "weights", *scalars))

    def worst(self, what: str) -> float:
        """Return the largest error of "gradients", "weights" or a metric, over all steps."""
        if what not in ("gradients", "weights"):
            return largest(step[what] for step in self.scalars)
        return largest(error for errors in getattr(self, what).values() for error in errors)

    def note(self, difference: Difference, tolerance: float) -> None:
        """Keep a difference that is above the tolerance, as NaN is, if first or largest."""
        if difference.error <= tolerance:
            return
        if self.first is None or self.largest is None:
            self.first = self.largest = difference
        same_kind = (difference.step, difference.what) == (self.first.step, self.first.what)
        if same_kind and badness(difference.error) > badness(self.largest.error):
            self.largest = difference

    def lines(self) -> list[str]:
        """Return the first and the largest difference for a report; no line if there is none."""
        return [f"first:   {self.first}", f"largest: {self.largest}"] if self.first else []


# --------------------------------------------------------------------- the comparison


def compare(results: Sequence[RankSteps], reference: Reference, tolerance: float) -> Comparison:
    """Compare every rank's points and steps; inputs must be equal. Raises IncomparableError."""
    comparison, shards = Comparison(), _shards_by_name(results)
    _compare_points(comparison, results, reference.points, tolerance)
    _check_parameters(shards, reference)
    for step, expected in enumerate(reference.steps):
        trained = (p.gradients for p in reference.parameters.values() if p.gradients)
        noise = gradient_floor(gradients[step] for gradients in trained)
        for what in ("gradient", "weight"):
            errors = getattr(comparison, f"{what}s")
            for name, parameter in reference.parameters.items():
                floors = parameter.weight_floors if what == "weight" else []
                floor = floors[step] if floors else noise
                worst = _worst_shard(shards[name], parameter, step, what, floor)
                if worst is not None:
                    errors.setdefault(name, []).append(worst.error)
                    comparison.note(worst, tolerance)
        scalars = [_worst_value(results, value, step, name) for name, value in expected.items()]
        for worst in scalars:
            comparison.note(worst, tolerance)
        comparison.scalars.append({worst.what: worst.error for worst in scalars})
    return comparison


def _compare_points(
    comparison: Comparison,
    results: Sequence[RankSteps],
    points: Mapping[str, np.ndarray],
    tolerance: float,
) -> None:
    """Compare inputs and logits by their difference, other points relative to the largest."""
    parts = defaultdict[str, list[Part]](list)
    for result in results:
        for name, parts_of_rank in result.points.items():
            parts[name] += parts_of_rank
    _check_names(parts, points)
    for name, whole in points.items():
        _check_parts(name, whole.shape, parts[name])
        is_absolute = name in (*INPUTS, LOGITS)
        scale = 1.0 if is_absolute else max(float(np.abs(whole).max(initial=0.0)), 1e-30)
        worst = _worst_part(parts[name], whole, scale, 1, "activation", name)
        if worst is not None:
            comparison.points[name] = worst
            comparison.note(worst, 0.0 if name in INPUTS else tolerance)


def _check_parameters(shards: Mapping[str, Sequence[Shard]], reference: Reference) -> None:
    _check_names(shards, reference.parameters)
    for name, shards_of_name in shards.items():
        whole = reference.parameters[name].weights[0]
        shapes = {shard.shape for shard in shards_of_name}
        if any(_matrix(shape) != _matrix(whole.shape) for shape in shapes):
            raise IncomparableError(f"{name} has shape {shapes}, expected {whole.shape}")
        _check_parts(name, whole.shape, [shard.part(shard.weights[0]) for shard in shards_of_name])


def _check_names(layout: Mapping[str, object], reference: Mapping[str, object]) -> None:
    if layout.keys() != reference.keys():
        alone = sorted(layout.keys() ^ reference.keys())
        raise IncomparableError(f"only the layout or only its reference has {', '.join(alone)}")


def _check_parts(name: str, shape: Sequence[int], parts: Sequence[Part]) -> None:
    """Raise IncomparableError unless the parts lie in the whole tensor and cover it."""
    covered = np.zeros(_matrix(shape), bool)
    for part in parts:
        end = int(part.rows.max(initial=-1)) + 1, part.column + part.values.shape[1]
        if end[0] > len(covered) or end[1] > covered.shape[1]:
            raise IncomparableError(
                f"{name}: {part.where} has a tensor of at least {end}, expected {covered.shape}"
            )
        covered[part.rows, part.column : end[1]] = True
    if not covered.all():
        raise IncomparableError(f"{name}: ranks hold {covered.sum()} of {covered.size} elements")


def _worst_shard(
    shards: Sequence[Shard], parameter: ReferenceParameter, step: int, what: str, floor: float
) -> Difference | None:
    """Return the worst difference over all ranks' shards; None if frozen in both runs."""
    steps, parts = getattr(parameter, f"{what}s"), []
    for shard in shards:
        values = getattr(shard, f"{what}s")
        if values or steps:  # if only one of the two has a gradient, the other's is zero
            parts.append(shard.part(values[step] if values else np.zeros_like(shard.weights[0])))
    whole = steps[step] if steps else np.zeros_like(parameter.weights[0])
    scale = max(float(np.abs(whole).max(initial=0.0)), floor)
    return _worst_part(parts, whole, scale, step + 1, what, shards[0].name)


def _worst_part(
    parts: Sequence[Part], whole: np.ndarray, scale: float, step: int, what: str, name: str
) -> Difference | None:
    """Return the worst difference over all ranks' parts of a tensor; None without elements."""
    differences, matrix = [], whole.reshape(_matrix(whole.shape))
    for part in parts:
        got = part.values
        expected = matrix[part.rows, part.column : part.column + got.shape[1]]
        delta = np.abs(got - expected)
        if not delta.size:
            continue
        at = tuple(int(i) for i in np.unravel_index(int(delta.argmax()), delta.shape))
        index = (int(part.rows[at[0]]), part.column + at[1])[: whole.ndim]
        values = float(got[at]), float(expected[at]), float(delta[at]) / scale
        differences.append(Difference(step, what, name, part.where, index, *values))
    return max(differences, key=lambda difference: badness(difference.error), default=None)


def _worst_value(results: Sequence[RankSteps], expected: float, step: int, name: str) -> Difference:
    differences = []
    for rank, result in enumerate(results):
        got = float(result.metrics[step][name])
        error = abs(got - expected) / max(abs(expected), 1e-12)
        values = f"rank {rank}", (), got, expected, error
        differences.append(Difference(step + 1, name, "the step", *values))
    return max(differences, key=lambda difference: badness(difference.error))
