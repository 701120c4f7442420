"""Checked mode: whether all ranks of a bridge planned the same transfers for the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bridge.plan import BridgePlan
from bridge.transfer import BridgeEnd
from bridge.waiting import BridgeError

SampleKeys = Callable[[int], Sequence[str]]
"""microbatch -> the keys of its samples, as this rank reads them."""


def check_plans(
    end: BridgeEnd, plans: Sequence[BridgePlan], sample_keys: SampleKeys | None = None
) -> None:
    """Compare all ranks' plans, and the samples they are for; every rank of the bridge calls it.

    sample_keys: given on all ranks or on none. Raises BridgeError naming the ranks and the first
    microbatch that differ: rows would be mispaired silently.
    """
    prints = [
        (plan.digest, _fingerprint(sample_keys(m)) if sample_keys else 0)
        for m, plan in enumerate(plans)
    ]
    mine = torch.tensor(prints, dtype=torch.int64, device=end.device).view(-1, 2)
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
