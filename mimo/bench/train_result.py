"""What `mimo bench train` measures; needs no engine, as the launcher uses it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Contestant = Literal["packed", "padded", "sorted", "packed equal", "batched equal"]
"""Ours: `packed`, `packed equal`. Of transformers: `padded`, batches of 8 in the samples' order;
`sorted`, by length into batches of at most a microbatch's tokens, padding included; `batched
equal`, all samples, which are equally long, in one batch as in one of our microbatches."""

OURS: tuple[Contestant, ...] = ("packed", "packed equal")
THEIRS: tuple[Contestant, ...] = ("padded", "sorted", "batched equal")
PADDED_BATCH = 8


@dataclass(frozen=True)
class Steps:
    """The timed steps of one contestant. All steps train on the same samples.

    tokens: real ones of a step. computed: with padding. batches: forward passes of a step.
    losses: per loss token, of each step, warm-up included. seconds: without warm-up.
    processor_seconds: of all threads together; what other load changes least.
    """

    contestant: Contestant
    tokens: int
    computed: int
    batches: int
    losses: Sequence[float]
    seconds: Sequence[float]
    processor_seconds: Sequence[float]

    @property
    def tokens_per_second(self) -> list[float]:
        """Real tokens, step by step."""
        return [self.tokens / one for one in self.seconds]


@dataclass(frozen=True)
class Overhead:
    """Where the time of one more step of ours went.

    seconds: of the step under the profiler. sections: seconds by what the loop was doing, of the
    timed steps, medians. operators: share of the time inside PyTorch's operators. calls: number of
    operator calls. slowest: (name, share of the time, calls) of the ten that took longest.
    """

    seconds: float
    sections: dict[str, float]
    operators: float
    calls: int
    slowest: list[tuple[str, float, int]]


def order_of_turns(rounds: int) -> list[Contestant]:
    """Who runs when: every contestant once a round, each round beginning with another."""
    names: list[Contestant] = [*OURS, *THEIRS]
    turns: list[Contestant] = []
    for number in range(rounds):
        first = number % len(names)
        turns += names[first:] + names[:first]
    return turns
