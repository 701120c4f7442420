"""Time how long a rank takes to plan a step.

All from an index that is drawn: chats of up to five images, without files or texts.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from data.index.reader import SampleReader
from data.loader import LoadedStep
from data.modalities.images import ImageProcessor
from data.order import SampleOrder
from data.packing import TokenBudget
from data.text.chat import EncodedSample
from mimo.model.decoding import pack_language
from mimo.model.step_plan import StepPlanner
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

PLAN_RANKS = (1024, 16384)
_MICROBATCHES = 32
_TP, _CP, _RANKS_PER_ENCODER_LANE = 8, 2, 8
_BUDGET = TokenBudget(8192)
_SAMPLES, _BLOCK, _IMAGES = 200_000, 64, 5
_MEDIA, _PLACEHOLDER, _TEXT = "image", 1, 2
_REPEATS = 5


@dataclass(frozen=True)
class StepTime:
    """Median milliseconds of a core to plan a step: the slower of a sending and a receiving rank.

    num_ranks: of the language model. packed: sequences of several samples, as many as fit; else of
    one. samples: of the whole step.
    """

    num_ranks: int
    packed: bool
    samples: int
    ms: float


class DrawnIndex:
    """As much of an `Index` as planning asks for."""

    media = (_MEDIA,)
    catalog = SimpleNamespace(root="nowhere")

    def __init__(self, processor: ImageProcessor, num_samples: int = _SAMPLES) -> None:
        draw = np.random.default_rng(0)
        count, text = draw.integers([[0], [20]], [[_IMAGES + 1], [1500]], (2, num_samples))
        start = np.cumsum([0, *count])
        shape = draw.integers(7, 33, (start[-1], 2))  # up to 896 x 896 pixels
        rows = shape.prod(axis=1)
        before, first = np.cumsum([0, *rows]), np.repeat(start[:-1], count)
        # A token before each image and one after it.
        place = before[:-1] - before[first] + 2 * (np.arange(len(rows)) - first) + 1
        self.columns: dict[str, np.ndarray] = {
            "token_length": text + before[start[1:]] - before[start[:-1]] + 2 * count,
            "loss_tokens": text // 2,
            "item_start": start,
            "item_media": np.zeros_like(rows),
            "item_frames": np.ones_like(rows),
            "item_fps": np.ones(len(rows)),
            "item_size_0": shape[:, 0] * processor.row_pixels,
            "item_size_1": shape[:, 1] * processor.row_pixels,
            "item_rows": rows,
            "item_placeholder": place,
            "item_cost": rows * (rows + 4096),
        }

    def __len__(self) -> int:
        return len(self.columns["token_length"])

    def column(self, name: str, numbers: np.ndarray | slice = slice(None)) -> np.ndarray:
        """As `Index.column`."""
        return self.columns[name][numbers]

    def encoded(self, sample: int) -> EncodedSample:
        """Tokens that fit what the index says of a sample."""
        items = slice(*self.columns["item_start"][sample : sample + 2].tolist())
        ids = np.full(int(self.columns["token_length"][sample]), _TEXT)
        offsets = self.columns["item_placeholder"][items]
        for offset, rows in zip(offsets, self.columns["item_rows"][items], strict=True):
            ids[offset : offset + rows] = _PLACEHOLDER
        return EncodedSample(ids, ids, np.ones(len(ids), np.float32), offsets)


def time_step(num_ranks: int, packed: bool, repeats: int = _REPEATS) -> StepTime:
    """Plan steps of 32 microbatches one after another, the first one to warm up."""
    processor = ImageProcessor()
    lanes, dp = num_ranks // _RANKS_PER_ENCODER_LANE, num_ranks // (_TP * _CP)
    language = GridSpec(LANGUAGE, tp=_TP, sp=True, cp=_CP, dp=dp, rank_offset=lanes)
    layout = Layout(language, {"vision": GridSpec("vision", dp=lanes)}, lanes + num_ranks)
    index: Any = DrawnIndex(processor)
    chat: Any = SimpleNamespace(placeholder_ids={_MEDIA: _PLACEHOLDER})
    readers = [SampleReader(index, chat, {_MEDIA: processor})]
    medians, samples = [], 0
    for rank in (0, layout.language.rank_offset):
        planner = StepPlanner(
            layout,
            {"vision": (_MEDIA,)},
            [index],
            SampleOrder([len(index)], [1.0], seed=0, block=_BLOCK),
            micro_batch_size=1,
            num_microbatches=_MICROBATCHES,
            rank=rank,
            budget=_BUDGET if packed else None,
            linear_tokens=4096,
        )
        times = []
        for step in range(1 + repeats):
            started = time.process_time()
            planned = planner.microbatches(step)
            plan = planner.finish(planned)
            (bridges,) = plan.bridges.values()
            for bridge in bridges:
                for messages in ("receives", "returns") if rank else ("sends", "collects"):
                    getattr(bridge, messages)(rank)
            times.append(time.process_time() - started)
            if not rank:
                continue
            parts = [m.samples for m in planned]
            encoded = [
                {i: index.encoded(part.sample[i]) for i in part.samples_of_lane(0).tolist()}
                for part in parts
            ]
            loaded = LoadedStep(step, planned, planner.used_before(step + 1), encoded)
            started = time.process_time()
            pack_language(loaded, plan, readers, 0, 0)
            times[-1] += time.process_time() - started
            samples = sum(part.num_samples for part in parts)
        medians.append(1e3 * statistics.median(times[1:]))
    return StepTime(num_ranks, packed, samples, max(medians))
