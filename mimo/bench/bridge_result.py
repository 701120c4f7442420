"""What a comparison on real ranks gives; known to the launcher too, which needs no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rival = Literal["megatron", "replicated", "messages"]
"""Megatron's bridge, ours with replicated delivery, or the messages of ours and nothing else."""


@dataclass(frozen=True)
class Traffic:
    """Bytes received by each rank of one module, in order of rank, and all of them."""

    ours: list[int]
    theirs: list[int]
    bound: list[int]


@dataclass(frozen=True)
class Contest:
    """What one layout and size gave. Milliseconds, one value per pair of runs."""

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
