"""Why a run does not get on: who waits for whom, and where that begins. Needs no ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mimo.train.observer import ACTIVITIES

_SHOWN_RANKS = 8  # in one sentence


class Hang(Exception):
    """The run does not get on; the text is how the explanation begins, the same on all ranks."""


@dataclass(frozen=True)
class State:
    """What a rank has last said of itself, ``age_seconds`` ago.

    step, activity: as observers are told. doing: what its modules do, "" if nothing.
    failure: the error that ended it. resident_bytes: of its process. memory: by module and kind,
    after its first update.

    The rest is said in a hang only, and ``told`` is whether it has been. waits, waits_for: what it
    waits for, and the ranks that have to act for it to come. place: the line that it is in.
    seconds: for how long. batch: the samples of its microbatch.
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
    told: bool = False
    waits: str = ""
    waits_for: Sequence[int] = ()
    place: str = ""
    seconds: float = 0.0
    batch: str = ""
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
        """Where it is, and whom it waits for there."""
        text, place = self.where, f" (at {self.place})" if self.place else ""
        ranks = ", ".join(map(str, self.waits_for[:_SHOWN_RANKS]))
        ranks += ", ..." if self.waits_for[_SHOWN_RANKS:] else ""
        if self.rank in self.waits_for:  # all of them have to come
            text += f", inside {self.waits}: ranks {ranks}"
        elif self.waits:
            text += f", waits for rank {ranks}: {self.waits}"
        return text + place

    @property
    def progress(self) -> tuple[int, int]:
        """Grows while a run gets on."""
        return self.step, ACTIVITIES.index(self.activity)


@dataclass(frozen=True)
class Explanation:
    """ranks: where the hang begins. text: sentences, one a line."""

    ranks: tuple[int, ...]
    text: str


def explain(states: Mapping[int, State], num_ranks: int) -> Explanation:
    """Who waits for whom in a hang, and who is its origin.

    states: what ranks have said, in this hang (``told``) or before it.

    The origin is whoever does not answer; else whoever waits for nobody, and does not get on,
    although others wait for it; else whoever has gone past what the ranks furthest behind wait for:
    it has left that out. A network that is cut looks the same where ranks wait for other hosts.
    """
    here = {rank: state for rank, state in states.items() if state.told}
    if origins := [rank for rank in range(num_ranks) if rank not in here]:
        lines = [_silent(rank, states.get(rank)) for rank in origins]
    elif origins := _awaited(here):
        alone = "waits for no other rank"
        lines = [f"{here[r]} {alone}: {here[r].story}{_since(here[r])}" for r in origins]
    else:
        least = min(state.progress for state in here.values())
        behind = [state for state in here.values() if state.progress == least]
        late = ", ".join(str(state.rank) for state in behind[:_SHOWN_RANKS])
        awaited = {rank for state in behind for rank in state.waits_for}
        origins = sorted(rank for rank in awaited if here[rank].progress > least)
        left = f"has left out what rank {late} waits for, and is already"
        lines = [f"{here[r]} {left} {here[r].story}{_since(here[r])}" for r in origins]
        lines = lines or ["none; all ranks wait for each other"]
        if any(here[r].host != one.host for one in here.values() for r in one.waits_for):
            lines[0] = f"no message gets through between {_by_host(here.values())}, or {lines[0]}"
    lines = [f"origin: {line}" for line in lines]
    alike: dict[str, list[State]] = {}
    for rank, state in here.items():
        if rank not in origins:
            alike.setdefault(state.story, []).append(state)
    lines += [f"{_named(own)}: {story}{_since(own[0])}" for story, own in alike.items()]
    lines += dict.fromkeys(state.batch for state in here.values() if state.batch)
    return Explanation(tuple(origins), "\n".join(lines))


def _awaited(here: Mapping[int, State]) -> list[int]:
    """Ranks that wait for nobody; if there are any, those for whom others wait.

    Of these only who has been in one place for long: the others still get on.
    """
    busy = [state for state in here.values() if not state.waits]
    awaited = {rank for state in here.values() for rank in state.waits_for}
    found = [state for state in busy if state.rank in awaited] or busy
    longest = max((state.seconds for state in found), default=0.0)
    return [state.rank for state in found if state.seconds >= longest / 2]


def _silent(rank: int, state: State | None) -> str:
    if state is None:
        return f"rank {rank} is not there: it has ended, or never came"
    if state.failure:
        return f"{state} failed {state.where}: {state.failure}"
    return (
        f"{state} does not answer, last seen {state.where}; stopped or killed, stuck in a library "
        f"that lets no thread run, or its host {state.host} is down"
    )


def _named(states: Sequence[State]) -> str:
    more = f" and {len(states) - _SHOWN_RANKS} more" if states[_SHOWN_RANKS:] else ""
    return ", ".join(map(str, states[:_SHOWN_RANKS])) + more


def _by_host(states: Iterable[State]) -> str:
    """Hosts with their ranks."""
    ranks: dict[str, list[str]] = {}
    for state in states:
        ranks.setdefault(state.host, []).append(str(state.rank))
    told = [f"{host} (rank {', '.join(own[:_SHOWN_RANKS])})" for host, own in ranks.items()]
    return " and ".join(told[:_SHOWN_RANKS])


def _since(state: State) -> str:
    return f", for {state.seconds:.0f} s"
