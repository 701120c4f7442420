"""Turn the order of samples into packed microbatches.

Every rank plans each global microbatch from the index alone (`GlobalMicrobatch`), and reads and
packs its own lane (`pack_lane`): one sequence, each sample a segment. With packing off, each sample
is a sequence, padded to the longest of the lane; sequences are still concatenated.

Letters: n samples and m items of one global microbatch, L language lanes, T tokens of one lane.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.index.samples import Index, column, items_of_samples
from data.modalities.processor import PartPlan
from data.order import SampleOrder
from data.packing import Sizes
from data.text.chat import EncodedSample


def mrope_position_ids(
    lengths: Sequence[int] | np.ndarray,
    item_offsets: Sequence[int] | np.ndarray,
    grids: Sequence[tuple[int, int, int]] | np.ndarray,
    time_steps: Sequence[float] | None = None,
) -> np.ndarray:
    """Return int64 (3, T): temporal, height and width position of each token in its sequence.

    A text token has three equal positions, one more than the largest before it. The rows of an item
    lie on a grid that starts there: time, height and width counting up. The text after an item goes
    on from its height and width alone. Source: `get_rope_index` of Qwen2.5-VL and Qwen3-VL in
    transformers.

    lengths: tokens of each sequence. item_offsets: (I,) first placeholder of each item among all T
    tokens, ascending. grids: (I, 3) grids (t, h, w) in rows, after merging. time_steps: (I,)
    positions from one frame of an item to the next, rounded down; None for 1 each.
    """
    position_ids = np.empty((3, sum(lengths)), np.int64)
    steps = [1.0] * len(grids) if time_steps is None else time_steps
    items = deque(zip(item_offsets, grids, steps, strict=True))
    token = end = 0  # of all sequences: the next token, and the end of its sequence
    for length in lengths:
        end, position = end + length, 0
        while token < end:
            offset, grid, step = items[0] if items else (end, (0, 0, 0), 0.0)
            text = min(offset, end) - token
            position_ids[:, token : token + text] = np.arange(position, position + text)
            token, position = token + text, position + text
            if token < end:
                items.popleft()
                place = np.indices(grid).reshape(3, -1)
                place[0] = place[0].astype(np.float32) * np.float32(step)
                position_ids[:, token : token + place.shape[1]] = position + place
                token, position = token + place.shape[1], position + max(grid[1:])
    return position_ids


@dataclass(frozen=True)
class Padding:
    """How samples become sequences, and the multiples to which these are padded."""

    packed: bool = True  # one sequence per lane; else one per sample
    segment: int = 1  # multiple of each sample in a packed sequence
    sequence: int = 1  # multiple of each whole sequence


_OF_SAMPLES = ("source", "sample", "lane", "start", "length", "loss_tokens", "segment_length")
_OF_ITEMS = ("item_media", "item", "item_sample", "item_position", "item_rows", "item_cost")


@dataclass(frozen=True)
class GlobalMicrobatch:
    """The samples, by lane, and items, by sample, of all language lanes in one microbatch step."""

    source: np.ndarray  # (n,) data source
    sample: np.ndarray  # (n,) number in its source's index
    lane: np.ndarray  # (n,) language lane
    start: np.ndarray  # (n,) first token among those of the lane
    length: np.ndarray  # (n,) tokens
    loss_tokens: np.ndarray  # (n,) tokens that count in the loss
    segment_length: np.ndarray  # (n,) tokens with the sample's own padding
    lane_tokens: np.ndarray  # (L,) tokens T of each lane, all padding included
    packed: bool  # whether a lane is one sequence; else each of its samples is one
    media: tuple[str, ...]  # names of the modalities
    item_media: np.ndarray  # (m,) index into `media`
    item: np.ndarray  # (m,) number in its source's index
    item_sample: np.ndarray  # (m,) ascending index into the samples
    item_position: np.ndarray  # (m,) token of its first row among those of the lane
    item_rows: np.ndarray  # (m,) rows
    item_cost: np.ndarray  # (m,) work of the encoder or generator

    @property
    def num_samples(self) -> int:
        """Samples of all lanes together, blanked ones included."""
        return len(self.sample)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, padding included."""
        return int((self.lane_tokens if self.packed else self.segment_length).max())

    def split(self, count: int) -> "list[GlobalMicrobatch]":
        """Split one microbatch of many lanes into ``count`` microbatches of equally many lanes."""
        lanes = len(self.lane_tokens) // count
        first_samples = np.searchsorted(self.lane, np.arange(count + 1) * lanes)
        first_items = np.searchsorted(self.item_sample, first_samples)
        microbatches = []
        for m in range(count):
            samples, items = slice(*first_samples[m : m + 2]), slice(*first_items[m : m + 2])
            parts = {name: getattr(self, name)[samples] for name in _OF_SAMPLES}
            parts |= {name: getattr(self, name)[items] for name in _OF_ITEMS}
            parts["lane"] = parts["lane"] - m * lanes
            parts["item_sample"] = parts["item_sample"] - first_samples[m]
            parts["lane_tokens"] = self.lane_tokens[m * lanes : (m + 1) * lanes]
            microbatches.append(replace(self, **parts))
        return microbatches

    def padded_to(self, tokens: int) -> "GlobalMicrobatch":
        """Return the same samples in sequences of ``tokens`` tokens each, on all lanes."""
        assert tokens >= self.longest_sequence, "sequences are padded, not cut"
        if self.packed:
            return replace(self, lane_tokens=np.full_like(self.lane_tokens, tokens))
        lanes = len(self.lane_tokens)
        per_lane = self.num_samples // lanes
        start = np.tile(np.arange(per_lane) * tokens, lanes)
        return replace(
            self,
            start=start,
            segment_length=np.full_like(self.segment_length, tokens),
            lane_tokens=np.full_like(self.lane_tokens, per_lane * tokens),
            item_position=self.item_position + (start - self.start)[self.item_sample],
        )

    def samples_of_lane(self, lane: int) -> np.ndarray:
        """Numbers in this microbatch of the samples of one lane, in packed order."""
        return np.flatnonzero(self.lane == lane)

    def items_of_media(self, *media: str) -> np.ndarray:
        """Numbers in this microbatch of the items of these modalities, in order."""
        numbers = [self.media.index(name) for name in media if name in self.media]
        return np.flatnonzero(np.isin(self.item_media, numbers))

    def without(self, unusable: Collection[int]) -> "GlobalMicrobatch":
        """Return the microbatch with some samples blanked: no items and no loss, tokens kept.

        unusable: sample numbers in this microbatch. Every rank must blank the same ones. Shapes do
        not change, and segments are separate, so no other sample sees the difference.
        """
        if not unusable:
            return self
        blank = np.isin(np.arange(self.num_samples), list(unusable))
        kept = ~blank[self.item_sample]
        return replace(
            self,
            loss_tokens=np.where(blank, 0, self.loss_tokens),
            **{name: getattr(self, name)[kept] for name in _OF_ITEMS},
        )


def plan_microbatch(
    indexes: Sequence[Index],
    order: SampleOrder,
    packs: Sequence[np.ndarray],
    padding: Padding = Padding(),
) -> GlobalMicrobatch:
    """Plan the microbatch of the samples at these positions of the order, equally on every rank.

    packs: the positions of each lane's samples, at least one; equally many if each sample is a
    sequence. All ``indexes`` have the same modalities.
    """
    source, sample = order.at(np.concatenate(packs))
    item, item_sample = items_of_samples(indexes, source, sample)

    def of_items(name: str) -> np.ndarray:
        return column(indexes, name, source[item_sample], item)

    counts = np.array([len(pack) for pack in packs])
    first = np.cumsum(counts) - counts  # sample of each lane
    length = column(indexes, "token_length", source, sample)
    segment = _up(length, padding.segment if padding.packed else padding.sequence)
    if not padding.packed:
        segment = np.maximum.reduceat(segment, first).repeat(counts)
    before = np.cumsum(segment) - segment
    start = before - before[first].repeat(counts)
    total = np.add.reduceat(segment, first)
    return GlobalMicrobatch(
        source=source,
        sample=sample,
        lane=np.repeat(np.arange(len(packs)), counts),
        start=start,
        length=length,
        loss_tokens=column(indexes, "loss_tokens", source, sample),
        segment_length=segment,
        lane_tokens=_up(total, padding.sequence) if padding.packed else total,
        packed=padding.packed,
        media=indexes[0].media,
        item_media=of_items("item_media"),
        item=item,
        item_sample=item_sample,
        item_position=start[item_sample] + of_items("item_placeholder"),
        item_rows=of_items("item_rows"),
        item_cost=of_items("item_cost"),
    )


def sizes_in_order(indexes: Sequence[Index], order: SampleOrder) -> Sizes:
    """Return a function from positions to tokens and rows, for packing by budget."""

    def sizes(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        source, sample = order.at(positions)
        tokens = column(indexes, "token_length", source, sample)
        item, item_sample = items_of_samples(indexes, source, sample)
        rows = column(indexes, "item_rows", source[item_sample], item)
        of_samples = np.bincount(item_sample, weights=rows, minlength=len(sample))
        return tokens, of_samples.astype(np.int64)

    return sizes


def _up(length: np.ndarray, multiple: int) -> np.ndarray:
    return -(-length // multiple) * multiple


@dataclass(frozen=True)
class PackedLane:
    """One lane's samples of a microbatch; padding at the end is a segment of its own."""

    input_ids: np.ndarray  # (T,) int64
    labels: np.ndarray  # (T,) int64
    loss_mask: np.ndarray  # (T,) float32
    position_ids: np.ndarray  # (3, T) int64
    lengths: tuple[int, ...]  # tokens per segment with its padding; their sum is T
    real_lengths: tuple[int, ...]  # tokens per segment without its padding
    tail: int = 0  # tokens of padding at the end, the last segment if there are any
    packed: bool = True  # whether all segments are one sequence; else each is one, equally long
    items: tuple[tuple[int, int], ...] = ()  # first token and number of tokens of each item
    parts: tuple[tuple[str, tuple[int, int, int]], ...] = ()  # modality and grid of each item
    # Of each output item with queries: modality, first query position, number of queries.
    queries: tuple[tuple[str, int, int], ...] = ()

    @property
    def num_sequences(self) -> int:
        """Batch size B for the language model."""
        return 1 if self.packed else len(self.lengths)


def pack_lane(
    samples: Sequence[EncodedSample],
    grids: Sequence[Sequence[tuple[int, int, int]]],
    loss_tokens: Sequence[int] | np.ndarray,
    num_tokens: int,
    pad_token_id: int,
    segment_lengths: Sequence[int] | np.ndarray | None = None,
    packed: bool = True,
    time_steps: Sequence[Sequence[float]] | None = None,
    parts: Sequence[tuple[str, tuple[int, int, int]]] = (),
    queries: Sequence[tuple[str, int, int]] = (),
) -> PackedLane:
    """Lay a lane's samples one after the other into ``num_tokens`` tokens.

    samples: with input items only (`read_items`). grids: per sample, the (t, h, w) of its items in
    rows. parts, queries: see `PackedLane`. time_steps: per sample, positions from one frame to the
    next. loss_tokens: per sample; one
    planned with none (blanked) has its whole loss mask cleared. segment_lengths: per sample, its
    tokens with padding; without them there is padding at the end only. Positions restart in every
    segment; padding never counts in the loss.
    """
    real = np.array([len(sample.input_ids) for sample in samples])
    padded = real if segment_lengths is None else np.asarray(segment_lengths)
    start = np.cumsum(padded) - padded
    tail = num_tokens - int(padded.sum())
    assert tail >= 0, f"{padded.sum()} tokens do not fit into the planned {num_tokens}"
    place = np.arange(real.sum()) + np.repeat(start - (np.cumsum(real) - real), real)
    ids, labels = (np.full(num_tokens, pad_token_id, np.int64) for _ in range(2))
    ids[place] = np.concatenate([sample.input_ids for sample in samples])
    labels[place] = np.concatenate([sample.labels for sample in samples])
    mask = np.zeros(num_tokens, np.float32)
    counts = np.repeat(np.asarray(loss_tokens) > 0, real)
    mask[place] = np.concatenate([sample.loss_mask for sample in samples]) * counts
    num_items = [len(of_sample) for of_sample in grids]
    offsets = np.concatenate([sample.item_offsets for sample in samples]) + start.repeat(num_items)
    all_grids = [grid for of_sample in grids for grid in of_sample]
    steps = None if time_steps is None else [step for of_sample in time_steps for step in of_sample]
    # Each sample, its padding, and what fills the sequence up: positions start again.
    stretches = np.append(np.stack((real, padded - real), axis=1), tail)
    return PackedLane(
        input_ids=ids,
        labels=labels,
        loss_mask=mask,
        position_ids=mrope_position_ids(stretches, offsets, all_grids, steps),
        lengths=(*padded.tolist(), *([tail] if tail else [])),
        real_lengths=(*real.tolist(), *([tail] if tail else [])),
        tail=tail,
        packed=packed,
        items=tuple(zip(offsets.tolist(), map(math.prod, all_grids), strict=True)),
        parts=tuple(parts),
        queries=tuple(queries),
    )


def queries_of(
    samples: GlobalMicrobatch, items: slice, plans: Sequence[PartPlan]
) -> list[tuple[str, int, int]]:
    """Return `PackedLane.queries` of one lane's items. plans: of each item."""
    media = [samples.media[kind] for kind in samples.item_media[items].tolist()]
    placed = zip(media, samples.item_position[items].tolist(), plans, strict=True)
    return [(name, first, p.num_rows) for name, first, p in placed if p.is_output and p.num_rows]


def read_items(sample: EncodedSample, plans: Sequence[PartPlan]) -> EncodedSample:
    """Return a sample with only the items that the model reads; output items count as text.

    plans: of all its items, in order; none if it is blanked.
    """
    numbers = np.array([n for n, plan in enumerate(plans) if not plan.is_output], np.int64)
    offsets, rows = sample.item_offsets[numbers], sample.item_rows[numbers]
    return replace(sample, item_offsets=offsets, item_rows=rows)
