"""`mimo bench train`: whole training steps of ours and of transformers on the same samples."""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

from mimo.bench.outcome import RanksFailed, conclude, machine, open_console
from mimo.bench.train_picture import draw_training
from mimo.bench.train_report import TrainReport, judge, notes, print_report
from mimo.bench.train_result import Overhead, Steps
from mimo.bench.train_workload import Sizes, Workload
from mimo.launch.ranks import launch, warm_up

PRELOAD = (
    "mimo.engines.megatron.preload",
    "mimo.bench.train_contest",
    "mimo.train.rank",
    "transformers",
)
QUICK = Sizes(width=1, num_layers=4, samples=8, tokens=256, median_words=12)


def measure(sizes: Sizes, rounds: int, threads: int) -> TrainReport:
    """Write the samples, let both sides train in turns, and judge. Raises RanksFailed."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar of one file says nothing
    warm_up(PRELOAD)  # the engine loads while the samples are written
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        found = Path(directory)
        workload = Workload(found, sizes)
        workload.write()
        code = launch(
            "mimo.bench.train_contest:in_turns", (found, workload, rounds, threads), 2, PRELOAD
        )
        if code != 0:
            raise RanksFailed(code)
        ours = json.loads((found / "ours.json").read_text())
        theirs = json.loads((found / "theirs.json").read_text())
    steps = [Steps(**one) for one in (*ours["steps"], *theirs["steps"])]
    return TrainReport(
        machine=machine(),
        threads=threads,
        model=f"Qwen3-VL, {sizes.num_layers} layers, hidden size {128 * sizes.width}, fp32",
        samples=str(sizes),
        notes=notes(rounds, sizes.tokens),
        steps=steps,
        overhead=Overhead(**ours["overhead"]),
        bounds=judge(steps),
    )


def main(
    samples: int,
    rounds: int,
    threads: int | None,
    quick: bool,
    json_path: Path | None,
    picture: Path,
) -> int:
    """Measure, print, draw and judge; returns 1 when a bound is missed. Quick runs judge nothing.

    threads: of each side; None for all cores.
    """
    sizes = QUICK if quick else Sizes(samples=samples)
    try:
        report = measure(sizes, 1 if quick else rounds, threads or len(os.sched_getaffinity(0)))
    except RanksFailed as failed:
        return failed.exit_code
    print_report(report, open_console())
    # The speed of tiny models says nothing; that both sides did the same work does.
    judged = [bound for bound in report.bounds if bound.at_most or not quick]
    return conclude(judged, partial(draw_training, report), picture, report.to_json(), json_path)
