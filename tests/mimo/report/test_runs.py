"""Metrics of damaged files, and what a folder says of its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.errors import InputError
from mimo.report.runs import begun_runs, read_curves, read_runs
from mimo.runtime.run_files import record
from tests.mimo.report.folders import RECIPE, make_run, write_state


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 0, "loss": 3.0, "flag": true, "name": "x"}\n'
    skipped = b'{"step": 1, "loss": null, "tokens": 5}\n'
    damaged = b'null\n[1]\n{"loss": 1.0}\n\xff\xfe\n\n{"step": 1, "los'
    path.write_bytes(good + skipped + damaged)
    curves = read_curves(path)
    assert curves.keys() == {"loss", "tokens"}
    assert (curves["loss"].steps.tolist(), curves["loss"].finite.tolist()) == ([1, 2], [3.0])
    assert read_curves(tmp_path / "nowhere") == {}


def test_a_run_ended_stopped_or_is_running(tmp_path: Path) -> None:
    (ended,) = read_runs(make_run(tmp_path / "ended"))
    assert (ended.state, ended.steps_done) == ("ended", 100)
    folder = make_run(tmp_path / "stopped", num_steps=40)

    def state() -> str:
        (run,) = read_runs(folder)
        return run.state

    assert state() == "stopped after step 40"
    record(folder, "signal", "ended by SIGINT", 38)
    assert state() == "stopped after step 40", "it has gone on since"
    record(folder, "signal", "ended by SIGTERM, with a checkpoint", 39)
    assert state() == "ended by SIGTERM, with a checkpoint"
    (folder / "incidents.jsonl").unlink()
    write_state(folder, 1, failure="OSError: the disk is full")
    assert state() == "stopped after step 40"
    write_state(folder, 0)
    (running,) = read_runs(folder)
    assert (running.state, running.alive) == ("running", [0])


def test_the_end_of_a_long_file_can_be_read_alone(tmp_path: Path) -> None:
    (run,) = read_runs(make_run(tmp_path / "run"), newest_bytes=2000)
    assert run.steps_done == 100
    assert 50 < run.curves["loss"].steps[0] < 100


def test_phases_are_runs_in_their_order_and_other_folders_are_none(tmp_path: Path) -> None:
    make_run(tmp_path / "job" / "phase_10_last")
    make_run(tmp_path / "job" / "phase_2_first", num_steps=3)
    (tmp_path / "job" / "recipe.yaml").write_text(RECIPE)
    phases = read_runs(tmp_path / "job")
    assert [run.title for run in phases] == ["job/phase_2_first", "job/phase_10_last"]
    assert [run.steps_done for run in phases] == [3, 100]
    for wrong in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="give the folder of a run"):
            begun_runs(wrong)
