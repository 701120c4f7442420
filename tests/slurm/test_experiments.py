"""The layouts of an experiment as jobs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from mimo.report.runs import jobs_of
from tests.slurm.cluster import Slurm
from tests.slurm.launched import NODES_OF_TWO, Launched, command_in, tiny

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

FILE = """
name: placed
recipe: tiny.yaml
set: {train.micro_batch_size: 2}
layouts:
  - {name: lanes, language.grid: {dp: 2}}
  - {name: stages, language.grid: {pp: 2}}
steps: 12
"""


def test_layouts_run_as_an_array_and_a_later_call_compares_them(
    slurm: Slurm, tmp_path: Path
) -> None:
    tiny(tmp_path)
    file = tmp_path / "placed.yaml"
    file.write_text(FILE)
    submitted = command_in(slurm, "experiment", file, *NODES_OF_TWO, "--submit")
    folder = tmp_path / "runs" / "placed"
    for run in ("lanes.1", "stages.1"):
        jobs = folder / run / "launch" / "jobs.jsonl"
        job = Launched(slurm, folder / run, [noted["job_id"] for noted in jobs_of(folder / run)])
        assert job.job in submitted
        assert job.end() == "COMPLETED 0:0", job.logs()
        job.check_what_is_shown()
        jobs.write_text('{"job_id": "999999", "kind": "array"}\n')
        assert "999999 (array): no longer in the queue" in job.mimo("status", job.run)
        jobs.write_text(f'{jobs.read_text()}{{"job_id": "{job.job}", "kind": "array"}}\n')
        shown = job.mimo("status", job.run)
        assert "999999 (array): no longer in the queue" in shown
        assert re.search(rf"{job.job} \(array\): COMPLETED.*\n.*state +ended", shown), shown
        assert "[rank 0]" in job.mimo("logs", job.run)
        assert job.job in (job.run / "report.html").read_text()
    printed = command_in(slurm, "experiment", file, *NODES_OF_TWO)
    assert "2 of 2 layouts follow the losses of lanes" in printed
    with (folder / "results.csv").open() as lines:
        assert [row["layout"] for row in csv.DictReader(lines)] == ["lanes", "stages"]
    assert (folder / "index.html").exists()
