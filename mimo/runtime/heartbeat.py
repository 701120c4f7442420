"""The heartbeat of ranks: what each rank writes of itself, and what that says of a hang.

Ages are differences between file times, so the hosts' clocks do not matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

RANKS = "ranks"
"""The folder of the ranks' files, in the run folder."""
HANG = "hang"
"""The folder with stacks and summary of a hang; once it is there, all ranks write and end."""
SUMMARY = "summary.txt"
CRASH = ".crash"
"""An empty file in the run folder, once the first crash of a start is kept as an incident."""

ACTIVITIES = (
    "setup",
    "batch",
    "forward and backward",
    "gradients",
    "data of a later step",
    "norm and loss",
    "update",
    "checkpoint",
    "validation",
)
"""What a rank does in a step, in this order."""

_SHOWN_RANKS = 8  # in one sentence


@dataclass(frozen=True)
class Work:
    """What the modules of a rank do now.

    doing: such as "forward of vision, microbatch 1"; "" if nothing. batch: the samples of its
    microbatch. waits: what it waits for from other ranks, "" if nothing. is_transfer: that is a
    transfer of a bridge, which has a shorter timeout than collectives. marker: another object
    whenever the modules have made progress.
    """

    doing: str = ""
    batch: str = ""
    waits: str = ""
    is_transfer: bool = False
    marker: object = None


@dataclass(frozen=True)
class RankState:
    """What a rank has last written of itself, ``age_seconds`` ago.

    step, activity: the place in a step, of `ACTIVITIES`. doing, batch, waits: see `Work`. failure:
    the error that ended it. resident_bytes: of its process. memory: bytes by module and kind, after
    its first update. seconds: for how long it has made no progress; in_hang: whether it has written
    this in a hang.
    """

    rank: int
    who: str
    host: str
    step: int
    activity: str
    doing: str = ""
    failure: str = ""
    resident_bytes: int = 0
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    batch: str = ""
    waits: str = ""
    seconds: float = 0.0
    in_hang: bool = False
    age_seconds: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.who})"

    @property
    def where(self) -> str:
        """The place in a step."""
        doing = f": {self.doing}" if self.doing else ""
        return f"at step {self.step}, in '{self.activity}'{doing}"

    @property
    def story(self) -> str:
        """The place in a step, and what it waits for there."""
        return f"{self.where}, waits for {self.waits}" if self.waits else self.where

    @property
    def progress(self) -> tuple[int, int]:
        """A pair that grows while a run makes progress."""
        return self.step, ACTIVITIES.index(self.activity)


def read_states(
    run_dir: Path, now: float, ranks: Iterable[int] | None = None
) -> dict[int, RankState]:
    """Return what ranks last wrote, by rank; a rank that ended well has no file.

    now: seconds, by the file system's clock. ranks: those to read; None for all with a file.
    """
    folder = run_dir / RANKS
    if ranks is None:
        names = (path.stem.removeprefix("rank_") for path in folder.glob("rank_*.json"))
        ranks = sorted(int(name) for name in names if name.isdecimal())
    states = {}
    for rank in ranks:
        # It may have just ended, or be in the middle of a write.
        with (
            suppress(OSError, ValueError, TypeError),
            (folder / f"rank_{rank}.json").open() as file,
        ):
            age = now - os.fstat(file.fileno()).st_mtime
            states[rank] = RankState(**{**json.load(file), "age_seconds": age})
    return states


def summarize_hang(
    states: Mapping[int, RankState], num_ranks: int
) -> tuple[tuple[int, ...], list[str]]:
    """Return the ranks where a hang probably begins, and lines about all ranks.

    These are the ranks that did not write in this hang, else those that wait for no other rank and
    are furthest behind of all that have stood still for long, else none.
    """
    present = {rank: state for rank, state in states.items() if state.in_hang}
    origins = [rank for rank in range(num_ranks) if rank not in present]
    lines = [f"origin: {_describe_silent(rank, states.get(rank))}" for rank in origins]
    if not origins:
        busy = [state for state in present.values() if not state.waits]
        longest = max((state.seconds for state in busy), default=0.0)
        busy = [state for state in busy if state.seconds >= longest / 2]
        least = min((state.progress for state in busy), default=None)
        origins = [state.rank for state in busy if state.progress == least]
        lines = [
            f"origin: {present[rank]} is furthest behind: {present[rank].where}, for "
            f"{present[rank].seconds:.0f} s"
            for rank in origins
        ] or ["origin: none; all ranks wait for each other"]
    if len(present) == num_ranks and len({state.host for state in present.values()}) > 1:
        lines[0] += f"; or no message gets through between {_ranks_by_host(present.values())}"
    alike: dict[str, list[RankState]] = {}
    for rank, state in present.items():
        if rank not in origins:
            alike.setdefault(state.story, []).append(state)
    for story, group in alike.items():
        lines.append(f"{_names(group)}: {story}, for {group[0].seconds:.0f} s")
    lines += dict.fromkeys(state.batch for state in present.values() if state.batch)
    return tuple(origins), lines


def _describe_silent(rank: int, state: RankState | None) -> str:
    if state is None:
        return f"rank {rank} is not there: it has ended, or never came"
    if state.failure:
        return f"{state} failed {state.where}: {state.failure}"
    return (
        f"{state} does not answer, last seen {state.where}; stopped or killed, stuck in a library "
        f"that lets no thread run, or its host {state.host} is down"
    )


def _names(states: Sequence[RankState]) -> str:
    more = f" and {len(states) - _SHOWN_RANKS} more" if states[_SHOWN_RANKS:] else ""
    return ", ".join(map(str, states[:_SHOWN_RANKS])) + more


def _ranks_by_host(states: Iterable[RankState]) -> str:
    ranks: dict[str, list[str]] = {}
    for state in states:
        ranks.setdefault(state.host, []).append(str(state.rank))
    hosts = [f"{host} (rank {', '.join(some[:_SHOWN_RANKS])})" for host, some in ranks.items()]
    return " and ".join(hosts[:_SHOWN_RANKS])


def describe_lost(lost: Sequence[RankState]) -> str:
    """Return a sentence about ranks that are silent."""
    text = "; ".join(f"{state} does not answer, last seen {state.where}" for state in lost)
    return f"{text}; stopped or killed, or its host is down"
