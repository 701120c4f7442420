"""Turns are dealt by weight: in any window, in any order of asking, to any number of sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.packing import Mixing

WEIGHTS = st.lists(
    st.floats(-6, 0).map(lambda power: 10**power) | st.sampled_from([1.0, 0.5, 1e-6]),
    min_size=1,
    max_size=50,
)
STARTS = st.integers(0, 20) | st.integers(0, 2**48)
FIBONACCI = [1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0]  # of the deepest Huffman tree


@settings(max_examples=150)
@given(weights=WEIGHTS, seed=st.integers(-5, 2**70), start=STARTS)
@example(weights=FIBONACCI, seed=1, start=0)
@example(weights=[1.0] + [1e-6] * 49, seed=1, start=0)
@example(weights=[1.0] + [0.005] * 49, seed=1, start=0)  # not in an order without Huffman
@example(weights=[0.5, 0.5], seed=3, start=0)
def test_in_any_window_every_source_has_its_share_of_turns_give_or_take_8(
    weights: list[float], seed: int, start: int
) -> None:
    length = 3000
    source, _ = Mixing(weights, seed).at(np.arange(start, start + length))
    shares = np.array(weights) / np.sum(weights)
    for number, share in enumerate(shares):
        turns = np.cumsum(np.concatenate(([0], source == number)))
        excess = turns - share * np.arange(length + 1)
        # The window from a to b has excess[b] - excess[a] turns too many: the worst of all windows.
        assert excess.max() - excess.min() < 16 * share * (1 - share) + 3.4 <= 8


@settings(max_examples=60)
@given(weights=WEIGHTS, seed=st.integers(0, 99), start=STARTS, length=st.integers(0, 500))
def test_a_source_has_its_turns_one_after_another_wherever_one_begins_to_ask(
    weights: list[float], seed: int, start: int, length: int
) -> None:
    mixing = Mixing(weights, seed)
    source, earlier = mixing.at(np.arange(start, start + length))
    before, after = mixing.counts(start), mixing.counts(start + length)
    assert before.sum() == start
    for number in range(len(weights)):
        own = earlier[source == number]
        assert own.tolist() == list(range(before[number], after[number]))


def test_a_source_of_weight_zero_has_no_turn() -> None:
    mixing = Mixing([1.0, 0.0, 3.0], 0)
    assert set(mixing.at(np.arange(5000))[0].tolist()) == {0, 2}
    assert mixing.counts(4000).tolist() == pytest.approx([1000, 0, 3000], abs=8)


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_lanes_that_take_turns_do_not_always_get_the_same_source(lanes: int) -> None:
    source, _ = Mixing([1.0] * lanes, 5).at(np.arange(256 * lanes))
    for lane in range(lanes):
        shares = np.bincount(source[lane::lanes], minlength=lanes) / 256
        assert (abs(shares * lanes - 1) < 0.7).all()
