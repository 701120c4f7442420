"""The comparison itself, on hand-made tensors: it must find every error, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mimo.check.compare import (
    LOGITS,
    PIXELS,
    TOKENS,
    Comparison,
    Difference,
    IncomparableError,
    Part,
    RankSteps,
    Reference,
    ReferenceParameter,
    Shard,
    compare,
    largest,
    reference_of,
    slice_of,
    update_floor,
)

STEP = {"loss": 2.0, "loss_tokens": 10, "grad_norm": 3.0}


def shard(
    name: str,
    gradient: np.ndarray | None,
    weight: np.ndarray,
    shape: tuple[int, ...] | None = None,
    where: str = "rank 0",
    **place: int,
) -> Shard:
    gradients = [] if gradient is None else [matrix(gradient)]
    shape = weight.shape if shape is None else shape
    return Shard(name, where, shape, gradients=gradients, weights=[matrix(weight)], **place)


def matrix(tensor: np.ndarray) -> np.ndarray:
    return tensor.reshape(len(tensor), -1)


def reference(**parameters: tuple[np.ndarray | None, np.ndarray]) -> Reference:
    return Reference(
        [dict(STEP)],
        {
            name.replace("__", "."): ReferenceParameter([] if g is None else [g], [w])
            for name, (g, w) in parameters.items()
        },
    )


def run(expected: Reference, *shards: Shard, **metrics: float) -> Comparison:
    return compare([RankSteps([{**STEP, **metrics}], list(shards))], expected, 1e-5)


def first(expected: Reference, *shards: Shard, **metrics: float) -> Difference:
    difference = run(expected, *shards, **metrics).first
    assert difference is not None
    return difference


VALUES = np.array([1.0, -2.0], np.float32)


def test_equal_tensors_and_numbers_have_no_difference() -> None:
    comparison = run(reference(vision__a=(VALUES, VALUES)), shard("vision.a", VALUES, VALUES))
    assert comparison.first is None
    assert comparison.gradients == {"vision.a": [0.0]}


def test_gradients_come_before_weights_and_parameters_in_the_order_of_the_model() -> None:
    expected = reference(vision__a=(VALUES, VALUES), language__b=(VALUES, VALUES))
    shards = [
        shard("language.b", VALUES * 3, VALUES, where="rank 2"),
        shard("vision.a", VALUES, VALUES + 1),
    ]
    difference = first(expected, *shards)
    assert (difference.what, difference.name) == ("gradient", "language.b")
    assert (difference.index, difference.got, difference.expected) == ((1,), -6.0, -2.0)
    assert difference.error == 2.0
    assert difference.where == "rank 2"
    comparison = run(expected, *shards)
    assert comparison.largest is not None
    assert comparison.worst("weights") == 0.5


def test_not_a_number_is_a_difference() -> None:
    broken, expected = np.array([1.0, math.nan], np.float32), reference(a=(VALUES, VALUES))
    comparison = run(expected, shard("a", broken, VALUES))
    assert comparison.first is not None
    assert comparison.first.index == (1,)
    assert math.isnan(comparison.worst("gradients"))
    assert math.isnan(largest([math.nan, 1.0, 2.0]))
    assert first(expected, shard("a", VALUES, VALUES), loss=math.nan).what == "loss"


@pytest.mark.parametrize("name", ["loss", "grad_norm", "loss_tokens"])
def test_a_number_of_the_step_that_differs_is_named(name: str) -> None:
    expected = reference(a=(VALUES, VALUES))
    difference = first(expected, shard("a", VALUES, VALUES), **{name: 4.0})
    assert (difference.what, difference.got) == (name, 4.0)


def test_every_part_and_replica_is_compared() -> None:
    # Two stacked matrices, each split over two ranks.
    whole = np.arange(8.0, dtype=np.float32)
    rows = {0: 0, 4: 0, 2: 1, 6: 1}
    parts = [(row, tp, whole[row : row + 2]) for row, tp in rows.items()]
    shards = [shard("a", part, part, (8,), f"rank {tp}", row=row) for row, tp, part in parts]
    for rank_shard, (_, _, part) in zip(shards, parts, strict=True):
        np.testing.assert_array_equal(slice_of(whole, rank_shard)[:, 0], part)
    expected = reference(a=(whole, whole))
    assert run(expected, *shards).first is None
    replica = shard("a", whole[6:] + 7, whole[6:], (8,), "rank 5", row=6)
    difference = first(expected, *shards, replica)
    assert difference.index == (6,)
    assert difference.where == "rank 5"


def test_columns_of_a_matrix_are_compared_with_those_columns() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    halves = [
        shard("a", whole[:, c : c + 2], whole[:, c : c + 2], (3, 4), column=c) for c in (0, 2)
    ]
    expected = reference(a=(whole, whole))
    assert run(expected, *halves).first is None
    halves[1].gradients[0] = halves[1].gradients[0] + np.eye(3, 2)[::-1]
    assert first(expected, *halves).index in {(1, 3), (2, 2)}


def test_a_gradient_that_only_one_side_has_is_a_difference_from_zero() -> None:
    trained, lost = shard("a", VALUES, VALUES), shard("a", None, VALUES)
    other, frozen = shard("b", VALUES, VALUES), reference(a=(None, VALUES), b=(VALUES, VALUES))
    difference = first(frozen, trained, other)
    assert (difference.name, difference.got, difference.expected) == ("a", -2.0, 0.0)
    difference = first(reference(a=(VALUES, VALUES)), lost)
    assert (difference.got, difference.expected) == (0.0, -2.0)
    both = run(frozen, lost, other)
    assert both.first is None
    assert "a" not in both.gradients


def test_a_gradient_that_is_zero_in_theory_is_measured_by_the_global_norm() -> None:
    noise = np.array([1e-9, 0.0], np.float32)
    expected = reference(key_bias=(noise, VALUES), b=(VALUES * 1000, VALUES))
    shards = shard("key_bias", noise * -1, VALUES), shard("b", VALUES * 1000, VALUES)
    assert run(expected, *shards).first is None
    alone = run(reference(key_bias=(noise, VALUES)), shard("key_bias", noise * -1, VALUES))
    assert alone.worst("gradients") == 2.0


def test_the_floor_of_a_weight_is_the_update_that_noise_causes() -> None:
    # A key bias and a norm, both zero at first, after two steps of Adam.
    rate, eps = 0.01, 1e-3
    floor = 2 * update_floor(1.0, rate, eps)
    assert floor == pytest.approx(2 * rate * 1e-6 / eps, rel=2e-3)
    noise = np.array([1e-14, -2e-14])
    norm = np.array([0.5, -0.3]) * rate

    def weights_differ(key_bias: np.ndarray, norm_weight: np.ndarray) -> str:
        expected = Reference(
            [dict(STEP)],
            {
                "key_bias": ReferenceParameter([VALUES], [noise], [floor]),
                "norm": ReferenceParameter([VALUES], [norm], [floor]),
            },
        )
        shards = shard("key_bias", VALUES, key_bias), shard("norm", VALUES, norm_weight)
        difference = run(expected, *shards).first
        return "" if difference is None else difference.name

    assert weights_differ(-noise, norm) == ""
    assert weights_differ(-noise, norm * (1 + 2e-5)) == "norm"
    # An error of the key bias that is none of rounding.
    assert weights_differ(noise + 1e-3 * floor, norm) == "key_bias"
    assert update_floor(3.0, 0.1, None) == pytest.approx(3e-7)


def test_whole_tensors_are_put_together_from_the_parts_of_all_ranks() -> None:
    whole = np.arange(24.0).reshape(2, 12)
    shards = [
        shard("a", whole[:, c : c + 4], whole[:, c : c + 4] + 1, (2, 12), column=c)
        for c in (8, 0, 4)
    ]
    steps = [RankSteps([dict(STEP)], [held]) for held in [*shards, shard("b", None, VALUES)]]
    joined = reference_of(steps, {"a": [], "b": []})
    np.testing.assert_array_equal(joined.parameters["a"].gradients[0], whole)
    np.testing.assert_array_equal(joined.parameters["a"].weights[0], whole + 1)
    assert joined.parameters["b"].gradients == []
    assert compare(steps, joined, 0.0).first is None


def test_a_parameter_that_only_one_side_has_cannot_be_compared() -> None:
    with pytest.raises(IncomparableError, match="only the layout or only its reference has a, b"):
        run(reference(a=(VALUES, VALUES)), shard("b", VALUES, VALUES))


def test_a_tensor_of_another_shape_or_a_missing_part_cannot_be_compared() -> None:
    whole = np.ones((2, 2), np.float32)
    expected = reference(a=(whole, whole))
    for shape in ((1, 2), (1, 1), (3, 2)):
        wrong = np.ones(shape, np.float32)
        with pytest.raises(IncomparableError, match="a has shape"):
            run(expected, shard("a", wrong, wrong))
    half = whole[:1]
    with pytest.raises(IncomparableError, match="a: ranks hold 2 of 4 elements"):
        run(expected, shard("a", half, half, (2, 2)))


# ------------------------------------------------------------------------- activations

HIDDEN, ROWS = np.linspace(-2, 2, 12).reshape(4, 3), [0, 1, 2, 3]


def compare_points(
    points: dict[str, np.ndarray], *parts: tuple[str, list[int], np.ndarray]
) -> Comparison:
    """Compare points with one part of each rank: name, rows and values."""
    results = [
        RankSteps([], [], {name: [Part(f"rank {n}", np.array(rows, np.int64), 0, values)]})
        for n, (name, rows, values) in enumerate(parts)
    ]
    return compare(results, Reference([], {}, points), 1e-5)


def test_parts_of_ranks_in_any_order_make_up_a_tensor() -> None:
    parts = [("x", rows, HIDDEN[rows]) for rows in ([3, 1], [0, 2])]
    comparison = compare_points({"x": HIDDEN}, *parts)
    assert comparison.first is None
    assert comparison.points["x"].error == 0


def test_the_rank_that_is_furthest_off_is_named_also_where_another_has_the_same_rows() -> None:
    wrong = HIDDEN.copy()
    wrong[2] += 1e-3
    first = compare_points({"x": HIDDEN}, ("x", ROWS, HIDDEN), ("x", [3, 2], wrong[[3, 2]])).first
    assert first is not None
    assert (first.name, first.where, first.index[0]) == ("x", "rank 1", 2)
    assert first.error == pytest.approx(1e-3 / 2), "of the largest number"


def test_not_a_number_in_an_activation_is_a_difference() -> None:
    wrong = HIDDEN.copy()
    wrong[1, 1] = math.nan
    for both in ([wrong, HIDDEN], [HIDDEN, wrong]):
        first = compare_points({"x": HIDDEN}, *(("x", ROWS, values) for values in both)).first
        assert first is not None
        assert math.isnan(first.error)


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([0, 1, 2], HIDDEN[:3], "x: ranks hold 9 of 12 elements"),
        ([0, 1, 2, 4], HIDDEN, r"x: rank 0 has a tensor of at least \("),
        (ROWS, HIDDEN[:, [0, 1, 2, 2]], r"x: rank 0 has a tensor of at least \("),
    ],
)
def test_rows_that_no_rank_has_or_beyond_the_tensor_are_an_error(
    rows: list[int], values: np.ndarray, message: str
) -> None:
    with pytest.raises(IncomparableError, match=message):
        compare_points({"x": HIDDEN}, ("x", rows, values))


def test_logits_are_compared_by_their_difference() -> None:
    first = compare_points({LOGITS: HIDDEN}, (LOGITS, ROWS, HIDDEN + 2e-5)).first
    assert first is not None
    assert first.error == pytest.approx(2e-5)


def test_inputs_must_be_equal_and_come_first() -> None:
    points = {TOKENS: np.array([[1], [2]]), PIXELS: HIDDEN * 1e-7, "x": HIDDEN}
    parts = [(TOKENS, [0, 1], points[TOKENS]), (PIXELS, ROWS, HIDDEN * 0), ("x", ROWS, -HIDDEN)]
    first = compare_points(points, *parts).first
    assert first is not None
    assert first.name == PIXELS


def test_a_point_that_only_one_side_has_is_an_error() -> None:
    with pytest.raises(IncomparableError, match="only the layout or only its reference has y"):
        compare_points({"x": HIDDEN}, ("x", ROWS, HIDDEN), ("y", [0], HIDDEN[:1]))
