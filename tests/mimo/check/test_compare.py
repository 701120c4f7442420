"""The comparison itself, on hand-made tensors: it must find every error, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mimo.check.compare import (
    Comparison,
    Difference,
    IncomparableError,
    PointPart,
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
from mimo.check.points import (
    LOGITS,
    PIXELS,
    TOKENS,
    PointResult,
    compare_points,
    whole_points,
)

STEP = {"loss": 2.0, "loss_tokens": 10, "grad_norm": 3.0}


def shard(
    name: str,
    gradient: np.ndarray | None,
    weight: np.ndarray,
    shape: tuple[int, ...] | None = None,
    **place: int,
) -> Shard:
    where = {"rank": 0, "stage": 0, "lane": 0, "cp": 0, "tp": 0} | place
    gradients = [] if gradient is None else [matrix(gradient)]
    shape = weight.shape if shape is None else shape
    of = name.partition(".")[0]
    return Shard(name, of, shape=shape, gradients=gradients, weights=[matrix(weight)], **where)


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
        shard("language.b", VALUES * 3, VALUES, rank=2, stage=1),
        shard("vision.a", VALUES, VALUES + 1),
    ]
    difference = first(expected, *shards)
    assert (difference.what, difference.name) == ("gradient", "language.b")
    assert (difference.index, difference.got, difference.expected) == ((1,), -6.0, -2.0)
    assert difference.error == 2.0
    assert difference.where == "language, rank 2 (stage 1 · lane 0 · tp 0)"
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
    shards = [shard("a", part, part, (8,), rank=tp, tp=tp, row=row) for row, tp, part in parts]
    for rank_shard, (_, _, part) in zip(shards, parts, strict=True):
        np.testing.assert_array_equal(slice_of(whole, rank_shard)[:, 0], part)
    expected = reference(a=(whole, whole))
    assert run(expected, *shards).first is None
    replica = shard("a", whole[6:] + 7, whole[6:], (8,), rank=5, tp=1, lane=1, row=6)
    difference = first(expected, *shards, replica)
    assert difference.index == (6,)
    assert difference.where == "a, rank 5 (stage 0 · lane 1 · tp 1)"


def test_columns_of_a_matrix_are_compared_with_those_columns() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    halves = [
        shard("a", whole[:, c : c + 2], whole[:, c : c + 2], (3, 4), tp=c // 2, column=c)
        for c in (0, 2)
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
        shard("a", whole[:, c : c + 4], whole[:, c : c + 4] + 1, (2, 12), tp=c // 4, column=c)
        for c in (8, 0, 4)
    ]
    steps = [RankSteps([dict(STEP)], [held]) for held in [*shards, shard("b", None, VALUES)]]
    joined = reference_of(steps, {"a": [], "b": []})
    np.testing.assert_array_equal(joined.parameters["a"].gradients[0], whole)
    np.testing.assert_array_equal(joined.parameters["a"].weights[0], whole + 1)
    assert joined.parameters["b"].gradients == []
    assert compare(steps, joined, 0.0).first is None


def test_a_parameter_that_only_one_side_has_cannot_be_compared() -> None:
    with pytest.raises(IncomparableError, match="only the layout or only one rank has a, b"):
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


def part(point: str, rows: list[int], values: np.ndarray, columns: int = 0) -> RankSteps:
    """One rank's part of a point."""
    where = f"rank of rows {rows}"
    return RankSteps([], [], [PointPart(point, where, np.array(rows, np.int64), values, columns)])


def lines(results: list[RankSteps], **points: np.ndarray) -> list[PointResult]:
    return compare_points(results, points, 1e-5)


def test_parts_of_ranks_in_any_order_make_up_a_tensor() -> None:
    results = [part("x", [3, 1], HIDDEN[[3, 1]]), part("x", [0, 2], HIDDEN[[0, 2]])]
    (line,) = lines(results, x=HIDDEN)
    assert line.passed
    assert line.error == 0


def test_the_rank_that_is_furthest_off_is_named_also_where_another_has_the_same_rows() -> None:
    wrong = HIDDEN.copy()
    wrong[2] += 1e-3
    results = [part("x", ROWS, HIDDEN), part("x", [3, 2], wrong[[3, 2]])]
    (line,) = lines(results, x=HIDDEN)
    assert not line.passed
    assert line.where == "rank of rows [3, 2]"
    assert line.error == pytest.approx(1e-3 / 2), "of the largest number"


def test_not_a_number_in_an_activation_is_a_difference() -> None:
    wrong = HIDDEN.copy()
    wrong[1, 1] = math.nan
    for results in ([wrong, HIDDEN], [HIDDEN, wrong]):
        (line,) = lines([part("x", ROWS, values) for values in results], x=HIDDEN)
        assert not line.passed
        assert math.isnan(line.error)


@pytest.mark.parametrize("rows", [[0, 1, 2], []])
def test_rows_that_no_rank_has_are_an_error(rows: list[int]) -> None:
    with pytest.raises(IncomparableError, match=f"x: no rank has {4 - len(rows)} of 4 rows"):
        lines([part("x", rows, HIDDEN[rows])], x=HIDDEN)


def test_columns_of_logits_that_no_rank_has_are_an_error() -> None:
    with pytest.raises(IncomparableError, match="no rank has 4 of 4 rows"):
        lines([part(LOGITS, ROWS, HIDDEN[:, :2])], **{LOGITS: HIDDEN})


def test_logits_are_compared_by_their_difference_and_without_padding() -> None:
    padded = np.pad(HIDDEN + 2e-5, [(0, 0), (0, 1)])
    results = [part(LOGITS, ROWS, padded[:, :2]), part(LOGITS, ROWS, padded[:, 2:], columns=2)]
    (line,) = lines(results, **{LOGITS: HIDDEN})
    assert line.measure == "max|Δ|"
    assert line.error == pytest.approx(2e-5)
    assert not line.passed


def test_a_hidden_size_that_differs_is_a_difference() -> None:
    (line,) = lines([part("x", ROWS, HIDDEN[:, [0, 1, 2, 2]])], x=HIDDEN)
    assert not line.passed
    assert math.isinf(line.error)


def test_behind_an_input_that_differs_only_inputs_are_compared() -> None:
    expected = {TOKENS: np.array([[1], [2]]), PIXELS: HIDDEN, "x": HIDDEN}
    results = [
        part(TOKENS, [0, 1], np.array([[1], [3]])),
        part(PIXELS, ROWS, HIDDEN),
        part("x", ROWS, HIDDEN),
    ]
    tokens, pixels = lines(results, **expected)
    assert (tokens.point, tokens.passed, tokens.error) == (TOKENS, False, 1)
    assert (pixels.point, pixels.passed) == (PIXELS, True)


def test_a_point_that_transformers_has_not_is_an_error() -> None:
    with pytest.raises(IncomparableError, match="only our side has y"):
        lines([part("x", ROWS, HIDDEN), part("y", [0], HIDDEN[:1])], x=HIDDEN)


def test_the_parts_of_another_layout_make_whole_tensors_in_forward_order() -> None:
    wide = np.pad(HIDDEN, [(0, 0), (0, 1)])
    others = [
        part(LOGITS, ROWS, wide[:, 2:], columns=2),
        part(LOGITS, ROWS, wide[:, :2]),
        part("language.layers.10", ROWS, HIDDEN),
        part("language.layers.9", [3, 1], HIDDEN[[3, 1]]),
        part("language.layers.9", [0, 2], HIDDEN[[0, 2]]),
        part("vision.level 0", ROWS, HIDDEN),
        part("vision.rows", ROWS, HIDDEN),
        part(TOKENS, ROWS, HIDDEN),
    ]
    ours = [part(LOGITS, ROWS, HIDDEN)]
    points = whole_points(others, ours)
    layers = ["language.layers.9", "language.layers.10"]
    assert [*points] == [TOKENS, "vision.rows", "vision.level 0", *layers, LOGITS]
    assert all(np.array_equal(whole, HIDDEN) for whole in points.values())
    with pytest.raises(IncomparableError, match=r"vision.rows: .* only a part of it"):
        whole_points([part("vision.rows", [0, 2], HIDDEN[[0, 2]])], ours)
