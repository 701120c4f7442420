"""Curves as pictures, and what the page's script is told of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mimo.report.page import lines
from mimo.report.runs import Curve


def curve(*values: float) -> Curve:
    return Curve(np.arange(1, len(values) + 1), np.array(values))


def test_the_script_gets_the_places_of_the_axes_and_all_values() -> None:
    script = json.loads(lines("Loss", "", {"a": curve(3.0, math.nan, 1.5), "b": curve(2.0)}).curves)
    first, second = script["curves"]
    assert (first["name"], first["steps"], first["values"]) == ("a", [1, 2, 3], [3.0, None, 1.5])
    assert (second["steps"], second["values"]) == ([1], [2.0])
    assert first["color"] != second["color"]
    assert first["color"].startswith("#")
    for plot in script["plots"]:
        assert 0 < plot["left"] < plot["right"] < 1
        assert 0 <= plot["top"] < plot["bottom"] < 1
        assert plot["first"] < 1 < 3 < plot["last"]


def test_a_long_curve_is_thinned_and_keeps_its_spikes_its_gaps_and_its_end() -> None:
    values = np.ones(20_000)
    values[[777, 12_345]], values[15_000] = 50.0, np.nan
    (drawn,) = json.loads(lines("Loss", "", {"a": curve(*values)}).curves)["curves"]
    assert len(drawn["steps"]) < 2000
    assert np.diff(drawn["steps"]).max() <= 40
    shown = dict(zip(drawn["steps"], drawn["values"], strict=True))
    assert [shown[step] for step in (1, 778, 12_346, 15_001, 20_000)] == [1, 50, 50, None, 1]


@pytest.mark.parametrize(
    ("values", "unit", "has_both", "is_log"),
    [
        ((1.0, 2.0), "", True, False),
        ((1.0, 100.0), "", True, True),
        ((1.0, 100.0), "seconds", True, False),
        ((0.0, 100.0, 1.0), "", True, False),
        ((-1.0, -2.0), "", False, False),
        ((5.0, 5.0), "", False, False),
        ((), "", False, False),
    ],
)
def test_values_above_zero_have_a_linear_and_a_logarithmic_axis(
    values: tuple[float, ...], unit: str, has_both: bool, is_log: bool
) -> None:
    picture = lines("some", unit, {"a": curve(*values)})
    assert (bool(picture.other_address), picture.is_log) == (has_both, is_log)
    assert picture.address != picture.other_address
    assert picture.figure is not None
    assert (picture.figure.axes[0].get_yscale() == "log") == is_log, "a file has what is shown"
