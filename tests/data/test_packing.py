"""Packs of samples: nothing is lost, limits hold, sequences are full, lanes have equal loads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.packing import (
    Mixing,
    Sizes,
    TokenBudget,
    Used,
    deal,
    mix64,
    packs_of_samples,
    packs_of_tokens,
    permutation,
    sort_by_length,
)

LONGEST, MOST_ROWS = 12, 9  # of a sample

Samples = list[tuple[int, int]]
SAMPLES = st.lists(
    st.tuples(st.integers(1, LONGEST), st.integers(0, MOST_ROWS)), min_size=1, max_size=40
)
BUDGETS = st.builds(
    TokenBudget,
    st.integers(LONGEST, 40),
    st.none() | st.integers(MOST_ROWS, 20),
    st.integers(1, 30),
)


def sizes_of(samples: Samples) -> Sizes:
    """An endless order that repeats these samples."""
    table = np.array(samples, np.int64)

    def sizes(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = table[positions % len(table)]
        return rows[:, 0], rows[:, 1]

    return sizes


# ------------------------------------------------------------------ what is used, and what is left


@given(
    samples=SAMPLES,
    steps=st.lists(st.tuples(st.integers(1, 5), BUDGETS | st.integers(1, 6)), max_size=12),
)
@settings(deadline=None)
def test_every_sample_is_used_once_whatever_batch_sizes_and_budgets_follow_each_other(
    samples: Samples, steps: list[tuple[int, TokenBudget | int]]
) -> None:
    sizes, used, seen = sizes_of(samples), Used(), []
    for num_packs, budget in steps:
        if isinstance(budget, int):
            packs = packs_of_samples(used, num_packs, budget)
            assert np.concatenate(packs).tolist() == used.unused(num_packs * budget).tolist()
        else:
            packs = packs_of_tokens(used, num_packs, budget, sizes)
            for pack in packs:
                tokens, rows = sizes(pack)
                assert tokens.sum() <= budget.tokens
                assert budget.rows is None or rows.sum() <= budget.rows
        assert len(packs) == num_packs
        assert all((np.diff(pack) > 0).all() for pack in packs)
        seen += np.concatenate(packs).tolist()
        used = used.with_packs(packs)
        assert used.samples == len(seen) == len(set(seen))
        assert sorted([*seen, *used.passed_over]) == list(range(used.end))
        assert max(seen) == used.end - 1


@given(samples=SAMPLES, budget=BUDGETS, counts=st.lists(st.integers(1, 4), max_size=6))
@settings(deadline=None)
def test_packs_are_the_same_in_steps_of_any_size(
    samples: Samples, budget: TokenBudget, counts: list[int]
) -> None:
    sizes, used, taken = sizes_of(samples), Used(), []
    for count in counts:
        packs = packs_of_tokens(used, count, budget, sizes)
        used, taken = used.with_packs(packs), [*taken, *packs]
    at_once = packs_of_tokens(Used(), sum(counts), budget, sizes)
    assert [pack.tolist() for pack in taken] == [pack.tolist() for pack in at_once]


@given(samples=SAMPLES, budget=BUDGETS)
@settings(deadline=None)
def test_packs_are_those_of_a_search_through_all_of_the_window(
    samples: Samples, budget: TokenBudget
) -> None:
    sizes, used = sizes_of(samples), Used()
    for pack in packs_of_tokens(used, 6, budget, sizes):
        assert pack.tolist() == searched(used.unused(budget.window), budget, sizes)
        used = used.with_packs([pack])


@given(samples=SAMPLES, budget=BUDGETS)
@settings(deadline=None)
def test_padded_packs_are_the_oldest_sample_and_the_next_shorter_ones(
    samples: Samples, budget: TokenBudget
) -> None:
    sizes, used = sizes_of(samples), Used()
    for pack in packs_of_tokens(used, 6, budget, sizes, padded=True):
        window = used.unused(budget.window)
        tokens, rows = (dict(zip(window.tolist(), x.tolist(), strict=True)) for x in sizes(window))
        oldest = int(window[0])
        expected, left = list[int](), budget.rows
        for sample in sorted(tokens, key=lambda n: (-tokens[n], n)):
            fits = left is None or rows[sample] <= left
            is_after = (-tokens[sample], sample) >= (-tokens[oldest], oldest)
            if is_after and fits and (len(expected) + 1) * tokens[oldest] <= budget.tokens:
                expected.append(sample)
                left = None if left is None else left - rows[sample]
        assert pack.tolist() == sorted(expected)
        used = used.with_packs([pack])


def searched(window: np.ndarray, budget: TokenBudget, sizes: Sizes) -> list[int]:
    """The pack as the page's first lines tell it, looking at everything again each time."""
    tokens, rows = (
        dict(zip(window.tolist(), found.tolist(), strict=True)) for found in sizes(window)
    )
    pack: list[int] = []

    def fitting() -> list[int]:
        left = budget.tokens - sum(tokens[one] for one in pack)
        rows_left = np.inf if budget.rows is None else budget.rows - sum(rows[one] for one in pack)
        return [
            one
            for one in window.tolist()
            if one not in pack and tokens[one] <= left and rows[one] <= rows_left
        ]

    while (own := fitting()) and 2 * sum(tokens[one] for one in pack) < budget.tokens:
        pack.append(own[0])
    while own := fitting():
        pack.append(max(own, key=lambda one: (tokens[one], -one)))
    return sorted(pack)


def test_a_sample_that_was_used_before_is_not_used_again() -> None:
    used = Used(3, (1,))
    assert used.with_packs([np.array([1, 5])]) == Used(5, (4,))
    for twice in ([2, 5], [1, 5, 5], [1, 2]):
        with pytest.raises(AssertionError, match="used twice"):
            used.with_packs([np.array(twice)])


# ------------------------------------------------------------------------------- full sequences


def log_normal(rng: np.random.Generator, median: float, sigma: float, most: int) -> np.ndarray:
    lengths = np.exp(rng.normal(np.log(median), sigma, 20_000)).astype(np.int64) + 8
    return lengths[lengths <= most]


def chats(rng: np.random.Generator) -> np.ndarray:
    """Text, chats about an image or several, and videos, as long as they are in practice."""
    one_image = 280 + log_normal(rng, 80, 1.0, 2000)[:8000]
    several = rng.integers(2, 9, 3000) * 270 + log_normal(rng, 200, 1.0, 2000)[:3000]
    videos = rng.integers(4, 32, 2000) * 256 + 60
    return rng.permutation(
        np.concatenate([one_image, several, videos, log_normal(rng, 700, 1.3, 8192)[:6000]])
    )


LONG_TAILS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "log-normal of median 400": lambda rng: log_normal(rng, 400, 1.0, 8192),
    "log-normal of median 800": lambda rng: log_normal(rng, 800, 1.2, 8192),
    "log-normal of median 1500": lambda rng: log_normal(rng, 1500, 1.2, 8192),
    "chats": chats,
}


@pytest.mark.parametrize("kind", LONG_TAILS)
def test_real_tokens_fill_98_percent_of_the_budget_on_long_tailed_lengths(kind: str) -> None:
    lengths = LONG_TAILS[kind](np.random.default_rng(3))
    assert lengths.max() > 5 * np.median(lengths)
    sizes = sizes_of([(int(length), 0) for length in lengths])
    packs = packs_of_tokens(Used(), 300, TokenBudget(8192), sizes)
    filled = np.array([sizes(pack)[0].sum() for pack in packs]) / 8192
    assert filled.mean() >= 0.98
    assert filled.min() >= 0.9


# ---------------------------------------------------------------------------------- equal loads


def test_packs_sorted_by_length_keep_their_number_of_samples() -> None:
    packs = [np.array([4, 5]), np.array([6, 7]), np.array([8, 9])]
    assert [pack.tolist() for pack in sort_by_length(packs, np.array([9, 1, 5, 9, 1, 5]))] == [
        [4, 7],
        [6, 9],
        [5, 8],
    ]


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=8), lanes=st.integers(1, 4))
def test_every_pack_is_dealt_once_and_neighbours_in_cost_run_together(
    costs: list[int], lanes: int
) -> None:
    own = np.repeat(costs, lanes)[::-1].copy()
    dealt = deal(own, lanes)
    assert dealt.shape == (len(costs), lanes)
    assert sorted(dealt.flat) == list(range(len(own)))
    together = own[dealt]
    assert (together.min(axis=1)[:-1] >= together.max(axis=1)[1:]).all()


@pytest.mark.parametrize("lanes", [2, 8])
def test_lanes_have_more_equal_loads_than_packs_dealt_in_order(lanes: int) -> None:
    lengths = log_normal(np.random.default_rng(5), 800, 1.2, 8192)
    sizes = sizes_of([(int(length), 0) for length in lengths])
    packs = packs_of_tokens(Used(), 16 * lanes, TokenBudget(8192), sizes)
    loads = np.array([(own * (4096 + own)).sum() for own in (sizes(pack)[0] for pack in packs)])

    def slowest(loads: np.ndarray) -> float:
        """How much longer microbatches take than if their lanes had equal loads."""
        return loads.max(axis=1).sum() / loads.mean(axis=1).sum() - 1

    balanced, in_order = loads[deal(loads, lanes)], loads.reshape(-1, lanes)
    assert slowest(balanced) < 0.2 * slowest(in_order)
    # What a lane has to do in the whole step.
    assert np.ptp(balanced.sum(axis=0)) < 0.3 * np.ptp(in_order.sum(axis=0))


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
        turns = earlier[source == number]
        assert turns.tolist() == list(range(before[number], after[number]))


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_lanes_that_take_turns_do_not_always_get_the_same_source(lanes: int) -> None:
    source, _ = Mixing([1.0] * lanes, 5).at(np.arange(256 * lanes))
    for lane in range(lanes):
        shares = np.bincount(source[lane::lanes], minlength=lanes) / 256
        assert (abs(shares * lanes - 1) < 0.7).all()


SMALL, LARGE = st.integers(1, 70), st.integers(2**16 + 1, 2**16 + 5000)


@settings(max_examples=40)
@given(size=SMALL | LARGE, salts=st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_every_number_is_in_one_slot_and_is_found_there(size: int, salts: list[int]) -> None:
    order = permutation(size, *salts)
    numbers = order.at(np.arange(size))
    assert (np.sort(numbers) == np.arange(size)).all()
    for number in {0, size // 2, size - 1}:
        assert numbers[order.slot_of(number)] == number


def test_up_to_65536_numbers_are_sorted_by_their_hashes_as_they_always_were() -> None:
    for size in (5, 2**16):
        expected = np.argsort(mix64(np.arange(size), 1, 2), kind="stable")
        np.testing.assert_array_equal(permutation(size, 1, 2).at(np.arange(size)), expected)
    assert permutation(5, 1).at(np.arange(5)).tolist() == [2, 4, 0, 3, 1]


def test_the_order_of_many_never_changes_between_versions() -> None:
    # A resumed run needs the order it began with.
    order = permutation(10**12, 7, 1)
    assert order.at(np.array([0, 1, 2, 10**12 - 1])).tolist() == OF_MANY


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


OF_MANY = [118946132255, 522976856091, 507637573273, 168469725596]
