from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import SampleOrder

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


@settings(max_examples=40, deadline=None)
@given(
    num_samples=counts,
    block=st.integers(1, 20),
    positions=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=30),
)
def test_the_answer_does_not_depend_on_what_was_asked_before(
    num_samples: list[int], block: int, positions: list[int]
):
    def fresh() -> SampleOrder:
        return SampleOrder(num_samples, np.arange(1, len(num_samples) + 1).tolist(), 7, block)

    together = np.stack(fresh().at(np.array(positions)))
    used = fresh()
    for column in reversed(range(len(positions))):
        alone = np.stack(used.at(np.array([positions[column]])))
        np.testing.assert_array_equal(alone[:, 0], together[:, column])


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


@pytest.mark.parametrize(
    ("num_samples", "weights", "block", "message"),
    [
        ([3], [1, 2], 1, "1 sources but 2 weights"),
        ([], [], 1, "0 sources"),
        ([3, 3], [0, 0], 1, "at least one above 0"),
        ([3, 3], [-1, 2], 1, "none below"),
        ([3, 0], [1, 2], 0, "source 1 has 0 samples.*block is 0"),
    ],
)
def test_impossible_settings_are_refused(
    num_samples: list[int], weights: list[float], block: int, message: str
):
    with pytest.raises(ValueError, match=message):
        SampleOrder(num_samples, weights, 0, block)


def test_a_negative_position_is_refused():
    with pytest.raises(ValueError, match="position -1 is negative"):
        SampleOrder([3], [1], 0, 1).at(np.array([4, -1]))


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
