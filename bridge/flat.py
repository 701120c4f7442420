"""The output of a tower, and the checks before a bridge moves it.

A tower counts the rows of each item. They are compared with the plan, and in checked mode all
ranks' plans with each other.

Letters: N rows of one lane, H language hidden size, L feature levels beside the embeddings.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bridge.plan import BridgePlan
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


def check_rows(
    end: BridgeEnd, first_microbatch: int, plans: Sequence[BridgePlan], lane: int, rows: ItemRows
) -> None:
    """Raise UnexpectedRows unless ``rows`` are what these plans move from an encoder lane.

    plans: of the microbatches that were encoded together, from ``first_microbatch`` on. The error
    names the first item with a wrong number of rows, its microbatch and its sample.
    """
    by_plan = [plan.runs.rows_of_lane(lane) for plan in plans]
    planned, produced = [*itertools.chain(*by_plan)], [*rows.rows_per_item]
    needed, width, size = -(-sum(planned) // rows.parts), end.hidden_size, rows.values.shape
    microbatch, sample, problem = first_microbatch, None, ""
    if len(produced) != len(planned):
        problem = f"rows of {len(produced)} items {produced}, planned are {len(planned)} {planned}"
    elif produced != planned:
        wrong = next(n for n, num_rows in enumerate(planned) if num_rows != produced[n])
        which, item = 0, wrong
        while item >= len(by_plan[which]):
            item -= len(by_plan[which])
            which += 1
        runs, microbatch = plans[which].runs, microbatch + which
        sample = int(runs.sample[runs.source_lane == lane][item])
        problem = f"{produced[wrong]} rows for item {item} of {len(by_plan[which])}, counted from "
        problem += f"0, planned are {planned[wrong]}"
    elif rows.parts != plans[0].source_parts:
        problem = f"rows cut over {rows.parts} ranks, the plan needs {plans[0].source_parts}"
    elif size[1:] != (width,):
        sizes = " x ".join(map(str, size[1:]))
        problem = f"rows of size {sizes}, the language model needs {width}"
    elif size[0] != needed:
        problem = f"{size[0]} rows, but its items need {needed}"
    if problem:
        where = f"encoder {end.name}, lane {lane}, microbatch {microbatch}"
        raise UnexpectedRows(f"{where}: the tower produced {problem}", microbatch, sample=sample)


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
