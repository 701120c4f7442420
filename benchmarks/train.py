"""Compare whole training steps of ours and of transformers on the same samples.

Each side is a process of its own, because the engine changes what PyTorch's calls do on a machine
without a GPU, for the whole process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import (
    Bound,
    Contest,
    Figures,
    Quick,
    Report,
    Run,
    Worker,
    command,
    in_subprocess,
    take_turns,
)
from benchmarks.train_theirs import PADDED_BATCH, their_side
from benchmarks.train_workload import OURS, THEIRS, Lengths, Sizes, Workload

QUICK = Sizes(width=1, num_layers=4, samples=8, tokens=256, median_words=12)
# Contestants that are compared: ours, theirs, and the least times faster that is promised.
_PAIRS = (
    ("packed", "padded", 2.0),
    ("packed", "sorted", None),
    ("packed equal", "batched equal", 1.15),
)
_LOSS_ERROR = 1e-4  # relative; fp32 on both sides, in another order of sums


def judge(runs: Mapping[str, Sequence[Run]]) -> list[Bound]:
    """Every promise, kept or not: that it was the same work, and how much faster.

    runs: the first of each contestant is not timed. They find the loss, and the real tokens.
    """
    found = []
    for ours, theirs, least in _PAIRS:
        found += same_work(f"{ours}, {theirs}", runs[ours], runs[theirs])
        if least is not None:
            ratio = _contest("", (ours, theirs), runs).ratio(theirs)
            found.append(Bound(f"{ours} against {theirs}, times faster", ratio, least, False))
    return found


def same_work(who: str, runs: Sequence[Run], others: Sequence[Run]) -> list[Bound]:
    """That two contestants had the same losses and the same real tokens in every round."""
    pairs = [(a.result, b.result) for a, b in zip(runs, others, strict=True)]
    error = max(abs(a["loss"] - b["loss"]) / max(abs(b["loss"]), 1e-12) for a, b in pairs)
    difference = max(abs(a["tokens"] - b["tokens"]) for a, b in pairs)
    return [
        Bound(f"{who}: relative difference of losses", error, _LOSS_ERROR, True),
        Bound(f"{who}: difference of real tokens", difference, 0, True),
    ]


def found_by(contest: Contest, contestant: str, what: str) -> float:
    """What the first run of a contestant found."""
    return contest.runs[contestant][0].result[what]


COLUMNS: dict[str, Callable[[Contest, str], str]] = {
    "tokens/s": lambda one, name: f"{found_by(one, name, 'tokens') / one.median(name):.0f}",
    "s / step": lambda one, name: f"{one.median(name):.2f}",
    "real tokens": lambda one, name: str(found_by(one, name, "tokens")),
    "computed": lambda one, name: str(found_by(one, name, "computed")),
    "batches": lambda one, name: str(found_by(one, name, "batches")),
}


def _data_wait(contest: Contest, contestant: str) -> str:
    if contestant != contest.ours:
        return ""
    return f"{1e3 * found_by(contest, contestant, 'data_wait_seconds'):.1f}"


def _contest(name: str, contestants: Sequence[str], runs: Mapping[str, Sequence[Run]]) -> Contest:
    return Contest(name, {one: runs[one][1:] for one in contestants})


def _our_side(*given: Any) -> Callable[[str], Any]:
    """Load the engine here alone: where it initialises a GPU, no process could be forked then."""
    from benchmarks.train_ours import our_side

    return our_side(*given)


def main(
    samples: Annotated[int, typer.Option(min=8, help="Samples of a step.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each contestant.")] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    quick: Quick = False,
    json_path: Figures = None,
    picture: Path = Path("runs/bench_train.png"),
) -> int:
    """Write the samples, let both sides train in turns, and judge; 1 when a bound is missed.

    threads: of each side; None for all cores. Quick runs judge no speed, which says nothing of
    tiny models; that both sides did the same work does.
    """
    sizes, rounds = (QUICK, 1) if quick else (Sizes(samples=samples), rounds)
    threads = threads or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        workload = Workload(Path(directory), sizes)
        in_subprocess(workload.write)
        with Worker(partial(their_side, workload, threads)) as theirs:
            mean_tokens: dict[Lengths, float] = theirs("mean tokens")
            # Enough steps that the last timed one still reads ahead.
            make = partial(_our_side, workload, rounds + 5, threads, mean_tokens)
            with Worker(make) as ours:
                sides = dict.fromkeys(OURS, ours) | dict.fromkeys(THEIRS, theirs)
                turns = {name: partial(side, name) for name, side in sides.items()}
                runs = take_turns(turns, 1 + rounds, tell=True)
    by_lengths = {
        "long-tailed": ("packed", "padded", "sorted"),
        "equal": ("packed equal", "batched equal"),
    }
    report = Report(
        title=f"Training steps of Qwen3-VL, {sizes.num_layers} layers, hidden size "
        f"{128 * sizes.width}, fp32, {threads} threads",
        notes=[
            f"Samples: {sizes}.",
            "A step is data, forward, backward and update; all steps of a contestant train on the "
            f"same samples. {rounds} rounds after one that is not timed; in every round each runs "
            "once, in another order. Ratios are medians over rounds.",
            "Ours and theirs are two processes on the same cores; one sleeps while the other "
            "trains. What a side prepares for its next step counts in the step that it is "
            "prepared in.",
            f"padded: batches of {PADDED_BATCH} in the samples' order. sorted: by length over all "
            f"samples of the step, as many in a batch as have {sizes.tokens} tokens with their "
            "padding. transformers can pack only with kernels that need a GPU.",
            "transformers prepares images by pillow, as ours does, and updates by fused AdamW.",
        ],
        contests=[_contest(name, own, runs) for name, own in by_lengths.items()],
        columns=COLUMNS | {"data wait, ms": _data_wait},
        bounds=judge(runs),
        others={
            "losses": {name: [run.result["loss"] for run in own] for name, own in runs.items()},
        },
    )
    return report.conclude(picture, json_path, judge_speed=not quick)


if __name__ == "__main__":
    command(main)()
