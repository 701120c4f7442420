"""The heartbeat of ranks: what each rank writes about itself, and what that says about a hang.

Ages are differences between file times, so the hosts' clocks do not matter.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RANKS = "ranks"
"""The folder of the ranks' files, in the run folder."""
HANG = "hang"
"""The folder with stacks and summary of a hang; once it is there, all ranks write and end."""
CRASH = ".crash"
"""An empty file in the run folder, once the first crash of a start is kept as an incident."""
ACTIVITIES = (
    *("setup", "batch", "forward and backward", "gradients", "data of a later step"),
    *("norm and loss", "update", "checkpoint", "validation"),
)
"""What a rank does in a step, in this order."""

_SHOWN_RANKS = 8  # in one sentence


@dataclass(frozen=True)
class Work:
    """What the modules of a rank do now.

    doing: such as "forward of vision, microbatch 1". batch: the samples of its microbatch. waits:
    what it waits for from other ranks. is_transfer: whether that is a transfer of a bridge, which
    has a shorter timeout than collectives. marker: another object after each progress.
    """

    doing: str = ""
    batch: str = ""
    waits: str = ""
    is_transfer: bool = False
    marker: object = None


@dataclass(frozen=True)
class RankState:
    """What a rank wrote about itself ``age_seconds`` ago.

    step, activity: its place, the latter of `ACTIVITIES`. doing, batch, waits: see `Work`. failure:
    the error that ended it. resident_bytes: of its process. seconds: without progress. in_hang:
    whether it wrote this in a hang.
    """

    rank: int
    who: str
    host: str
    step: int
    activity: str
    doing: str = ""
    failure: str = ""
    resident_bytes: int = 0
    batch: str = ""
    waits: str = ""
    seconds: float = 0.0
    in_hang: bool = False
    age_seconds: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.who})"

    @property
    def where(self) -> str:
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

    @property
    def problem(self) -> str:
        if self.failure:
            return f"{self} failed {self.where}: {self.failure}"
        return (
            f"{self} does not answer, last seen {self.where}; stopped or killed, stuck in a "
            f"library that lets no thread run, or its host {self.host} is down"
        )


def read_states(run_dir: Path, now: float) -> dict[int, RankState]:
    """Return what ranks last wrote, in their order; a rank that ended well has no file.

    now: seconds, by the file system's clock.
    """
    states = {}
    for path in (run_dir / RANKS).glob("rank_*.json"):
        # It may have just ended, or be in the middle of a write.
        with suppress(OSError, ValueError, TypeError), path.open() as file:
            age = now - os.fstat(file.fileno()).st_mtime
            state = RankState(**{**json.load(file), "age_seconds": age})
            states[state.rank] = state
    return dict(sorted(states.items()))


def summarize_hang(
    states: Mapping[int, RankState], num_ranks: int
) -> tuple[tuple[int, ...], list[str]]:
    """Return the ranks where a hang probably begins, and lines about all ranks.

    These are the ranks that did not write in this hang. If all did, they are chosen among those
    that wait for no other rank and have stood still for long: the ones furthest behind.
    """
    present = {rank: state for rank, state in states.items() if state.in_hang}
    origins = [rank for rank in range(num_ranks) if rank not in present]
    lines = [
        f"origin: {states[rank].problem}"
        if rank in states
        else f"origin: rank {rank} is not there: it has ended, or never came"
        for rank in origins
    ]
    if not origins:
        busy = [state for state in present.values() if not state.waits]
        longest = max((state.seconds for state in busy), default=0.0)
        busy = [state for state in busy if state.seconds >= longest / 2]
        least = min((state.progress for state in busy), default=None)
        furthest = [state for state in busy if state.progress == least]
        origins = [state.rank for state in furthest]
        lines = [
            f"origin: {state} is furthest behind: {state.where}, for {state.seconds:.0f} s"
            for state in furthest
        ] or ["origin: none; all ranks wait for each other"]
    ranks_of = dict[str, list[int]]()
    for rank, state in present.items():
        ranks_of.setdefault(state.host, []).append(rank)
    if len(present) == num_ranks and len(ranks_of) > 1:
        hosts = [f"{host} (rank {_shorten(ranks)})" for host, ranks in ranks_of.items()]
        lines[0] += f"; or no message gets through between {' and '.join(hosts[:_SHOWN_RANKS])}"
    alike = dict[str, list[RankState]]()
    for rank, state in present.items():
        if rank not in origins:
            alike.setdefault(state.story, []).append(state)
    lines += [f"{_shorten(g)}: {story}, for {g[0].seconds:.0f} s" for story, g in alike.items()]
    lines += dict.fromkeys(state.batch for state in present.values() if state.batch)
    return tuple(origins), lines


def _shorten(items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN_RANKS} more" if items[_SHOWN_RANKS:] else ""
    return ", ".join(map(str, items[:_SHOWN_RANKS])) + more
