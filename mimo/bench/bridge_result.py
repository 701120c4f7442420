"""The result of a comparison on real ranks; needs no engine, as the launcher uses it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rival = Literal["megatron", "replicated", "messages"]
"""Megatron's bridge, ours with replicated delivery, or nothing but the messages of ours."""


@dataclass(frozen=True)
class Traffic:
    """Bytes received by each rank of one module, in the order of ranks, and in total."""

    ours: list[int]
    theirs: list[int]
    bound: list[int]


@dataclass(frozen=True)
class Contest:
    """The result for one layout and size. Times are in milliseconds, one per pair of runs."""

    case: str
    rival: Rival
    rows: int
    hidden: int
    num_ranks: int
    language_tp: int
    sp: bool
    forward_ours_ms: list[float]
    forward_theirs_ms: list[float]
    both_ours_ms: list[float]
    both_theirs_ms: list[float]
    rows_received: Traffic
    gradients_received: Traffic
