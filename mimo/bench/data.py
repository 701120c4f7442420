"""`mimo bench data`: our input path and those of others on the same photos, and a late resume."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

from mimo.bench.data_contest import Contestant, difference, timed_pass, watched
from mimo.bench.data_report import Cell, DataReport, draw_data, judge, print_data
from mimo.bench.data_resume import resume_seconds, write_index
from mimo.bench.data_theirs import ENERGON, INSTALL, is_installed, prepare_energon
from mimo.bench.data_workload import BATCH, Workload
from mimo.bench.outcome import conclude, machine, open_console

_PHOTO, _LARGE = (1024, 768), (4000, 3000)
_TINY, _TINIER = (200, 150), (90, 120)
_INDEX_SHARDS = 20  # of a million samples each


def measure(samples: int, rounds: int, workers: int, quick: bool) -> DataReport:
    """Write the photos, let all loaders take turns, and judge. samples: at least so many."""
    missing = {package: how for package, how in INSTALL.items() if not is_installed(package)}
    loaders = ["webdataset"] if ENERGON in missing else ["webdataset", "energon"]
    rivals = [Contestant(loader, "pil") for loader in loaders]
    if "torchvision" not in missing:
        rivals += [Contestant(loader, "torchvision") for loader in loaders]
    samples = -(-samples // (BATCH * workers)) * BATCH * workers  # workers have equal parts
    sizes = [(_TINY, _TINIER)] if quick else [(_PHOTO, _PHOTO), (_LARGE, _PHOTO)]
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        workloads = [
            Workload(Path(directory) / str(number), pair, samples, workers)
            for number, pair in enumerate(sizes)
        ]
        image_bytes = {str(workload): workload.write() for workload in workloads}
        if ENERGON not in missing:
            for workload in workloads:
                watched(partial(prepare_energon, workload))
        last = workloads[-1]
        differences = {str(own): watched(partial(difference, own, last))[0] for own in rivals}
        cells = [
            Cell(workload, number, contestant, [])
            for workload in workloads
            for number in (0, workers)
            for contestant in (Contestant(), *rivals)
        ]
        for turn in range(rounds):
            for cell in (*cells[turn % len(cells) :], *cells[: turn % len(cells)]):
                cell.passes.append(timed_pass(cell.contestant, cell.workload, cell.num_workers))
                print(f"[{turn + 1}/{rounds}] {cell}", flush=True)
        shards = Path(directory) / "large"
        write_index(shards, 1 if quick else _INDEX_SHARDS)
        resumes = [watched(partial(resume_seconds, shards))[0] for _ in range(rounds)]
    bounds = judge(cells, differences, resumes)
    named = ("transformers", "webdataset", *(INSTALL[own] for own in INSTALL.keys() - missing))
    found = machine() | {package: version(package) for package in sorted(named)}
    return DataReport(found, missing, image_bytes, cells, differences, resumes, bounds)


def main(
    samples: int,
    rounds: int,
    workers: int | None,
    quick: bool,
    json_path: Path | None,
    picture: Path,
) -> int:
    """Measure, print, draw and judge; returns 1 when a bound is missed. Quick runs judge no speed.

    workers: processes of each loader beside none; None for all cores.
    """
    workers = workers or len(os.sched_getaffinity(0))
    report = measure(samples, 1 if quick else rounds, workers, quick)
    print_data(report, open_console())
    judged = [bound for bound in report.bounds if bound.at_most or not quick]
    return conclude(judged, partial(draw_data, report), picture, report.to_json(), json_path)
