"""From the order of samples to packed microbatches.

What every rank needs to know of a global microbatch comes from the index alone
(`GlobalMicrobatch`); what a rank owns is read and packed separately (`pack_lane`).

Letters: n samples and m items of one global microbatch, L language lanes, T packed tokens of
one lane.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.chat import EncodedSample
from data.index import Index
from data.order import SampleOrder
from data.positions import mrope_position_ids


@dataclass(frozen=True)
class GlobalMicrobatch:
    """What all language lanes together process in one microbatch step.

    Samples stand lane after lane, items in sample order.

    source, sample: (n,) which sample of which data source.
    lane: (n,) its language lane. start: (n,) its first token in the lane's packed sequence.
    length, loss_tokens: (n,) tokens, and tokens that count in the loss.
    lane_tokens: (L,) packed length T of each lane, padding included.
    media: names of the media. item_media: (m,) into these.
    item: (m,) number in its source's index. item_sample: (m,) ascending, into the samples.
    item_position: (m,) first placeholder in the lane's packed sequence.
    item_rows, item_cost: (m,) placeholders, and work of the encoder.
    """

    source: np.ndarray
    sample: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    length: np.ndarray
    loss_tokens: np.ndarray
    lane_tokens: np.ndarray
    media: tuple[str, ...]
    item_media: np.ndarray
    item: np.ndarray
    item_sample: np.ndarray
    item_position: np.ndarray
    item_rows: np.ndarray
    item_cost: np.ndarray

    @property
    def num_samples(self) -> int:
        """Samples of all lanes together, blanked ones included."""
        return len(self.sample)

    def samples_of_lane(self, lane: int) -> np.ndarray:
        """Numbers in this microbatch of the samples of one lane, in packed order."""
        return np.flatnonzero(self.lane == lane)

    def items_of_media(self, media: str) -> np.ndarray:
        """Numbers in this microbatch of the items of one media, in order."""
        if media not in self.media:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.item_media == self.media.index(media))

    def without(self, unusable: Collection[int]) -> GlobalMicrobatch:
        """The same microbatch with some samples blanked: no items and no loss, tokens kept.

        unusable: sample numbers in this microbatch. Every rank must blank the same ones. Shapes
        do not change, and no other sample sees the difference, since segments are separate.
        """
        if not unusable:
            return self
        blank = np.isin(np.arange(self.num_samples), list(unusable))
        kept = ~blank[self.item_sample]
        return replace(
            self,
            loss_tokens=np.where(blank, 0, self.loss_tokens),
            item_media=self.item_media[kept],
            item=self.item[kept],
            item_sample=self.item_sample[kept],
            item_position=self.item_position[kept],
            item_rows=self.item_rows[kept],
            item_cost=self.item_cost[kept],
        )


def plan_microbatch(
    indexes: Sequence[Index],
    order: SampleOrder,
    first_position: int,
    lanes: int,
    samples_per_lane: int,
    token_multiple: int = 1,
) -> GlobalMicrobatch:
    """The microbatch of ``lanes · samples_per_lane`` samples from ``first_position`` on.

    A pure function of its arguments, so every rank plans the same. All ``indexes`` have the same
    media. Each lane's packed length is
    padded to ``token_multiple``.
    """
    count = lanes * samples_per_lane
    source, sample = order.at(np.arange(first_position, first_position + count))
    length = np.empty(count, np.int64)
    loss_tokens = np.empty(count, np.int64)
    media, items, item_sample, placeholder, rows, cost = [], [], [], [], [], []
    for i in range(count):
        index, s = indexes[source[i]], sample[i]
        length[i], loss_tokens[i] = index.token_length[s], index.loss_tokens[s]
        own = np.arange(index.item_start[s], index.item_start[s + 1])
        media.append(index.item_media[own])
        items.append(own)
        item_sample.append(np.full(own.size, i))
        placeholder.append(index.item_placeholder[own])
        rows.append(index.item_rows[own])
        cost.append(index.item_cost[own])
    lane = np.repeat(np.arange(lanes), samples_per_lane)
    per_lane = length.reshape(lanes, samples_per_lane)
    start = (np.cumsum(per_lane, axis=1) - per_lane).reshape(-1)
    of_sample = _concatenate(item_sample)
    return GlobalMicrobatch(
        source=source,
        sample=sample,
        lane=lane,
        start=start,
        length=length,
        loss_tokens=loss_tokens,
        lane_tokens=-(-per_lane.sum(axis=1) // token_multiple) * token_multiple,
        media=indexes[0].media,
        item_media=_concatenate(media),
        item=_concatenate(items),
        item_sample=of_sample,
        item_position=start[of_sample] + _concatenate(placeholder),
        item_rows=_concatenate(rows),
        item_cost=_concatenate(cost),
    )


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64)


@dataclass(frozen=True)
class PackedLane:
    """One lane's packed microbatch; padding is a segment of its own at the end.

    input_ids, labels: (T,) int64. loss_mask: (T,) float32. position_ids: (3, T) int64.
    lengths: tokens per segment, their sum is T.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    lengths: tuple[int, ...]


def pack_lane(
    samples: Sequence[EncodedSample],
    grids: Sequence[Sequence[tuple[int, int, int]]],
    loss_tokens: Sequence[int],
    num_tokens: int,
    pad_token_id: int,
) -> PackedLane:
    """Pack a lane's samples one after the other into ``num_tokens`` tokens.

    grids: per sample, the (t, h, w) of its items in rows. loss_tokens: per sample; a sample
    planned with none (blanked) has its whole loss mask cleared.
    Positions restart in every segment.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    padding = num_tokens - sum(lengths)
    assert padding >= 0, f"{sum(lengths)} tokens do not fit into the planned {num_tokens}"
    pad = np.full(padding, pad_token_id, np.int64)
    masks = [
        sample.loss_mask if count > 0 else np.zeros_like(sample.loss_mask)
        for sample, count in zip(samples, loss_tokens, strict=True)
    ]
    positions = [
        mrope_position_ids(len(sample.input_ids), sample.item_offsets, own)
        for sample, own in zip(samples, grids, strict=True)
    ]
    return PackedLane(
        input_ids=np.concatenate([*(sample.input_ids for sample in samples), pad]),
        labels=np.concatenate([*(sample.labels for sample in samples), pad]),
        loss_mask=np.concatenate([*masks, np.zeros(padding, np.float32)]),
        position_ids=np.concatenate(
            [*positions, np.tile(np.arange(padding, dtype=np.int64), (3, 1))], axis=1
        ),
        lengths=tuple(lengths) + ((padding,) if padding else ()),
    )
