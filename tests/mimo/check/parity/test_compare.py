"""Comparing without ranks: what counts as equal, and what is said where something is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mimo.check.parity.compare import (
    LOGITS,
    PIXELS,
    TOKENS,
    Line,
    OursOnRank,
    Part,
    Theirs,
    compare_points,
    whole_points,
)
from mimo.check.verify.compare import IncomparableError, RankSteps, Reference

TOLERANCE = 1e-5
HIDDEN = np.linspace(-2, 2, 12).reshape(4, 3)


def theirs(**points: np.ndarray) -> Theirs:
    return Theirs(dict(points), Reference([], {}))


def part(point: str, rows: list[int], values: np.ndarray, columns: int = 0) -> OursOnRank:
    """What one rank has."""
    where = f"rank of rows {rows}"
    return OursOnRank(
        [Part(point, where, np.array(rows, np.int64), values, columns)], RankSteps([], [])
    )


def lines(results: list[OursOnRank], expected: Theirs) -> list[Line]:
    return compare_points(results, expected.points, TOLERANCE)


def test_parts_of_ranks_in_any_order_make_up_a_tensor() -> None:
    expected = theirs(x=HIDDEN)
    results = [part("x", [3, 1], HIDDEN[[3, 1]]), part("x", [0, 2], HIDDEN[[0, 2]])]
    (line,) = lines(results, expected)
    assert line.passed
    assert line.error == 0


def test_the_rank_that_is_furthest_off_is_named_also_where_another_has_the_same_rows() -> None:
    wrong = HIDDEN.copy()
    wrong[2] += 1e-3
    results = [part("x", [0, 1, 2, 3], HIDDEN), part("x", [3, 2], wrong[[3, 2]])]
    (line,) = lines(results, theirs(x=HIDDEN))
    assert not line.passed
    assert line.where == "rank of rows [3, 2]"
    assert line.error == pytest.approx(1e-3 / 2), "of the largest number"


def test_not_a_number_is_a_difference() -> None:
    wrong = HIDDEN.copy()
    wrong[1, 1] = math.nan
    for results in ([wrong, HIDDEN], [HIDDEN, wrong]):
        (line,) = lines([part("x", [0, 1, 2, 3], one) for one in results], theirs(x=HIDDEN))
        assert not line.passed
        assert math.isnan(line.error)


@pytest.mark.parametrize("rows", [[0, 1, 2], []])
def test_rows_that_no_rank_has_are_an_error(rows: list[int]) -> None:
    with pytest.raises(IncomparableError, match=f"x: no rank has {4 - len(rows)} of 4 rows"):
        lines([part("x", rows, HIDDEN[rows])], theirs(x=HIDDEN))


def test_columns_of_logits_that_no_rank_has_are_an_error() -> None:
    with pytest.raises(IncomparableError, match="no rank has 4 of 4 rows"):
        lines([part(LOGITS, [0, 1, 2, 3], HIDDEN[:, :2])], theirs(**{LOGITS: HIDDEN}))


def test_logits_are_compared_by_their_difference_and_without_padding() -> None:
    padded = np.pad(HIDDEN + 2e-5, [(0, 0), (0, 1)])
    rows = [0, 1, 2, 3]
    results = [part(LOGITS, rows, padded[:, :2]), part(LOGITS, rows, padded[:, 2:], columns=2)]
    (line,) = lines(results, theirs(**{LOGITS: HIDDEN}))
    assert line.measure == "difference"
    assert line.error == pytest.approx(2e-5)
    assert not line.passed


def test_a_hidden_size_that_differs_is_a_difference() -> None:
    (line,) = lines([part("x", [0, 1, 2, 3], HIDDEN[:, [0, 1, 2, 2]])], theirs(x=HIDDEN))
    assert not line.passed
    assert math.isinf(line.error)


def test_behind_an_input_that_differs_only_inputs_are_compared() -> None:
    expected = theirs(**{TOKENS: np.array([[1], [2]]), PIXELS: HIDDEN, "x": HIDDEN})
    rows = [0, 1, 2, 3]
    results = [
        part(TOKENS, [0, 1], np.array([[1], [3]])),
        part(PIXELS, rows, HIDDEN),
        part("x", rows, HIDDEN),
    ]
    found = lines(results, expected)
    assert [(line.point, line.passed) for line in found] == [(TOKENS, False), (PIXELS, True)]
    assert found[0].error == 1, "one entry"


def test_a_point_that_transformers_has_not_is_an_error() -> None:
    with pytest.raises(IncomparableError, match="only our side has y"):
        lines([part("x", [0, 1, 2, 3], HIDDEN), part("y", [0], HIDDEN[:1])], theirs(x=HIDDEN))


def test_the_parts_of_another_layout_make_whole_tensors_in_forward_order() -> None:
    rows = [0, 1, 2, 3]
    wide = np.pad(HIDDEN, [(0, 0), (0, 1)])
    others = [
        part(LOGITS, rows, wide[:, 2:], columns=2),
        part(LOGITS, rows, wide[:, :2]),
        part("language.layers.10", rows, HIDDEN),
        part("language.layers.9", [3, 1], HIDDEN[[3, 1]]),
        part("language.layers.9", [0, 2], HIDDEN[[0, 2]]),
        part("vision.level 0", rows, HIDDEN),
        part("vision.rows", rows, HIDDEN),
        part(TOKENS, rows, HIDDEN),
    ]
    ours = [part(LOGITS, rows, HIDDEN)]
    found = whole_points(others, ours)
    layers = ["language.layers.9", "language.layers.10"]
    assert [*found] == [TOKENS, "vision.rows", "vision.level 0", *layers, LOGITS]
    assert all(np.array_equal(whole, HIDDEN) for whole in found.values())
    with pytest.raises(IncomparableError, match=r"vision.rows: .* only a part of it"):
        whole_points([part("vision.rows", [0, 2], HIDDEN[[0, 2]])], ours)
