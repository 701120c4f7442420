"""Reads what this rank owns of each step, in a background thread, ahead of use.

A rank decodes the items of its lane of each encoder that it owns and no others; a language rank
tokenizes the samples of its lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from data.batch import PackedLane, pack_lane
from data.index.reader import SampleReader, UnreadableSample
from data.media.processor import WireForm
from data.packing import Used
from data.text.chat import EncodedSample
from mimo.layout.grids import Coords, Layout
from mimo.step.plan import PlannedMicrobatch, StepPlan, StepPlanner, first_samples


@dataclass(frozen=True)
class EncoderItems:
    """One encoder lane's items of one global microbatch.

    patches: an empty part (0, W), then those of each item (P, W), with the forms in which they are
        sent, on the encoder's first stage; else None.
    grids: (I, 3) int64.
    """

    patches: list[tuple[WireForm, Tensor]] | None
    grids: np.ndarray


@dataclass
class LoadedStep:
    """What this rank has read for a step, before it is known which samples are unusable.

    used: the samples of the order that are used once the step is done.
    encoded: per microbatch, samples by their number in it.
    patches: per microbatch, items (P, W) by data source and number in its index.
    unusable: sample numbers in the step that this rank could not read, with the reason.
    """

    step: int
    microbatches: list[PlannedMicrobatch]
    used: Used
    encoded: list[dict[int, EncodedSample]] = field(default_factory=list)
    patches: list[dict[tuple[int, int], Tensor]] = field(default_factory=list)
    unusable: dict[int, str] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples of the step, over all lanes."""
        return sum(m.samples.num_samples for m in self.microbatches)

    def addresses(self, numbers: Collection[int]) -> set[tuple[int, int]]:
        """(data source, sample) of samples, given by their numbers in the step."""
        source = np.concatenate([m.samples.source for m in self.microbatches])
        sample = np.concatenate([m.samples.sample for m in self.microbatches])
        return {(int(source[number]), int(sample[number])) for number in numbers}


class StepLoader:
    """Loads steps in order from ``first_step`` on. Close it when done.

    ahead: steps that are being loaded, or wait, while nobody asks for one.
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
    ) -> None:
        self.planner = planner
        self.readers = readers
        self.layout = layout
        self.rank = rank
        self.ahead = ahead
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
        self, planned: PlannedMicrobatch, first: int, unusable: dict[int, str]
    ) -> dict[int, EncodedSample]:
        if self.rank not in self.layout.language.ranks:
            return {}
        samples = planned.samples
        encoded = {}
        for i in samples.samples_of_lane(self.layout.language.coords(self.rank).dp).tolist():
            try:
                encoded[i] = self.readers[int(samples.source[i])].sample(int(samples.sample[i]))
            except UnreadableSample as error:
                unusable[first + i] = str(error)  # the error itself would keep its frames alive
                encoded[i] = _stand_in(int(samples.length[i]))
        return encoded

    def _decode_items(
        self, planned: PlannedMicrobatch, first: int, unusable: dict[int, str]
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
                    decoded[source, item] = torch.from_numpy(self.readers[source].patches(item))
                except UnreadableSample as error:
                    unusable[first + owner] = str(error)
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
        mine = samples.samples_of_lane(lane).tolist()
        encoded = [loaded.encoded[m][i] for i in mine]
        grids, time_steps = [], []
        for i, sample in zip(mine, encoded, strict=True):
            reader = readers[int(samples.source[i])]
            own = np.flatnonzero(samples.item_sample == i)
            for media, token in reader.chat.placeholder_ids.items():
                of_media = np.intersect1d(own, samples.items_of_media(media))
                rows = int(samples.item_rows[of_media].sum())
                placeholders = int((sample.input_ids == token).sum())
                if samples.loss_tokens[i] > 0 and rows != placeholders:
                    key = reader.index.key(int(samples.sample[i]))
                    raise ValueError(
                        f"sample {key!r}: {placeholders} {media} placeholder tokens, but its items "
                        f"encode to {rows} rows; the index does not fit the data"
                    )
            # A blanked sample keeps its placeholders but has no items: plain text positions.
            items = samples.item[own].tolist()
            grids.append([reader.row_grid(item) for item in items])
            time_steps.append([reader.time_step(item) for item in items])
            if not own.size:
                encoded[len(grids) - 1] = replace(sample, item_offsets=np.zeros(0, np.int64))
        packed.append(
            pack_lane(
                encoded,
                grids,
                samples.loss_tokens[mine].tolist(),
                int(samples.lane_tokens[lane]),
                pad_token_id,
                samples.segment_length[mine].tolist(),
                samples.packed,
                time_steps,
            )
        )
    return packed


def gather_items(
    loaded: LoadedStep,
    plan: StepPlan,
    readers: Sequence[SampleReader],
    encoder: str,
    coords: Coords,
    form: WireForm,
) -> list[EncoderItems]:
    """The items of the encoder's lane at ``coords``, microbatch by microbatch, in plan order.

    form: of an item of the encoder's own media, for a lane without items.
    """
    gathered = []
    for m, planned in enumerate(plan.microbatches):
        samples, own = planned.samples, planned.encoders[encoder]
        mine = own.of_lane(coords.dp)
        sources = samples.source[samples.item_sample[mine]].tolist()
        items = list(zip(sources, samples.item[mine].tolist(), strict=True))
        patches = None
        if coords.pp == 0:
            nothing = torch.from_numpy(np.zeros((0, form.width), form.dtype))
            sent = [(readers[s].media(i).wire, loaded.patches[m][s, i]) for s, i in items]
            patches = [(form, nothing), *sent]
        grids = [readers[source].grid(item) for source, item in items]
        gathered.append(EncoderItems(patches, np.array(grids, np.int64).reshape(-1, 3)))
    return gathered
