"""Compare our input path with other loaders on the same photos."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.data_ours import our_batches
from benchmarks.data_theirs import ENERGON, INSTALL, RIVALS, is_installed, prepare_energon
from benchmarks.data_workload import BATCH, Batch, Workload
from benchmarks.harness import (
    Bound,
    Contest,
    Figures,
    Quick,
    Report,
    Run,
    command,
    in_subprocess,
    take_turns,
    timed,
)
from data.modalities.images import ImageProcessor

_PHOTO, _LARGE = (1024, 768), (4000, 3000)
_TINY, _TINIER = (200, 150), (90, 120)
_GOALS = {"webdataset": 1.5, "energon": 1.2}  # how many times our CPU seconds theirs are
_NOTES = (
    "A pass reads, decodes, prepares, tokenizes and packs all samples, up to what is given to the "
    "device. It runs in a process of its own, after one that is not timed; loaders take turns. "
    "Figures are medians; CPU time is of all processes of a loader.",
    f"Batches of {BATCH} samples, one thread in each process; nothing is done with a batch. With 0 "
    "workers, ours decodes in a thread beside the one that packs.",
    "Ours gives the device bytes, once for both frames of a patch, and positions; theirs fp32 "
    "values of both frames.",
)

Loader = Callable[[Workload, int], Iterator[Batch]]
"""Batches without end, of a workload with so many workers; 0 for a single process."""


def one_pass(loader: Loader, workload: Workload, num_workers: int) -> Run:
    """A timed pass after one that is not, so that queues are in steady state; in a process of it.

    Finds the keys of all samples, and the bytes handed over for the device.
    """
    batches = _batches(loader, workload, num_workers)
    for _ in islice(batches, workload.num_batches):
        pass

    def run() -> dict[str, int]:
        keys, num_bytes = set[str](), 0
        for batch in islice(batches, workload.num_batches):
            keys.update(batch.keys)
            num_bytes += batch.num_bytes
        return {"samples": len(keys), "bytes": num_bytes}

    return timed(run)


def difference(loader: Loader, workload: Workload) -> tuple[float, int]:
    """Largest difference of a pixel's value to ours, and samples with other tokens.

    For a process of its own.
    """
    wire, ours = ImageProcessor().wire, {}
    for batch in islice(_batches(our_batches, workload, 0), workload.num_batches):
        ours |= {key: (ids, pixels) for key, ids, pixels in batch.samples()}
    largest, others = 0.0, set(ours)
    for batch in islice(_batches(loader, workload, 0), workload.num_batches):
        for key, ids, pixels in batch.samples():
            if torch.equal(ids, ours[key][0]):
                others.discard(key)
            values = torch.from_numpy(wire.values(ours[key][1].numpy()))
            largest = max(largest, float((values - pixels).abs().max()))
    return largest, len(others)


def _batches(loader: Loader, workload: Workload, num_workers: int) -> Iterator[Batch]:
    torch.set_num_threads(1)  # as in workers; else one rival's process would use all cores
    warnings.filterwarnings("ignore", "'pin_memory' argument")  # there may be no device
    return loader(workload, num_workers)


def judge(
    contests: Sequence[Contest],
    num_samples: int,
    differences: Mapping[str, tuple[float, int]],
) -> list[Bound]:
    """Every promise, kept or not: that it was the same work, and how much faster."""
    passes = [run for contest in contests for runs in contest.runs.values() for run in runs]
    left_out = num_samples - min(run.result["samples"] for run in passes)
    found = [Bound("samples that a pass left out", left_out, 0, True)]
    for rival, (pixels, tokens) in differences.items():
        found.append(Bound(f"{rival}: samples with other tokens", tokens, 0, True))
        if rival.endswith("pil"):  # torchvision rounds in another way
            found.append(Bound(f"{rival}: difference of pixel values", pixels, 0, True))
    for contest in contests:
        for rival in [*contest.runs][1:]:
            name = f"CPU time of {rival}: {contest.name}, by ours"
            goal = _GOALS[rival.split(",")[0]]
            found.append(Bound(name, contest.ratio(rival, "processor_seconds"), goal, False))
    return found


def main(
    samples: Annotated[int, typer.Option(min=1, help="Samples of a pass, at least.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes of each loader.")] = 3,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    quick: Quick = False,
    json_path: Figures = None,
    picture: Path = Path("runs/bench_data.png"),
) -> int:
    """Write the photos, let all loaders take turns, and judge; 1 when a bound is missed.

    samples: at least so many. workers: processes of each loader beside none; None for all cores.
    Quick runs judge no speed.
    """
    workers, rounds = workers or len(os.sched_getaffinity(0)), 1 if quick else rounds
    missing = {package: how for package, how in INSTALL.items() if not is_installed(package)}
    loaders: dict[str, Loader] = {"ours": our_batches}
    for backend in ("pil", "torchvision") if "torchvision" not in missing else ("pil",):
        for name, batches in RIVALS.items():
            if name != "energon" or ENERGON not in missing:
                loaders[f"{name}, {backend}"] = partial(batches, backend=backend)
    samples = -(-samples // (BATCH * workers)) * BATCH * workers  # workers have equal parts
    sizes = [(_TINY, _TINIER)] if quick else [(_PHOTO, _PHOTO), (_LARGE, _PHOTO)]
    notes = [f"left out: {package} (pip install {how})" for package, how in missing.items()]
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        workloads = [
            Workload(Path(directory) / str(number), pair, samples, workers)
            for number, pair in enumerate(sizes)
        ]
        for workload in workloads:
            notes.append(f"{workload}: {workload.write() / 1e6:.2f} MB a JPEG")
            if ENERGON not in missing:
                in_subprocess(partial(prepare_energon, workload))
        differences = {
            name: in_subprocess(partial(difference, loader, workloads[-1]))
            for name, loader in loaders.items()
            if name != "ours"
        }
        cells = {
            f"{workload}, {number} workers": (workload, number)
            for workload in workloads
            for number in (0, workers)
        }
        turns = {
            f"{name}: {where}": partial(in_subprocess, partial(one_pass, loader, *cell))
            for where, cell in cells.items()
            for name, loader in loaders.items()
        }
        passes = take_turns(turns, rounds, tell=True)
    contests = [
        Contest(where, {name: passes[f"{name}: {where}"] for name in loaders}) for where in cells
    ]
    installed = sorted(INSTALL[package] for package in INSTALL.keys() - missing)
    report = Report(
        title="The input path of loaders on the same photos",
        notes=[*notes, *_NOTES],
        contests=contests,
        columns={
            "samples/s": lambda contest, name: f"{samples / contest.median(name):.1f}",
            "CPU ms / sample": lambda contest, name: (
                f"{1e3 * contest.median(name, 'processor_seconds') / samples:.1f}"
            ),
            "MB / sample": lambda contest, name: (
                f"{contest.runs[name][0].result['bytes'] / samples / 1e6:.2f}"
            ),
        },
        bounds=judge(contests, samples, differences),
        figure="processor_seconds",
        tables={
            "differences to ours": [
                {"loader": name, "largest of a pixel": pixels, "samples with other tokens": tokens}
                for name, (pixels, tokens) in differences.items()
            ]
        },
        software=("torch", "transformers", "webdataset", *installed),
    )
    return report.conclude(picture, json_path, judge_speed=not quick)


if __name__ == "__main__":
    command(main)()
