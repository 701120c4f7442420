"""Compares what the ranks of a layout hold with the one-rank run; see docs/parallelism.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mimo.verify.results import RankSteps, Reference, ReferenceParameter, Shard

_TIED_COPY = "language.output_layer.weight"
_EMBEDDING = "language.embedding.word_embeddings.weight"
_NOISE = 1e-6  # of the global gradient norm
_SCALARS = ("loss_tokens", "loss", "grad_norm")


class IncomparableError(Exception):
    """A layout's parameters are not those of one rank: some are missing or differ in shape."""


@dataclass(frozen=True)
class Difference:
    """Where a layout first departs from the one-rank run.

    step: counts from 1. what: "gradient", "weight", or the name of one of the step's metrics.
    where: module, rank and pipeline stage. index: of the largest difference in the rank's part.
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
    in each step.
    first: the first difference above the tolerance; within a step gradients come before weights,
    both in model order. largest: the largest difference of the same step and kind. An error in the
    forward pass reaches every gradient, and the largest is often nearer to its origin.
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
        errors: dict[str, list[float]] = getattr(self, what)
        return largest(error for own in errors.values() for error in own)


def largest(errors: Iterable[float]) -> float:
    """The maximum, where NaN is larger than anything; 0 if there are no errors."""
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e, default=0.0)


def is_worse(error: float, than: float) -> bool:
    """Whether ``error`` is larger than ``than``, where NaN is larger than anything."""
    return not math.isnan(than) and (math.isnan(error) or error > than)


def gradient_floor(gradients: Iterable[np.ndarray]) -> float:
    """1e-6 of the global norm; a tensor below it is rounding noise, such as a key bias's gradient.

    gradients: of the one-rank run.
    """
    return _NOISE * math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))


def update_floor(gradient_norm: float, rate: float, eps: float | None) -> float:
    """How far the optimizer moves a weight in one step for a gradient at `gradient_floor`.

    A weight that starts at zero, such as a bias or the norms of some families, is the sum of its
    updates: if its gradients are rounding noise, so is the weight. SGD moves it by rate · g, Adam
    by about rate · g / (g + eps). The sum over all steps is the weight's floor, so that a weight is
    judged no more strictly than the gradients that moved it.

    gradient_norm: of all modules. eps: Adam's, or None for SGD.
    """
    floor = _NOISE * gradient_norm
    return rate * floor if eps is None else rate * floor / (floor + eps)


def tensor_error(got: np.ndarray, expected: np.ndarray, scale: float) -> float:
    """max|Δ| / scale, where scale is max(max|reference|, floor)."""
    return float(np.abs(got - expected).max(initial=0.0)) / scale


def compare(results: Sequence[RankSteps], reference: Reference, tolerance: float) -> Comparison:
    """Compare every metric and every rank's part of every tensor, after every step.

    Raises IncomparableError if the layout's parameters are not those of one rank.
    """
    found = Comparison()
    shards: dict[str, list[Shard]] = {}
    for result in results:
        for shard in result.shards:
            shards.setdefault(_reference_name(shard, reference), []).append(shard)
    if shards.keys() != reference.parameters.keys():
        alone = sorted(shards.keys() ^ reference.parameters.keys())
        raise IncomparableError(f"only the layout or only one rank has {', '.join(alone)}")
    for name, own in shards.items():
        missing = set(range(own[0].tp_size)) - {shard.tp for shard in own}
        if own[0].tp_size > 1 and missing:
            raise IncomparableError(f"{name}: no rank holds the part of tp {sorted(missing)}")
    for step in range(len(reference.steps)):
        floor = gradient_floor(
            p.gradients[step] for p in reference.parameters.values() if p.gradients
        )
        for what in ("gradient", "weight"):
            for name in reference.parameters:
                floors = reference.parameters[name].weight_floors if what == "weight" else []
                own = floors[step] if floors else floor
                differs = _compare_parameter(shards[name], reference, name, step, what, own)
                if differs is None:
                    continue
                getattr(found, f"{what}s").setdefault(name, []).append(differs.error)
                _note(found, differs, tolerance)
        _compare_scalars(found, results, reference, step, tolerance)
    return found


def assembled(results: Sequence[RankSteps], like: Reference) -> Reference:
    """What a layout's ranks hold, as whole tensors, as a reference for another run of the layout.

    Of replicas the last rank's counts. like: the one-rank run, already found comparable.
    """
    parts: dict[str, dict[int, Shard]] = {}
    for result in results:
        for shard in result.shards:
            parts.setdefault(_reference_name(shard, like), {})[shard.tp] = shard
    whole = {}
    for name, expected in like.parameters.items():
        own = [shard for _, shard in sorted(parts[name].items())]
        whole[name] = ReferenceParameter(
            [_join([s.gradients[n] for s in own], own[0]) for n in range(len(own[0].gradients))],
            [_join([s.weights[n] for s in own], own[0]) for n in range(len(own[0].weights))],
            expected.weight_floors,
        )
    return Reference(
        [{name: float(step[name]) for name in _SCALARS} for step in results[0].metrics], whole
    )


def _join(parts: Sequence[np.ndarray], shard: Shard) -> np.ndarray:
    """The inverse of `slice_of`: the whole tensor from the parts of all tp ranks."""
    if shard.tp_size == 1:
        return parts[0]
    blocks = zip(*(np.split(part, shard.stride, shard.dim) for part in parts), strict=True)
    return np.concatenate([one for block in blocks for one in block], shard.dim)


def _note(found: Comparison, difference: Difference, tolerance: float) -> None:
    # Written so that NaN counts as a difference.
    if difference.error <= tolerance:
        return
    if found.first is None:
        found.first = found.largest = difference
    assert found.largest is not None
    same_kind = (difference.step, difference.what) == (found.first.step, found.first.what)
    if same_kind and is_worse(difference.error, found.largest.error):
        found.largest = difference


def _reference_name(shard: Shard, reference: Reference) -> str:
    """The name on one rank, where the last stage's copy of a tied embedding has none."""
    is_copy = shard.name == _TIED_COPY and _TIED_COPY not in reference.parameters
    return _EMBEDDING if is_copy else shard.name


def _compare_parameter(
    shards: Sequence[Shard], reference: Reference, name: str, step: int, what: str, floor: float
) -> Difference | None:
    """The worst difference over all ranks' parts of a parameter; None if frozen in both runs."""
    expected = reference.parameters[name]
    whole = expected.gradients if what == "gradient" else expected.weights
    worst = None
    for shard in shards:
        parts = shard.gradients if what == "gradient" else shard.weights
        if not parts and not whole:
            continue
        # If only one of the two has a gradient, the other's is zero.
        wanted = slice_of(whole[step], shard) if whole else np.zeros_like(parts[step])
        if parts and parts[step].shape != wanted.shape:
            raise IncomparableError(
                f"{shard.name} on {shard.where} has shape {parts[step].shape}, the part of one "
                f"rank's is {wanted.shape}"
            )
        got = parts[step] if parts else np.zeros_like(wanted)
        scale = max(float(np.abs(whole[step]).max()) if whole else 0.0, floor)
        error = tensor_error(got, wanted, scale)
        if worst is None or is_worse(error, worst.error):
            delta = np.abs(got - wanted)
            index = tuple(int(i) for i in np.unravel_index(int(delta.argmax()), delta.shape))
            values = float(got[index]), float(wanted[index])
            worst = Difference(step + 1, what, shard.name, shard.where, index, *values, error)
    return worst


def slice_of(whole: np.ndarray, shard: Shard) -> np.ndarray:
    """The part of a one-rank tensor that the shard's rank holds."""
    if shard.tp_size == 1:
        return whole
    blocks = np.split(whole, shard.stride, shard.dim)
    return np.concatenate(
        [np.split(block, shard.tp_size, shard.dim)[shard.tp] for block in blocks], shard.dim
    )


def _compare_scalars(
    found: Comparison,
    results: Sequence[RankSteps],
    reference: Reference,
    step: int,
    tolerance: float,
) -> None:
    expected, errors = reference.steps[step], {}
    for name in _SCALARS:
        worst = None
        for rank, result in enumerate(results):
            got = float(result.metrics[step][name])
            error = abs(got - expected[name]) / max(abs(expected[name]), 1e-12)
            if worst is None or is_worse(error, worst.error):
                worst = Difference(
                    step + 1, name, "the step", f"rank {rank}", (), got, expected[name], error
                )
        assert worst is not None
        errors[name] = worst.error
        _note(found, worst, tolerance)
    found.scalars.append(errors)
