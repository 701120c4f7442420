"""The output of a tower, and the checks before a bridge moves it.

A tower counts rows per item (`ItemRows`); a bridge moves rows of samples (`FlatEmbeddings`). The
rows that a tower produced are compared with the plan, and in checked mode all ranks' plans with
each other.

Letters: N rows of one lane, H language hidden size, L feature levels beside the embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import BridgePlan
from bridge.runs import ItemRuns, ints, offsets, totals
from bridge.transfer import BridgeEnd
from bridge.waiting import BridgeError, UnexpectedRows


@dataclass(frozen=True)
class ItemRows:
    """The rows that a tower made of its items, or one rank's part of them.

    values: (N, (1 + L)·H), item after item; under sequence parallelism this rank's part,
    (ceil(N / parts), (1 + L)·H), padded at the end. rows_per_item: of all items of the lane, as the
    tower computed them; their sum is N. parts: the number of ranks that the rows are cut over.
    """

    values: Tensor
    rows_per_item: tuple[int, ...]
    parts: int = 1


@dataclass(frozen=True)
class FlatEmbeddings:
    """Rows of one encoder lane for one global microbatch, or for several that follow each other.

    values: (N, H), in plan order; under sequence parallelism this rank's part, (ceil(N / parts),
    H), padded at the end. split_sizes: rows per sample of the global microbatch, zero for a sample
    without items on this lane; their sum is N. parts: the number of ranks that the rows are cut
    over. Raises ValueError when they disagree.
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

    runs: the planned items of the microbatches from ``first_microbatch`` on that were encoded
    together. Raises UnexpectedRows naming encoder, microbatch, item, sample and both numbers of
    rows if the items are not those planned, in their order.
    """
    mine = [np.flatnonzero(planned.source_lane == lane) for planned in runs]
    ends = np.cumsum([len(items) for items in mine])
    planned = np.concatenate([runs[m].rows[items] for m, items in enumerate(mine)])
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
    starts = offsets(ints([microbatch.num_samples for microbatch in runs]))
    sample = np.concatenate([runs[m].sample[items] + starts[m] for m, items in enumerate(mine)])
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


# ---------------------------------------------------------------------------- checked mode

SampleKeys = Callable[[int], Sequence[str]]
"""microbatch -> the keys of its samples, as this rank reads them."""


def check_plans(
    end: BridgeEnd, plans: Sequence[BridgePlan], sample_keys: SampleKeys | None = None
) -> None:
    """Compare all ranks' plans and samples; every rank of the bridge calls it.

    sample_keys: on all ranks or on none. Raises BridgeError naming the ranks and the first
    microbatch that differ: rows would be mispaired silently.
    """
    fingerprints = [
        (plan.digest, _fingerprint(sample_keys(m)) if sample_keys else 0)
        for m, plan in enumerate(plans)
    ]
    mine = torch.tensor(fingerprints, dtype=torch.int64, device=end.device).view(-1, 2)
    ranks = dist.get_process_group_ranks(end.forward)
    everyone = mine.new_empty(len(ranks) * mine.numel())
    try:
        dist.all_gather_into_tensor(everyone, mine.view(-1), group=end.forward)
        table = everyone.view(len(ranks), -1, 2).cpu()
    except RuntimeError as error:
        raise BridgeError(
            f"bridge {end.name}: not all of ranks {ranks} compared their plans: {error}"
        ) from error
    for microbatch in range(table.shape[1]):
        for column, what in enumerate(("transfers", "samples")):
            parties: dict[int, list[int]] = {}
            for rank, value in zip(ranks, table[:, microbatch, column].tolist(), strict=True):
                parties.setdefault(value, []).append(rank)
            if len(parties) > 1:
                names = " and ".join(f"ranks {party}" for party in parties.values())
                raise BridgeError(
                    f"bridge {end.name}, microbatch {microbatch}: {names} planned different "
                    f"{what}; they read different data indexes or recipes",
                    microbatch,
                )


def _fingerprint(keys: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256(repr(list(keys)).encode()).digest()[:8], "big") >> 1
