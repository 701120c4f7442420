"""The metrics of `mimo evaluate`, by examples of their sources."""

from __future__ import annotations

from typing import get_args

import pytest

from mimo.config.training import Metric
from mimo.generate.scores import METRICS, Answered, Scoring

CASES = {
    "exact": [("4  2", "4 2", 1), ("4 2 ", "42", 0), ("Paris", "paris", 0)],
    "per_word": [("4 2 7", "4 3", 1 / 3), ("", "4", 0), ("4", "4", 1)],
    "contains": [("It is  PARIS.", "paris", 1), ("Par is", "paris", 0), ("", "a", 0)],
    "anls": [
        ("Paris", "paris", 1),
        ("parks", "paris", 4 / 5),
        ("pa", "paris", 0),  # 3 of 5 letters are missing
        ("par", "paris!", 1 / 2),  # just at the threshold
        ("kitten", "sitting", 4 / 7),
        ("", "paris", 0),
    ],
    "relaxed_number": [
        ("104.9", "100", 1),
        ("95", "100", 1),
        ("105.1", "100", 0),
        ("-100", "100", 0),
        ("0.01", "0", 0),
        ("0", "0.0", 1),
        ("5%", "0.0501", 1),
        ("Yes", "yes", 1),
        ("1e999", "100", 0),
        ("about 100", "100", 0),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_metrics_give_the_points_of_their_sources(name: str) -> None:
    for answer, expected, score in CASES[name]:
        points, most = METRICS[name](answer, expected)
        assert points / most == pytest.approx(score), (answer, expected)


def test_a_recipe_may_name_every_metric() -> None:
    assert set(get_args(Metric)) == METRICS.keys() == CASES.keys()


def test_texts_beside_samples_with_items_are_counted_but_not_scored() -> None:
    scoring = Scoring(["exact", "per_word"])
    shown: list = [[[0]], [[0]], []]
    for pictures, answer in zip(shown, ["1 2", "1 2 3", "4"], strict=True):
        scoring.add(Answered(pictures, "?", answer, "1 2"))
    score = scoring.result({"broken": 2})
    # Words of all samples together, not a mean over samples.
    assert str(score) == "exact_match=0.500 per_word=0.800"
    assert (score.scored, score.left_out) == (
        2,
        {"text alone, where others have items": 1, "broken": 2},
    )
