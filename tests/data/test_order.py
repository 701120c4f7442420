from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import Mixture, SampleOrder

counts = st.lists(st.integers(1, 60), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(num_samples=counts, seed=st.integers(-5, 2**70), block=st.integers(1, 20))
def test_every_sample_comes_exactly_once_per_epoch(num_samples: list[int], seed: int, block: int):
    order = SampleOrder(num_samples, [1.0] * len(num_samples), seed, block)
    source, sample = order.at(np.arange(2000))
    for number, count in enumerate(num_samples):
        stream = sample[source == number]
        epochs = stream[: len(stream) // count * count].reshape(-1, count)
        assert (np.sort(epochs, axis=1) == np.arange(count)).all()


def test_samples_of_a_block_stay_together_and_in_order():
    _, sample = SampleOrder([64], [1.0], 1, 16).at(np.arange(64))
    blocks = sample.reshape(4, 16)
    np.testing.assert_array_equal(blocks - blocks[:, :1], np.tile(np.arange(16), (4, 1)))
    assert (blocks[:, 0] % 16 == 0).all()


def test_epochs_and_seeds_differ():
    order = SampleOrder([640], [1.0], 1, 4)
    first, second = order.at(np.arange(1280))[1].reshape(2, 640)
    other_seed = SampleOrder([640], [1.0], 2, 4).at(np.arange(640))[1]
    assert (first != second).any()
    assert (first != other_seed).any()


def test_the_order_never_changes_between_versions():
    # A resumed run needs the order it began with: if this fails, old checkpoints lose their place.
    alone = SampleOrder([9], [0.5], 123, 2).at(np.arange(18))[1]
    assert alone.tolist() == OF_ONE_SOURCE
    source, sample = SampleOrder([10, 6], [2, 1], 123, 3).at(np.arange(24))
    assert source.tolist() == SOURCE
    assert sample.tolist() == SAMPLE


# ---------------------------------------------------------------------------- large sources


def test_position_100_million_of_100_million_samples_takes_little_memory_from_a_cold_start() -> (
    None
):
    positions = np.arange(100_000_000, 100_002_048)
    for counts, block in (([100_000_000], 1), ([100_000_000, 70_000, 3], None)):
        tracemalloc.start()
        order = SampleOrder(counts, [1.0] * len(counts), 1, block)
        source, sample = order.at(positions)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 2**21
        assert (sample < np.array(counts)[source]).all()
        # In a source of three, a window has many epochs.
        large = sample[source == 0]
        assert len(np.unique(large)) == len(large)


def test_the_blocks_of_a_large_source_are_gone_through_once_an_epoch() -> None:
    size, block = 200_003, 3  # more blocks than are sorted; the last one is short
    sample = SampleOrder([size], [1.0], 5, block).at(np.arange(2 * size))[1].reshape(2, size)
    for epoch in sample:
        assert (np.sort(epoch) == np.arange(size)).all()
        jumps = np.flatnonzero(np.diff(epoch) != 1)
        assert len(jumps) > size / block - 30  # next to no blocks are neighbours
    assert (sample[0] == sample[1]).mean() < 0.001


def test_without_a_block_large_sources_are_read_in_runs_and_small_ones_sample_by_sample() -> None:
    order = SampleOrder([2**16, 2**16 - 1], [1.0, 1.0], 1, None)
    source, sample = order.at(np.arange(4096))
    large, small = (sample[source == number] for number in (0, 1))
    runs = large[: len(large) // 32 * 32].reshape(-1, 32)
    np.testing.assert_array_equal(runs - runs[:, :1], np.tile(np.arange(32), (len(runs), 1)))
    assert len(set((runs[:, 0] // 32).tolist())) == len(runs)
    assert (np.diff(small) == 1).mean() < 0.01
    # Turns are of one sample: any 64 in a row have both sources.
    assert abs(np.bincount(source[100:164])[0] - 32) < 8
    explicit = SampleOrder([2**16, 2**16 - 1], [1.0, 1.0], 1, 1)
    np.testing.assert_array_equal(source, explicit.at(np.arange(4096))[0])


SOURCE = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
SAMPLE = [6, 7, 8, 0, 1, 2, 9, 3, 4, 0, 1, 2, 3, 4, 5, 5, 3, 4, 5, 6, 7, 8, 0, 1]
OF_ONE_SOURCE = [4, 5, 8, 0, 1, 6, 7, 2, 3, 8, 2, 3, 4, 5, 0, 1, 6, 7]


@dataclass(frozen=True)
class Stage:
    """Sources by name, with size and weight; block; seed; positions until the next stage."""

    sources: dict[str, tuple[int, float]]
    block: int | None
    length: int
    seed: int = 1

    def order(self) -> SampleOrder:
        sizes, weights = zip(*self.sources.values(), strict=True)
        return SampleOrder(sizes, weights, self.seed, self.block, [*self.sources])


# No size is another source's, as that would be one that was moved.
SIZES = {"a": (5, 6), "b": (12, 13), "c": (31, 30), "d": (1, 2)}
WEIGHT = st.sampled_from([0.1, 1.0, 3.0])
SOURCES = {name: st.tuples(st.sampled_from(sizes), WEIGHT) for name, sizes in SIZES.items()}
STAGES = st.lists(
    st.builds(
        Stage,
        st.lists(st.sampled_from("abcd"), min_size=1, unique=True).flatmap(
            lambda names: st.fixed_dictionaries({name: SOURCES[name] for name in names})
        ),
        st.sampled_from([None, None, 1, 3]),
        st.integers(0, 90),
        st.sampled_from([1, 1, 1, 2]),
    ),
    min_size=2,
    max_size=5,
)


def names_at(order: SampleOrder, stage: Stage, positions: np.ndarray) -> list[tuple[str, int]]:
    """What is at positions, by the names that sources have in this stage; "" if gone."""
    names = [*stage.sources, ""]
    source, sample = order.at(positions)
    return [(names[s], n) for s, n in zip(source.tolist(), sample.tolist(), strict=True)]


@settings(max_examples=150)
@given(stages=STAGES)
def test_positions_before_stay_and_every_source_that_stays_goes_on(stages: list[Stage]) -> None:
    order, end = stages[0].order(), stages[0].length
    seen = names_at(order, stages[0], np.arange(end))
    began = dict.fromkeys(stages[0].sources, 0)  # where a source last began an epoch
    for before, stage in itertools.pairwise(stages):
        order = stage.order().after(order.mixtures, end)
        # What is still there is where it was; what is gone is said to be.
        for one, now in zip(seen, names_at(order, stage, np.arange(end)), strict=True):
            assert now == one or now[0] == ""
        for name, (size, _) in stage.sources.items():
            # A few samples of a source of another block or size may still be there.
            same = before.sources.get(name, (0, 0))[0] == size
            blocks = before.block or 1, stage.block or 1
            if not same or blocks[0] != blocks[1] or before.seed != stage.seed:
                began[name] = end
        new = names_at(order, stage, np.arange(end, end + stage.length))
        seen, end = [*seen, *new], end + stage.length
        for name, (size, _) in stage.sources.items():
            samples = [sample for source, sample in seen[began[name] :] if source == name]
            for first in range(0, len(samples), size):
                epoch = samples[first : first + size]
                assert len(set(epoch)) == len(epoch), "a sample is repeated within an epoch"
                if len(epoch) == size:
                    assert set(epoch) == set(range(size))


def test_a_source_appended_changes_no_position_before_and_delays_no_other_source() -> None:
    alone = SampleOrder([1000], [1.0], 1, 4, ["a"])
    both = SampleOrder([1000, 500], [3.0, 1.0], 1, 4, ["a", "b"]).after(alone.mixtures, 402)
    positions = np.arange(402)
    np.testing.assert_array_equal(both.at(positions), alone.at(positions))
    source, sample = both.at(np.arange(402, 1202))
    assert abs((source == 1).sum() - 200) <= 8 * 4
    of_first = sample[source == 0]
    expected = alone.at(np.arange(402, 402 + len(of_first)))[1]
    np.testing.assert_array_equal(of_first, expected)
    assert both.epochs(402) == [0.402, 0.0]


def test_other_weights_change_only_how_often_sources_have_their_turn() -> None:
    before = SampleOrder([50, 50], [1.0, 1.0], 1, 1, ["a", "b"])
    after = SampleOrder([50, 50], [1.0, 4.0], 1, 1, ["a", "b"]).after(before.mixtures, 60)
    for number in (0, 1):
        whole = [order.at(np.arange(400)) for order in (before, after)]
        first, second = ([n for s, n in zip(*drawn, strict=True) if s == number] for drawn in whole)
        common = min(len(first), len(second))
        assert first[:common] == second[:common]
    source, _ = after.at(np.arange(60, 560))
    assert abs((source == 1).sum() - 400) < 8


def test_a_source_of_another_size_begins_an_epoch_in_another_order() -> None:
    before = SampleOrder([40], [1.0], 1, 1, ["a"])
    grown = SampleOrder([41], [1.0], 1, 1, ["a"]).after(before.mixtures, 30)
    assert grown.epochs(30) == [1.0]
    epoch = grown.at(np.arange(30, 71))[1]
    assert sorted(epoch.tolist()) == list(range(41))
    assert epoch.tolist() != SampleOrder([41], [1.0], 1, 1).at(np.arange(41))[1].tolist()
    # Its earlier numbers may mean other samples now.
    assert (grown.at(np.arange(30))[0] == -1).all()


def test_a_source_that_was_moved_goes_on_and_one_that_was_replaced_does_not() -> None:
    before = SampleOrder([40, 60], [1.0, 1.0], 1, 1, ["a", "b"])
    moved = SampleOrder([40, 60], [1.0, 1.0], 1, 1, ["/new/a", "/new/b"])
    order = moved.after(before.mixtures, 30)
    positions = np.arange(200)
    assert all(map(np.array_equal, order.at(positions), before.at(positions)))
    # It is known by its new name afterwards, wherever it then stands.
    further = SampleOrder([5, 40, 60], [1.0] * 3, 1, 1, ["c", "/new/a", "/new/b"])
    assert further.after(order.mixtures, 30).epochs(30)[1:] == before.epochs(30)
    replaced = SampleOrder([40, 61], [1.0, 1.0], 1, 1, ["a", "c"]).after(before.mixtures, 30)
    assert replaced.epochs(30) == [before.epochs(30)[0], 0.0]
    # It does not inherit the order of the source that is gone either.
    gone, new = before.mixtures[0].streams[1], replaced.mixtures[1].streams[1]
    assert new.salt not in (gone.salt, before.mixtures[0].streams[0].salt)


def test_nothing_changes_without_a_change_and_changes_at_one_position_leave_one_mixture() -> None:
    first = SampleOrder([9, 4], [1.0, 2.0], 1, 2, ["a", "b"])
    again = SampleOrder([9, 4], [1.0, 2.0], 1, 2, ["a", "b"]).after(first.mixtures, 7)
    assert again.mixtures == first.mixtures
    second = SampleOrder([9], [1.0], 1, 2, ["a"]).after(first.mixtures, 7)
    third = SampleOrder([9, 4], [1.0, 1.0], 1, 2, ["a", "c"]).after(second.mixtures, 7)
    assert [mixture.first for mixture in third.mixtures] == [0, 7]
    assert all(isinstance(mixture, Mixture) for mixture in third.mixtures)
