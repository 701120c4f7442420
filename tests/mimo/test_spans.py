"""Spans: time belongs to the innermost, inside of steps alone; on a device it comes a step late."""

from __future__ import annotations

import itertools

import pytest
import torch

from mimo import spans
from mimo.spans import RANK, Spans


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one second whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(spans, "record_time", lambda: float(next(ticks)))


def step(measured: Spans, inside: int = 1, measures: bool = True) -> None:
    with measured.step():
        with measured.span("language", "backward"):
            for number in range(inside):
                with (
                    measured.span("language", "forward", number=number),
                    measured.wait("bridge_wait", "vision_forward", number),
                ):
                    pass
        measured.end_period(measures)


@pytest.mark.usefixtures("clock")
def test_time_belongs_to_the_innermost_span_and_a_wait_to_the_module_around_it() -> None:
    measured = Spans()
    with measured.span("language", "forward"):  # a validation: no step
        pass
    step(measured, inside=2)
    assert measured.take() == {
        (RANK, "other", ""): 2.0,
        ("language", "backward", ""): 3.0,
        ("language", "forward", ""): 4.0,
        ("language", "bridge_wait", "vision_forward"): 2.0,
    }
    assert measured.take() == {}
    assert measured.open == []


@pytest.mark.usefixtures("clock")
def test_figures_are_means_of_the_periods_since_they_were_last_taken() -> None:
    measured = Spans()
    step(measured, inside=1)
    step(measured, inside=3)
    assert measured.take()["language", "bridge_wait", "vision_forward"] == 2.0


@pytest.mark.usefixtures("clock")
def test_on_a_device_only_wanted_periods_are_measured_and_known_when_it_has_passed_them() -> None:
    measured = Spans()
    measured.forget(on_device=True)
    seconds = []
    for wanted in (True, False, False, True):
        step(measured, measures=wanted)
        seconds.append(measured.take().get(("language", "forward", "")))
    assert seconds == [None, None, 2.0, None]


def test_an_error_leaves_no_span_open() -> None:
    measured = Spans()
    with pytest.raises(KeyError), measured.step(), measured.span("vision", "encode"):
        raise KeyError
    assert measured.open == []


def test_spans_are_ranges_of_a_trace_while_one_is_made() -> None:
    measured = Spans()
    with torch.profiler.profile(acc_events=True) as profile:
        with measured.span("vision", "encode"):
            pass
        measured.named = True
        with measured.span("vision", "encode", number=3):
            pass
    names = {event.key for event in profile.key_averages()}
    assert "vision encode 3" in names
    assert "vision encode" not in names
