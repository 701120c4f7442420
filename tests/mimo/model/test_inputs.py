"""Inputs of a rank: only its part is staged, and rows of encoders are placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batch import PackedLane
from data.modalities.processor import WireForm
from mimo.device import Staging
from mimo.families.contracts import ItemRules
from mimo.model.decoding import EncoderItems
from mimo.model.inputs import ReceivedRows, join_levels, place_embeddings, stage_items, stage_lane
from mimo.parallel.partition import PartitionAdapter

TOKENS = 24
LANE = PackedLane(
    input_ids=np.arange(TOKENS),
    labels=np.arange(TOKENS) + 100,
    loss_mask=np.ones(TOKENS, np.float32),
    position_ids=np.tile(np.arange(TOKENS), (3, 1)),
    lengths=(8, 16),
    real_lengths=(8, 15),
)


class Copies(Staging):
    """Copies as to a device, and keeps what it has copied."""

    def __init__(self) -> None:
        super().__init__(None)
        self.copied: list[Tensor] = []

    def copy(self, tensor: Tensor) -> Tensor:
        self.copied.append(tensor)
        return tensor.clone()


class Group:
    """As much of a process group as cutting needs."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def staged(cp: int, whole_rows: bool = False, real: tuple[int, ...] = LANE.real_lengths) -> Any:
    group: Any = Group(cp, cp - 1)
    one: Any = Group(1, 0)
    lane = PackedLane(**{**vars(LANE), "real_lengths": real})
    copies = Copies()
    rules = ItemRules(positions="mrope", bidirectional=False)
    partition = PartitionAdapter(group, one, sequence_parallel=False)
    return stage_lane(lane, rules, partition, whole_rows, (), copies, {}), copies.copied


@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_context_parallel_rank_copies_its_own_tokens_and_positions(whole_rows: bool) -> None:
    batch, copied = staged(2, whole_rows)
    own = [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]  # chunks 1 and 2 of each segment's four
    assert batch.labels.tolist() == [100 + token for token in own]
    assert batch.loss_at.tolist() == list(range(len(own)))
    assert batch.input_ids.tolist() == [list(range(TOKENS)) if whole_rows else own]
    assert batch.position_ids.tolist() == [[own]] * 3
    ids = TOKENS if whole_rows else TOKENS // 2
    sizes = [tensor.numel() for tensor in copied if tensor.dtype == torch.int64]
    assert sorted(sizes) == sorted([TOKENS // 2, TOKENS // 2, ids, 3 * TOKENS // 2])
    assert len(copied) == len(sizes) + 1, "one copy for all bounds of segments"


def test_bounds_of_segments_that_are_one_tensor_stay_one_tensor() -> None:
    """Some kernels are chosen by it."""
    padded, _ = staged(1)
    segments = padded.segments
    assert segments.cu_seqlens_q is segments.cu_seqlens_kv
    assert segments.cu_seqlens_q_padded is segments.cu_seqlens_kv_padded
    assert segments.cu_seqlens_q.tolist() == [0, 8, 23]
    assert segments.cu_seqlens_q_padded.tolist() == [0, 8, 24]
    assert (segments.lengths, segments.max_seqlen_q, segments.pad_between_seqs) == ((8, 16), 16, 1)
    batch, copied = staged(1, real=LANE.lengths)
    assert batch.segments.cu_seqlens_q is batch.segments.cu_seqlens_kv_padded
    assert copied[-1].numel() == 16, "its bytes, filled up to what kernels read at once"


class GridsOnly:
    """A tower that needs nothing but grids."""

    def prepare(self, grids: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        return copy(grids)


def test_items_of_several_microbatches_become_one_batch_in_order() -> None:
    form = WireForm(2)
    parts = [(form, torch.full((n, 2), float(n))) for n in (0, 3, 1, 2)]
    grids = np.array([[1, 1, n] for n in (3, 1, 2)])
    items = [EncoderItems(parts[:3], grids[:2]), EncoderItems([parts[0], parts[3]], grids[2:])]
    batch = stage_items(items, GridsOnly(), Staging(None))
    assert batch.patches is not None
    expected = [[3.0] * 2] * 3 + [[1.0] * 2] + [[2.0] * 2] * 2
    assert batch.patches.values(torch.float32).tolist() == expected
    assert batch.items.tolist() == grids.tolist()
    later_stage = stage_items([EncoderItems(None, grids)], GridsOnly(), Staging(None))
    assert later_stage.patches is None


# ------------------------------------------------------------ rows of several encoders

S, B, H = 5, 2, 3


def received(first: float, places: list[int], num_levels: int) -> ReceivedRows:
    """Rows whose elements are ``first``, ``first`` + 1, ...; those of levels are negative."""
    numbers = first + torch.arange(float(len(places)))
    rows = numbers[:, None].expand(-1, H)
    return ReceivedRows(rows, -rows.expand(num_levels, -1, -1), torch.tensor(places))


# As many rows of each; place b·S + s is token s of sequence b.
IMAGES, VIDEOS = received(10.0, [7, 0], 2), received(20.0, [3, 8], 1)


def test_rows_of_encoders_with_equal_counts_stand_at_the_places_of_each() -> None:
    text = torch.zeros(S, B, H)
    expected = torch.zeros(S, B)
    expected[2, 1], expected[0, 0] = 10.0, 11.0
    expected[3, 0], expected[3, 1] = 20.0, 21.0
    placed = place_embeddings(text, {}, [IMAGES, VIDEOS], {})
    assert torch.equal(placed, expected[..., None].expand(text.shape))


def test_levels_of_encoders_keep_the_places_of_each() -> None:
    joined = join_levels([IMAGES, VIDEOS])
    assert joined is not None
    levels: Tensor = joined[0]
    assert joined[1].tolist() == [7, 0, 3, 8]
    assert levels[..., 0].tolist() == [[-10.0, -11.0, -20.0, -21.0], [-10.0, -11.0, 0.0, 0.0]]
