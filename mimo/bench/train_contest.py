"""Two processes on the same cores that train in turns: what each of them executes.

One is a rank of ours, the other trains with transformers. They are separate because the engine
changes what PyTorch's calls do on a machine without a GPU, for the whole process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import FileStore, HashStore, Store

from mimo.bench.train_result import OURS, THEIRS, Contestant, Steps, order_of_turns
from mimo.bench.train_workload import Lengths, Workload
from mimo.device import initialize_distributed, set_threads
from mimo.launch.ranks import rank_environment

NUM_PROCESSES = 2
_PATIENCE = timedelta(minutes=30)  # of a process for the others' turns
_IDLE_SECONDS = 0.02  # a process that uses the processor less than a tenth of this time is idle


# Losses, seconds, and processor seconds.
_Took = tuple[list[float], list[float], list[float]]


class Trains(Protocol):
    """One contestant."""

    def step(self) -> float:
        """One whole training step; returns the loss per loss token."""
        ...


def in_turns(found: Path, workload: Workload, rounds: int, threads: int) -> None:
    """Be one of the two processes; writes `ours.json` or `theirs.json` into ``found``.

    rounds: timed ones; one more comes first. threads: of each process.
    """
    environment = rank_environment()
    assert environment is not None, "runs inside a launched job"
    turns = FileStore(str(found / "turns"), NUM_PROCESSES)
    turns.set_timeout(_PATIENCE)
    set_threads(threads, 1)
    if environment.rank == 0:
        initialize_distributed(0, 1, HashStore(), _PATIENCE.total_seconds())
        results = _ours(turns, workload, rounds, threads)
        (found / "ours.json").write_text(json.dumps(results))
    else:
        results = _theirs(turns, workload, rounds, threads)
        (found / "theirs.json").write_text(json.dumps(results))
    turns.set(f"finished {environment.rank}", "1")
    turns.wait([f"finished {rank}" for rank in range(NUM_PROCESSES)])


def _lengths_of(contestant: Contestant) -> Lengths:
    return "equal" if contestant.endswith("equal") else "long-tailed"


def _ours(turns: Store, workload: Workload, rounds: int, threads: int) -> dict:
    from mimo.bench.train_ours import OurSteps

    turns.wait(["mean tokens"])
    mean_tokens = json.loads(turns.get("mean tokens"))
    contestants = {}
    for name in OURS:
        lengths = _lengths_of(name)
        # Enough that the last timed step still reads ahead.
        recipe = workload.recipe(lengths, rounds + 5, mean_tokens[lengths], threads)
        contestants[name] = OurSteps(recipe)
    took = _take_turns(turns, contestants, rounds)
    steps = []
    for name, one in contestants.items():
        counted = one.sections
        steps.append(
            asdict(Steps(name, counted.tokens, counted.computed, counted.batches, *took[name]))
        )
    return {"steps": steps, "overhead": asdict(contestants["packed"].profile())}


def _theirs(turns: Store, workload: Workload, rounds: int, threads: int) -> dict:
    from mimo.bench.train_theirs import Collator, TransformersSteps, batches_of

    collators = {
        lengths: Collator(workload.checkpoint, workload.shard(lengths))
        for lengths in ("long-tailed", "equal")
    }
    mean_tokens = {
        lengths: sum(one.lengths) / len(one.lengths) for lengths, one in collators.items()
    }
    turns.set("mean tokens", json.dumps(mean_tokens))
    train = workload.recipe("equal", rounds, mean_tokens["equal"], threads).train
    assert train.clip_grad_norm is not None, "the recipe clips"
    contestants = {}
    for name in THEIRS:
        collator = collators[_lengths_of(name)]
        contestants[name] = TransformersSteps(
            workload.checkpoint,
            collator,
            batches_of(name, collator.lengths, workload.sizes.tokens),
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            betas=(train.adam_beta1, train.adam_beta2),
            clip=train.clip_grad_norm,
        )
    took = _take_turns(turns, contestants, rounds)
    steps = [
        asdict(
            Steps(
                name,
                sum(one.collator.lengths),
                one.computed_tokens,
                len(one.batches),
                *took[name],
            )
        )
        for name, one in contestants.items()
    ]
    return {"steps": steps}


def _take_turns(
    turns: Store, contestants: Mapping[Contestant, Trains], rounds: int
) -> dict[Contestant, _Took]:
    """Losses of all steps, and times of those after the first, of this process's contestants.

    Both processes go through the same order; one waits, without using the processor, while the
    other trains.
    """
    order: Sequence[Contestant] = order_of_turns(1 + rounds)
    took: dict[Contestant, _Took] = {name: ([], [], []) for name in contestants}
    for number, name in enumerate(order):
        if name not in contestants:
            continue
        if number > 0:
            turns.wait([f"turn {number - 1}"])
        losses, seconds, processor_seconds = took[name]
        started, used = time.perf_counter(), time.process_time()
        losses.append(contestants[name].step())
        ended = _idle_since()
        if len(losses) > 1:
            seconds.append(ended - started)
            processor_seconds.append(time.process_time() - used)
        print(f"[{number + 1}/{len(order)}] {name}: {ended - started:.1f} s", flush=True)
        turns.set(f"turn {number}", "1")
    return took


def _idle_since() -> float:
    """Wait until no thread of this process computes: reading ahead is part of a step."""
    while True:
        now, used = time.perf_counter(), time.process_time()
        time.sleep(_IDLE_SECONDS)
        if time.process_time() - used < _IDLE_SECONDS / 10:
            return now
