from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import mix64, permutation

SMALL, LARGE = st.integers(1, 70), st.integers(2**16 + 1, 2**16 + 5000)


@settings(max_examples=40)
@given(size=SMALL | LARGE, salts=st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_every_number_is_in_one_slot_and_is_found_there(size: int, salts: list[int]) -> None:
    own = permutation(size, *salts)
    numbers = own.at(np.arange(size))
    assert (np.sort(numbers) == np.arange(size)).all()
    for number in {0, size // 2, size - 1}:
        assert numbers[own.slot_of(number)] == number


def test_up_to_65536_numbers_are_sorted_by_their_hashes_as_they_always_were() -> None:
    for size in (5, 2**16):
        expected = np.argsort(mix64(np.arange(size), 1, 2), kind="stable")
        np.testing.assert_array_equal(permutation(size, 1, 2).at(np.arange(size)), expected)
    assert permutation(5, 1).at(np.arange(5)).tolist() == [2, 4, 0, 3, 1]


def test_the_order_of_many_never_changes_between_versions() -> None:
    # A resumed run needs the order it began with.
    own = permutation(10**12, 7, 1)
    assert own.at(np.array([0, 1, 2, 10**12 - 1])).tolist() == OF_MANY


@pytest.mark.parametrize("size", [2**16 + 1, 250_000])
def test_many_numbers_lie_as_at_random(size: int) -> None:
    numbers = permutation(size, 3).at(np.arange(size))
    # Chi-squared of the tenths that slots and their numbers are in, with 81 degrees of freedom.
    table = np.histogram2d(np.arange(size), numbers, bins=10)[0]
    expected = size / 100
    assert ((table - expected) ** 2 / expected).sum() < 140
    # Neighbours, and those that are a row of the grid apart, are no nearer than by chance.
    for apart in (1, 2, int(size**0.5), int(size**0.5) + 1):
        distance = np.abs(numbers[apart:] - numbers[:-apart])
        assert distance.mean() == pytest.approx(size / 3, rel=0.02)
        assert (distance < size / 100).mean() == pytest.approx(0.0199, rel=0.15)
    # Another salt is another permutation.
    assert (permutation(size, 4).at(np.arange(size)) == numbers).mean() < 0.001


def test_an_entry_of_a_huge_permutation_takes_no_memory_for_the_others() -> None:
    tracemalloc.start()
    own = permutation(10**15, 1)
    own.at(np.arange(10**14, 10**14 + 1000))
    own.slot_of(10**15 - 1)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**18


OF_MANY = [118946132255, 522976856091, 507637573273, 168469725596]
