"""Reads what this rank owns of each step, in a background thread, ahead of use.

A rank decodes the items of its lane of each encoder that it owns and no others; a language rank
tokenizes the samples of its lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from data.batch import GlobalMicrobatch, PackedLane, pack_lane
from data.index.reader import SampleReader, UnreadableSample, plans_of_items
from data.index.samples import SkippedSample
from data.packing import Used
from data.text.chat import EncodedSample
from mimo.layout.grids import Coords, Layout
from mimo.step.plan import PlannedMicrobatch, StepPlan, StepPlanner, first_samples


@dataclass(frozen=True)
class EncoderItems:
    """One encoder lane's items of one global microbatch.

    patches: an empty part (0, C), then those of each item (P, C), on the encoder's first stage;
        else None.
    grids: (I, 3) int64.
    """

    patches: list[Tensor] | None
    grids: np.ndarray


@dataclass
class LoadedStep:
    """What this rank has read for a step, before it is known which samples are unusable.

    used: the samples of the order that are used once the step is done.
    encoded: per microbatch, samples by their number in it.
    patches: per microbatch, items (P, C) by data source and number in its index, in the dtype in
        which they are computed on.
    unusable: sample numbers in the step that this rank could not read, with what is wrong.
    """

    step: int
    microbatches: list[PlannedMicrobatch]
    used: Used
    encoded: list[dict[int, EncodedSample]] = field(default_factory=list)
    patches: list[dict[tuple[int, int], Tensor]] = field(default_factory=list)
    unusable: dict[int, SkippedSample] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples of the step, over all lanes."""
        return sum(m.samples.num_samples for m in self.microbatches)

    def addresses(self, numbers: Collection[int]) -> dict[tuple[int, int], int]:
        """(data source, sample) of samples, given by their numbers in the step, with these."""
        source = np.concatenate([m.samples.source for m in self.microbatches])
        sample = np.concatenate([m.samples.sample for m in self.microbatches])
        return {(int(source[number]), int(sample[number])): number for number in numbers}


class StepLoader:
    """Loads steps in order from ``first_step`` on. Close it when done.

    ahead: steps that are being loaded, or wait, while nobody asks for one.
    patch_dtype: of the patches from the moment that they are decoded.
    """

    def __init__(
        self,
        planner: StepPlanner,
        readers: Sequence[SampleReader],
        layout: Layout,
        rank: int,
        first_step: int,
        last_step: int,
        ahead: int,
        patch_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.planner = planner
        self.readers = readers
        self.layout = layout
        self.rank = rank
        self.ahead = ahead
        self.patch_dtype = patch_dtype
        self._next = first_step
        self._last = last_step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._pending: deque[Future[LoadedStep]] = deque()
        self._submit(ahead)

    def _submit(self, wanted: int) -> None:
        """Load further steps until ``wanted`` of them are under way or wait."""
        while len(self._pending) < wanted and self._next < self._last:
            self._pending.append(self._pool.submit(self._load, self._next))
            self._next += 1

    def next(self) -> LoadedStep:
        """The next step; waits for it if need be. Raises what its reading raised."""
        self._submit(1)
        assert self._pending, "no steps are left to load"
        loaded = self._pending.popleft().result()
        self._submit(self.ahead)
        return loaded

    def close(self) -> None:
        """Stop loading; waits for the step that is being read."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _load(self, step: int) -> LoadedStep:
        microbatches = self.planner.microbatches(step)
        loaded = LoadedStep(step, microbatches, self.planner.used_before(step + 1))
        for first, planned in zip(first_samples(microbatches), microbatches, strict=True):
            loaded.encoded.append(self._encode_samples(planned, first, loaded.unusable))
            loaded.patches.append(self._decode_items(planned, first, loaded.unusable))
        return loaded

    def _encode_samples(
        self, planned: PlannedMicrobatch, first: int, unusable: dict[int, SkippedSample]
    ) -> dict[int, EncodedSample]:
        if self.rank not in self.layout.language.ranks:
            return {}
        samples = planned.samples
        encoded = {}
        for i in samples.samples_of_lane(self.layout.language.coords(self.rank).dp).tolist():
            try:
                encoded[i] = self.readers[int(samples.source[i])].sample(int(samples.sample[i]))
            except UnreadableSample as error:
                unusable[first + i] = error.sample  # the error itself would keep its frames alive
                encoded[i] = _stand_in(int(samples.length[i]))
        return encoded

    def _decode_items(
        self, planned: PlannedMicrobatch, first: int, unusable: dict[int, SkippedSample]
    ) -> dict[tuple[int, int], Tensor]:
        decoded = {}
        for name, grid in self.layout.encoders.items():
            if self.rank not in grid.ranks or grid.coords(self.rank).pp > 0:
                continue
            samples = planned.samples
            for k in planned.encoders[name].of_lane(grid.coords(self.rank).dp).tolist():
                owner = int(samples.item_sample[k])
                source, item = int(samples.source[owner]), int(samples.item[k])
                try:
                    patches = torch.from_numpy(self.readers[source].patches(item))
                    decoded[source, item] = patches.to(self.patch_dtype)
                except UnreadableSample as error:
                    unusable[first + owner] = error.sample
        return decoded


def _stand_in(length: int) -> EncodedSample:
    """Tokens in place of a sample that could not be read; it is blanked before anyone uses it."""
    return EncodedSample(
        input_ids=np.zeros(length, np.int64),
        labels=np.zeros(length, np.int64),
        loss_mask=np.zeros(length, np.float32),
        item_offsets=np.zeros(0, np.int64),
    )


def pack_language(
    loaded: LoadedStep,
    plan: StepPlan,
    readers: Sequence[SampleReader],
    lane: int,
    pad_token_id: int,
) -> list[PackedLane]:
    """The packed microbatches of one language lane.

    Raises ValueError naming sample, placeholders and rows when a usable sample's placeholders
    are not as many as the rows that will arrive for it.
    """
    packed = []
    for m, planned in enumerate(plan.microbatches):
        samples = planned.samples
        mine = slice(*np.searchsorted(samples.lane, (lane, lane + 1)).tolist())
        items = slice(*np.searchsorted(samples.item_sample, (mine.start, mine.stop)).tolist())
        owner = samples.item_sample[items] - mine.start
        encoded = [loaded.encoded[m][i] for i in range(mine.start, mine.stop)]
        _check_placeholders(encoded, samples, mine, items, readers)
        plans = plans_of_items(
            readers, samples.source[samples.item_sample[items]], samples.item[items]
        )
        cuts = np.searchsorted(owner, np.arange(len(encoded) + 1)).tolist()
        by_sample = [plans[start:stop] for start, stop in pairwise(cuts)]
        # A blanked sample keeps its placeholders but has no items: plain text positions.
        nothing = np.zeros(0, np.int64)
        encoded = [
            sample if own else replace(sample, item_offsets=nothing)
            for sample, own in zip(encoded, by_sample, strict=True)
        ]
        packed.append(
            pack_lane(
                encoded,
                [[part.row_grid for part in own] for own in by_sample],
                samples.loss_tokens[mine],
                int(samples.lane_tokens[lane]),
                pad_token_id,
                samples.segment_length[mine],
                samples.packed,
                [[part.time_step for part in own] for own in by_sample],
            )
        )
    return packed


def _check_placeholders(
    encoded: Sequence[EncodedSample],
    samples: GlobalMicrobatch,
    mine: slice,
    items: slice,
    readers: Sequence[SampleReader],
) -> None:
    """Raise ValueError unless each usable sample has a placeholder for every row of its items.

    encoded: those of ``mine``, which have these ``items``.
    """
    bounds = np.cumsum([0, *(len(sample.input_ids) for sample in encoded)])
    ids = np.concatenate([sample.input_ids for sample in encoded])
    owner, rows = samples.item_sample[items] - mine.start, samples.item_rows[items]
    for media, token in readers[0].chat.placeholder_ids.items():
        placeholders = np.diff(np.searchsorted(np.flatnonzero(ids == token), bounds))
        own = rows * samples.is_of_media(media)[items]
        planned = np.bincount(owner, own, len(encoded))
        usable = samples.loss_tokens[mine] > 0
        for i in np.flatnonzero(usable & (planned != placeholders))[:1].tolist():
            source, sample = (int(of[mine][i]) for of in (samples.source, samples.sample))
            raise ValueError(
                f"sample {readers[source].index.key(sample)!r}: {placeholders[i]} {media} "
                f"placeholder tokens, but its items encode to {int(planned[i])} rows; the index "
                "does not fit the data"
            )


def gather_items(
    loaded: LoadedStep,
    plan: StepPlan,
    readers: Sequence[SampleReader],
    encoder: str,
    coords: Coords,
    patch_dim: int,
    dtype: torch.dtype,
) -> list[EncoderItems]:
    """The items of the encoder's lane at ``coords``, microbatch by microbatch, in plan order.

    patch_dim, dtype: C of the encoder's patches (P, C) and their dtype, also where there are none.
    """
    gathered = []
    for m, planned in enumerate(plan.microbatches):
        samples, own = planned.samples, planned.encoders[encoder]
        mine = own.of_lane(coords.dp)
        source, item = samples.source[samples.item_sample[mine]], samples.item[mine]
        patches = None
        if coords.pp == 0:
            nothing = torch.zeros(0, patch_dim, dtype=dtype)
            own_items = zip(source.tolist(), item.tolist(), strict=True)
            patches = [nothing, *(loaded.patches[m][own] for own in own_items)]
        grids = [part.grid for part in plans_of_items(readers, source, item)]
        gathered.append(EncoderItems(patches, np.array(grids, np.int64).reshape(-1, 3)))
    return gathered
