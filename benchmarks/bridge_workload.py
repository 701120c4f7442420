"""What all bridges carry: a layout of two modules, its items, and what must arrive where.

Letters: N rows of the global microbatch, H hidden, T packed tokens of one language lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bridge import (
    BridgePlan,
    ItemRuns,
    LaneSegments,
    ReplicatedSource,
    replicated_destination,
    sharded_destination,
)
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

Delivery = Literal["sharded", "replicated"]
ENCODER = "vision"
_ROWS_PER_ITEM = 128


@dataclass(frozen=True)
class Case:
    """One layout of the comparison: first the encoder's ranks, then the language model's."""

    encoder_tp: int
    encoder_lanes: int
    language_tp: int
    language_lanes: int
    sp: bool = True

    @property
    def layout(self) -> Layout:
        """Both grids, disjoint."""
        encoder = GridSpec(ENCODER, tp=self.encoder_tp, dp=self.encoder_lanes)
        tp, dp, first = self.language_tp, self.language_lanes, encoder.size
        language = GridSpec(LANGUAGE, tp=tp, sp=self.sp, dp=dp, rank_offset=first)
        return Layout(language, {ENCODER: encoder}, encoder.size + language.size)

    @property
    def lanes_once(self) -> int:
        """The number of equal shares of the rows that make up whole lanes on both sides."""
        return math.lcm(self.encoder_lanes, self.language_lanes)

    def __str__(self) -> str:
        """For example `2×tp1 → 1×tp4 sp`: lanes × tensor parallelism on both sides."""
        language = f"{self.language_lanes}×tp{self.language_tp}{' sp' if self.sp else ''}"
        return f"{self.encoder_lanes}×tp{self.encoder_tp} → {language}"


@dataclass(frozen=True)
class Workload:
    """Items of about 128 rows with text between them, equal rows on every lane of a side.

    Rows are equal and in the order of the lanes, because Megatron's bridge supports nothing else on
    all of these layouts. rows: N, a multiple of the case's `lanes_once`. A row's content follows
    from its number, so that every rank can check what arrives.
    """

    case: Case
    rows: int
    hidden: int

    @cached_property
    def runs(self) -> ItemRuns:
        """The items, one per sample; the same on all ranks."""
        draw, case = np.random.default_rng(0), self.case
        share = self.rows // case.lanes_once
        count = max(1, round(share / _ROWS_PER_ITEM))
        cuts = [
            np.sort(draw.choice(np.arange(1, share), count - 1, replace=False))
            for _ in range(case.lanes_once)
        ]
        rows = np.concatenate([np.diff(own, prepend=0, append=share) for own in cuts])
        number = np.repeat(np.arange(case.lanes_once), count)
        lane = number * case.language_lanes // case.lanes_once
        text = draw.integers(1, 32, rows.size)  # before each item
        position = np.cumsum(text + rows) - rows
        return ItemRuns(
            sample=np.arange(rows.size),
            source_lane=number * case.encoder_lanes // case.lanes_once,
            destination_lane=lane,
            position=position - (position - text)[np.searchsorted(lane, lane)],
            rows=rows,
            num_samples=rows.size,
        )

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Of each language lane: some text comes last."""
        runs, tp = self.runs, self.case.language_tp
        ends = np.zeros(self.case.language_lanes, np.int64)
        np.maximum.at(ends, runs.destination_lane, runs.position + runs.rows)
        return tuple((-(-(ends + 1) // tp) * tp).tolist())

    def build_plan(self, delivery: Delivery) -> BridgePlan:
        """A fresh plan, so that nothing is cached from the last run."""
        encoder, language = self.case.layout.encoders[ENCODER], self.case.layout.language
        rows = np.full(encoder.dp, self.rows // encoder.dp, np.int64)
        source = ReplicatedSource(rows, np.array(encoder.ranks).reshape(encoder.dp, encoder.tp))
        ranks = np.array(language.ranks).reshape(language.dp, 1, language.tp)
        segments = LaneSegments.whole(self.tokens)
        if delivery == "sharded":
            destination = sharded_destination(segments, ranks, language.sp, self.runs)
            return BridgePlan.build(self.runs, source, destination)
        destination = replicated_destination(self.tokens, ranks)
        returning = sharded_destination(segments, ranks, False, self.runs)
        return BridgePlan.build(self.runs, source, destination, returning)

    def encoder_values(self, lane: int) -> Tensor:
        """(N / encoder lanes, H) fp32: the rows that one encoder lane produces."""
        share = self.rows // self.case.encoder_lanes
        return self._values(torch.arange(lane * share, (lane + 1) * share))

    def values_at(self, rank: int, places: Tensor, delivery: Delivery) -> Tensor:
        """(n, H) fp32: what `rank` must find at its local positions `places` (n,)."""
        return self._values(self._row_at(rank, delivery)[places])

    def needed_rows(self, rank: int) -> int:
        """The bound: rows that language `rank` needs before its first layer and does not hold."""
        return int((self._row_at(rank, "sharded") >= 0).sum())

    def _row_at(self, rank: int, delivery: Delivery) -> Tensor:
        """The number of the row at each local position of a language rank, -1 for text."""
        language = self.case.layout.language
        coords = language.coords(rank)
        row_at = np.full(self.tokens[coords.dp], -1)
        first = np.cumsum(self.runs.rows) - self.runs.rows
        for item in np.flatnonzero(self.runs.destination_lane == coords.dp):
            at, count = self.runs.position[item], self.runs.rows[item]
            row_at[at : at + count] = first[item] + np.arange(count)
        sliced = language.sp and delivery == "sharded"
        return torch.from_numpy(np.split(row_at, language.tp)[coords.tp] if sliced else row_at)

    def _values(self, numbers: Tensor) -> Tensor:
        columns = torch.arange(self.hidden, dtype=torch.float32) / self.hidden
        return numbers.to(torch.float32).unsqueeze(1) + columns
