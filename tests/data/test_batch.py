"""Samples of a microbatch as packed sequences or as batches, padded as a layout asks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import GlobalMicrobatch, Padding, pack_lane, plan_microbatch
from data.index.samples import Index, Processors
from data.index.store import load_or_build_index
from data.order import SampleOrder
from data.packing import Used, packs_of_samples
from data.text.chat import ChatTokenizer, EncodedSample

MULTIPLES = st.sampled_from([1, 2, 4, 6])


@pytest.fixture(scope="module")
def index(digits: Path, chat: ChatTokenizer, processors: Processors) -> Index:
    return load_or_build_index(str(digits / "train-*.tar"), chat, processors)


def plan(index: Index, lanes: int, per_lane: int, padding: Padding) -> GlobalMicrobatch:
    order = SampleOrder([len(index)], [1.0], 0, 1)
    packs = packs_of_samples(Used(), lanes, per_lane)
    return plan_microbatch([index], order, packs, padding)


@given(
    lanes=st.integers(1, 3),
    per_lane=st.integers(1, 5),
    packed=st.booleans(),
    segment=MULTIPLES,
    parts=st.integers(1, 4),
    longer=st.integers(0, 3),
)
@settings(deadline=None)
def test_segments_follow_each_other_and_are_padded_to_their_multiples(
    index: Index, lanes: int, per_lane: int, packed: bool, segment: int, parts: int, longer: int
) -> None:
    padding = Padding(packed, segment, segment * parts)
    plain = plan(index, lanes, per_lane, Padding())
    batch = plan(index, lanes, per_lane, padding)
    tokens = batch.longest_sequence + longer * padding.sequence
    for padded in (batch, batch.padded_to(tokens)):
        for lane in range(lanes):
            mine = padded.samples_of_lane(lane)
            ends = padded.start[mine] + padded.segment_length[mine]
            assert padded.start[mine].tolist() == [0, *ends[:-1]]
            assert (padded.length[mine] <= padded.segment_length[mine]).all()
            assert (padded.segment_length[mine] % segment == 0).all()
            assert ends[-1] <= padded.lane_tokens[lane]
            assert padded.lane_tokens[lane] % padding.sequence == 0
            if not packed:
                assert len(set(padded.segment_length[mine].tolist())) == 1
                assert ends[-1] == padded.lane_tokens[lane]
                assert (padded.segment_length[mine] % padding.sequence == 0).all()
        # An item keeps its place in its sample.
        np.testing.assert_array_equal(
            padded.item_position - padded.start[padded.item_sample],
            plain.item_position - plain.start[plain.item_sample],
        )
    assert batch.padded_to(tokens).longest_sequence == tokens


def sample(length: int, first: int) -> EncodedSample:
    ids = np.arange(first, first + length)
    return EncodedSample(
        input_ids=ids,
        labels=np.append(ids[1:], 0),
        loss_mask=np.ones(length, np.float32),
        item_offsets=np.zeros(0, np.int64),
        item_rows=np.zeros(0, np.int64),
    )


def test_padding_stands_behind_its_own_sample_and_never_counts() -> None:
    lane = pack_lane([sample(3, 10), sample(5, 20)], [[], []], [3, 5], 16, 0, [4, 8])
    assert lane.input_ids.tolist() == [10, 11, 12, 0, 20, 21, 22, 23, 24, 0, 0, 0, 0, 0, 0, 0]
    assert lane.labels.tolist() == [11, 12, 0, 0, 21, 22, 23, 24, 0, 0, 0, 0, 0, 0, 0, 0]
    assert lane.loss_mask.tolist() == [1] * 3 + [0] + [1] * 5 + [0] * 7
    assert (lane.lengths, lane.real_lengths, lane.num_sequences) == ((4, 8, 4), (3, 5, 4), 1)
    assert lane.position_ids[:, 4:9].tolist() == [[0, 1, 2, 3, 4]] * 3  # starts again


def test_without_packing_every_sample_is_a_sequence() -> None:
    lane = pack_lane([sample(3, 10), sample(5, 20)], [[], []], [3, 0], 12, 0, [6, 6], packed=False)
    assert lane.num_sequences == 2
    assert lane.input_ids.reshape(2, 6).tolist() == [[10, 11, 12, 0, 0, 0], [20, 21, 22, 23, 24, 0]]
    assert lane.loss_mask.reshape(2, 6).tolist() == [[1, 1, 1, 0, 0, 0], [0] * 6]
