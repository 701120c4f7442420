"""What a tower produces, and what of it a bridge moves.

A tower counts rows per item (`ItemRows`); a bridge moves rows of samples (`FlatEmbeddings`). Where
one becomes the other, what was produced is compared with what was planned.

Letters: N rows of one lane, H language hidden size, L feature levels beside the embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bridge.plan import BridgePlan
from bridge.runs import ItemRuns, ints, offsets, totals
from bridge.transfer import BridgeEnd
from bridge.waiting import UnexpectedRows


@dataclass(frozen=True)
class ItemRows:
    """What a tower made of its items, or one rank's part of it.

    values: (N, (1 + L)·H), rows of the items one after the other; under sequence parallelism this
    rank's part, (ceil(N / parts), (1 + L)·H), padding at the end included. rows_per_item: of all
    items of the lane, in that order, counted on what the tower computed; their sum is N. parts:
    over how many ranks the rows are cut.
    """

    values: Tensor
    rows_per_item: tuple[int, ...]
    parts: int = 1


@dataclass(frozen=True)
class FlatEmbeddings:
    """Rows of one encoder lane for one global microbatch, or for several that follow each other.

    values: (N, H), in plan order; under sequence parallelism this rank's part, (ceil(N / parts),
    H), padding at the end included. split_sizes: rows per sample of the global microbatch, zero for
    a sample without items on this lane; their sum is N. parts: over how many ranks the rows are
    cut. Raises ValueError when they disagree.
    """

    values: Tensor
    split_sizes: tuple[int, ...]
    parts: int = 1

    def __post_init__(self) -> None:
        if self.values.dim() != 2:
            raise ValueError(f"flat embeddings are (rows, hidden), got {tuple(self.values.shape)}")
        needed = -(-sum(self.split_sizes) // self.parts)
        if needed != self.values.shape[0]:
            part = f" on each of {self.parts} ranks" if self.parts > 1 else ""
            raise ValueError(
                f"an encoder produced {self.values.shape[0]} rows, but its samples need "
                f"{needed}{part} ({list(self.split_sizes)})"
            )


def split_sizes_of(
    rows_per_item: Sequence[int],
    runs: Sequence[ItemRuns],
    lane: int,
    encoder: str,
    first_microbatch: int,
) -> tuple[int, ...]:
    """Rows per item of an encoder lane -> rows per sample, zeros included.

    runs: what was planned for each of the microbatches from ``first_microbatch`` on that the lane
    encoded in one go. Raises UnexpectedRows naming encoder, microbatch, item, sample and both
    numbers of rows when the items are others than planned, or in another order.
    """
    mine = [np.flatnonzero(own.source_lane == lane) for own in runs]
    ends = np.cumsum([len(items) for items in mine])
    planned = np.concatenate([own.rows[items] for own, items in zip(runs, mine, strict=True)])
    produced = ints(rows_per_item)
    if produced.size != planned.size:
        raise UnexpectedRows(
            f"encoder {encoder}, lane {lane}, microbatch {first_microbatch}: the tower produced "
            f"rows of {produced.size} items {produced.tolist()}, planned are {planned.size} "
            f"{planned.tolist()}",
            first_microbatch,
        )
    wrong = np.flatnonzero(produced != planned)
    if wrong.size:
        which = int(np.searchsorted(ends, wrong[0], side="right"))
        item = int(wrong[0] - ends[which] + len(mine[which]))
        raise UnexpectedRows(
            f"encoder {encoder}, lane {lane}, microbatch {first_microbatch + which}: the tower "
            f"produced {produced[wrong[0]]} rows for item {item} of {len(mine[which])}, counted "
            f"from 0, planned are {planned[wrong[0]]}",
            first_microbatch + which,
            sample=int(runs[which].sample[mine[which][item]]),
        )
    starts = offsets(ints([own.num_samples for own in runs]))
    sample = np.concatenate(
        [own.sample[items] + start for own, items, start in zip(runs, mine, starts, strict=False)]
    )
    return tuple(totals(sample, produced, int(starts[-1])).tolist())


def check_rows(
    end: BridgeEnd,
    microbatches: range,
    plans: Sequence[BridgePlan],
    lane: int,
    rows: FlatEmbeddings,
) -> None:
    """Raise UnexpectedRows unless ``rows`` are what these plans move from an encoder lane."""
    several = f"s {microbatches.start} to {microbatches.stop - 1}" if len(plans) > 1 else ""
    where = f"bridge {end.name}, microbatch{several or f' {microbatches.start}'}"
    expected = [size for plan in plans for size in plan.runs.split_sizes(lane)]
    problem = ""
    if list(rows.split_sizes) != expected:
        problem = f"rows per sample {list(rows.split_sizes)}, the plan needs {expected}"
    elif rows.parts != plans[0].source_parts:
        problem = f"rows cut over {rows.parts} ranks, the plan needs {plans[0].source_parts}"
    elif rows.values.shape[1] != end.hidden_size:
        problem = f"rows of size {rows.values.shape[1]}, the language model needs {end.hidden_size}"
    if problem:
        raise UnexpectedRows(f"{where}: the encoder produced {problem}", microbatches.start)
