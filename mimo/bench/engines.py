"""`mimo bench engines`: one model on two ranks by both engines, and by transformers under FSDP2.

Every rank of every contestant is a process of its own; all but those of one contestant sleep.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from mimo.bench.contest import Apart, Contest, Run, apart, take_turns, timed
from mimo.bench.report import Bound, Report
from mimo.bench.train import COLUMNS, QUICK, same_work
from mimo.bench.train_theirs import Collator, TransformersSteps, batches_of_ranks
from mimo.bench.train_workload import Sizes, Workload
from mimo.config.schema import Recipe
from mimo.device import initialize_distributed, set_threads
from mimo.errors import InputError

RANKS = 2
ENGINES = ("megatron", "fsdp")
RIVAL = "transformers + FSDP2, padded"
_TOGETHER = 8  # samples of a microbatch of a lane; of the rival, of a padded batch
_TIMEOUT_SECONDS = 1800.0


def recipe_of(workload: Workload, contestant: str, steps: int) -> Recipe:
    """What an engine trains; the rival takes its optimizer from megatron's."""
    engine = contestant if contestant in ENGINES else ENGINES[0]
    batch = min(_TOGETHER, workload.sizes.samples // RANKS)
    overrides = [
        f"language.engine={engine}",
        f"encoders.vision.engine={engine}",
        f"language.grid.dp={RANKS}",
        f"train.micro_batch_size={batch}",
    ]
    return workload.recipe("long-tailed", steps, 1.0, 1, overrides)


def rank_side(workload: Workload, contestant: str, recipe: Recipe, rank: int) -> Callable[[], Run]:
    """For a process of its own: be a rank of a contestant; a function that does a step."""
    from transformers.utils import logging

    from mimo.bench.train_ours import OurSteps

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    set_threads(1, RANKS)
    store = workload.directory / f"store of {contestant}"
    initialize_distributed(rank, RANKS, f"file://{store}", _TIMEOUT_SECONDS)
    if contestant in ENGINES:
        steps: Any = OurSteps(recipe)
    else:
        logging.disable_progress_bar()
        collator = Collator(workload.checkpoint, workload.shard("long-tailed"))
        num_samples, batch = len(collator.lengths), recipe.train.micro_batch_size
        batches = batches_of_ranks(num_samples, RANKS, batch)
        steps = TransformersSteps(workload.checkpoint, collator, batches, recipe.train)
    return partial(timed, steps.step, until_idle=True)


def together(ranks: Sequence[Callable[[], Run]]) -> Run:
    """A step of all ranks: the time of the last, memory of the largest, what the first found."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        runs = [future.result() for future in [pool.submit(rank) for rank in ranks]]
    return Run(
        max(run.seconds for run in runs),
        sum(run.processor_seconds for run in runs),
        max(run.peak_bytes for run in runs),
        runs[0].found,
    )


def judge(runs: Mapping[str, Sequence[Run]]) -> list[Bound]:
    """Whether all did the same work. No speed is promised."""
    others = [name for name in runs if name != ENGINES[0]]
    return [bound for name in others for bound in same_work(name, runs[name], runs[ENGINES[0]])]


def main(samples: int, rounds: int, quick: bool, json_path: Path | None, picture: Path) -> int:
    """Write the samples, let all train in turns; 1 when they did not do the same work.

    Raises InputError for samples that do not fill the batches.
    """
    if samples % (RANKS * _TOGETHER):
        raise InputError(f"--samples {samples}: give a multiple of {RANKS * _TOGETHER}")
    sizes, rounds = (QUICK, 1) if quick else (Sizes(samples=samples), rounds)
    names = (*ENGINES, RIVAL)
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory, ExitStack() as stack:
        workload = Workload(Path(directory), sizes)
        apart(workload.write)
        turns = {}
        for name in names:
            # Enough steps that the last timed one still reads ahead.
            recipe = apart(partial(recipe_of, workload, name, rounds + 5))
            sides = [partial(rank_side, workload, name, recipe, rank) for rank in range(RANKS)]
            turns[name] = partial(together, [stack.enter_context(Apart(side)) for side in sides])
        runs = take_turns(turns, 1 + rounds, tell=True)
    report = Report(
        title=f"Qwen3-VL, {sizes.num_layers} layers, hidden size {128 * sizes.width}, fp32, "
        f"{RANKS} data-parallel ranks of one thread",
        notes=[
            f"Samples: {sizes}.",
            "A step is data, forward, backward, clipping and AdamW, of the same samples. "
            f"{rounds} rounds after one that is not timed; in every round each runs once, in "
            "another order. Tokens are real ones, without padding.",
            "Ours pack; a batch of ours is a sequence on each rank. The rival pads batches of "
            f"{_TOGETHER} samples, takes attention (sdpa) and loss from transformers, and shards "
            "each layer and the whole model.",
            "Memory is the peak of the larger rank: its process and all below it, during a step.",
        ],
        contests=[Contest(f"{RANKS} ranks", {name: runs[name][1:] for name in names})],
        columns=COLUMNS,
        bounds=judge(runs),
        others={"losses": {name: [run.found["loss"] for run in runs[name]] for name in names}},
        software=("torch", "megatron-core", "transformers"),
    )
    return report.conclude(picture, json_path, judge_speed=not quick)
