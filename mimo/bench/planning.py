"""How long one rank plans a step, by parts: all that is done from the index, before any reading.

The samples are drawn: chats of up to five images, without files or texts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from data.index.reader import SampleReader
from data.media.images import ImageProcessor
from data.media.processor import Part
from data.order import SampleOrder
from data.packing import TokenBudget
from data.text.chat import EncodedSample
from mimo.layout.grids import LANGUAGE, GridSpec, Layout
from mimo.step.loader import LoadedStep, pack_language
from mimo.step.plan import PlannedMicrobatch, StepPlanner

PLAN_RANKS = (1024, 16384)
MICROBATCHES = 32
_TP, _CP = 8, 2
_RANKS_PER_ENCODER_LANE = 8  # of the language model
_SAMPLES, _BLOCK, _IMAGES, _PLACEHOLDER = 200_000, 64, 5, 1
_BUDGET = TokenBudget(8192)
_ENCODER, _MEDIA = "vision", "image"


@dataclass(frozen=True)
class StepTime:
    """Median milliseconds of one core to plan a step, by rank: one that sends, one that receives.

    num_ranks: of the language model, tp 8 and cp 2; an encoder has a lane for every 8 of them.
    budget: tokens of a sequence; None for one sample each. sender, receiver: by part.
    """

    num_ranks: int
    budget: int | None
    samples: int
    items: int
    sender: dict[str, float]
    receiver: dict[str, float]

    @property
    def ms(self) -> float:
        """All parts of the slower rank."""
        return max(sum(self.sender.values()), sum(self.receiver.values()))


class DrawnIndex:
    """As much of an `Index` as planning asks for."""

    media = (_MEDIA,)

    def __init__(self, processor: ImageProcessor, num_samples: int = _SAMPLES) -> None:
        draw = np.random.default_rng(0)
        count = draw.integers(0, _IMAGES + 1, num_samples)
        sizes = draw.integers(7, 33, (int(count.sum()), 2)) * 28  # up to 896 x 896 pixels
        plans = {(w, h): processor.plan(Part((w, h))) for w, h in np.unique(sizes, axis=0).tolist()}
        own = [plans[w, h] for w, h in sizes.tolist()]
        rows = np.array([plan.num_rows for plan in own])
        sample, start = np.repeat(np.arange(num_samples), count), np.cumsum([0, *count])
        before = np.cumsum([0, *rows])
        place = np.arange(len(rows)) - start[sample]
        text = draw.integers(20, 1500, num_samples)
        self.columns: dict[str, np.ndarray] = {
            "token_length": text + before[start[1:]] - before[start[:-1]] + 2 * count,
            "loss_tokens": text // 2,
            "item_start": start,
            "item_media": np.zeros(len(rows), np.int64),
            "item_number": np.zeros(len(rows), np.int64),
            "item_frames": np.ones(len(rows), np.int64),
            "item_fps": np.ones(len(rows)),
            "item_size_0": sizes[:, 0],
            "item_size_1": sizes[:, 1],
            "item_rows": rows,
            "item_placeholder": before[:-1] - before[start[sample]] + 2 * place + 1,
            "item_cost": np.array([plan.cost for plan in own]),
        }
        vars(self).update(self.columns)

    def __len__(self) -> int:
        return len(self.columns["token_length"])

    def column(self, name: str, numbers: np.ndarray | slice = slice(None)) -> np.ndarray:
        """As `Index.column`."""
        return self.columns[name][numbers]

    def part(self, item: int) -> Part:
        """As `Index.part`."""
        width, height = (int(self.columns[f"item_size_{side}"][item]) for side in range(2))
        return Part((width, height), 1, 1.0)

    def encoded(self, sample: int) -> EncodedSample:
        """Tokens that fit what the index says of a sample."""
        length, (first, end) = (
            int(self.columns["token_length"][sample]),
            self.columns["item_start"][sample : sample + 2].tolist(),
        )
        ids = np.full(length, _PLACEHOLDER + 1)
        offsets = self.columns["item_placeholder"][first:end]
        for offset, rows in zip(offsets, self.columns["item_rows"][first:end], strict=True):
            ids[offset : offset + rows] = _PLACEHOLDER
        return EncodedSample(ids, ids, np.ones(length, np.float32), offsets)


def layout_of(num_ranks: int) -> Layout:
    """Encoder lanes of one rank each, then the language model."""
    lanes = num_ranks // _RANKS_PER_ENCODER_LANE
    language = GridSpec(
        LANGUAGE, tp=_TP, sp=True, cp=_CP, dp=num_ranks // (_TP * _CP), rank_offset=lanes
    )
    return Layout(language, {_ENCODER: GridSpec(_ENCODER, dp=lanes)}, lanes + num_ranks)


def time_step(
    index: DrawnIndex, processor: ImageProcessor, num_ranks: int, packed: bool, repeats: int = 5
) -> StepTime:
    """Plan steps one after the other, as a rank of either end does; the first one warms up."""
    layout = layout_of(num_ranks)
    chat: Any = SimpleNamespace(placeholder_ids={_MEDIA: _PLACEHOLDER})
    readers = [SampleReader(cast("Any", index), chat, {_MEDIA: processor})]
    found: dict[int, dict[str, list[float]]] = {}
    planned: list[PlannedMicrobatch] = []
    for rank in (0, layout.language.rank_offset):
        order = SampleOrder([len(index)], [1.0], seed=0, block=_BLOCK)
        planner = StepPlanner(
            layout,
            {_ENCODER: (_MEDIA,)},
            [cast("Any", index)],
            order,
            micro_batch_size=1,
            num_microbatches=MICROBATCHES,
            budget=_BUDGET if packed else None,
            rank=rank,
            linear_tokens=4096,
        )
        times: dict[str, list[float]] = {}

        def timed[T](part: str, work: Callable[[], T], times: dict[str, list[float]] = times) -> T:
            started = time.process_time()
            result = work()
            times.setdefault(part, []).append(1000 * (time.process_time() - started))
            return result

        for step in range(1 + repeats):
            planned = timed("order and lanes", lambda p=planner, s=step: p.microbatches(s))
            plan = timed("bridges", lambda p=planner, m=planned: p.finish(m))
            (link,) = layout.links_of(_ENCODER)
            bridges = plan.bridges[link]
            if rank == 0:
                timed("messages", lambda b=bridges: [(p.sends(0), p.collects(0)) for p in b])
                continue
            timed("messages", lambda b=bridges, r=rank: [(p.receives(r), p.returns(r)) for p in b])
            encoded = [
                {
                    i: index.encoded(int(m.samples.sample[i]))
                    for i in m.samples.samples_of_lane(0).tolist()
                }
                for m in planned
            ]
            loaded = LoadedStep(step, planned, planner.used_before(step + 1), encoded)
            timed("sequences", lambda a=loaded, p=plan: pack_language(a, p, readers, 0, 0))
        found[rank] = times
    sender, receiver = (
        {part: statistics.median(own[1:]) for part, own in times.items()}
        for times in found.values()
    )
    return StepTime(
        num_ranks=num_ranks,
        budget=_BUDGET.tokens if packed else None,
        samples=sum(m.samples.num_samples for m in planned),
        items=sum(len(m.samples.item) for m in planned),
        sender=sender,
        receiver=receiver,
    )
