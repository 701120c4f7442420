"""Metrics of long and damaged files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mimo.errors import InputError
from mimo.report import runs
from mimo.report.runs import read_curves, read_runs
from mimo.runtime.run_files import record
from tests.mimo.report.folders import RECIPE, make_run, write_state


def test_a_long_file_is_thinned_and_keeps_its_spikes_its_ends_and_its_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parsed = tmp_path / "metrics.jsonl", 0
    num_steps, spikes = 20_000, {777: 50.0, 12_345: 90.0, 15_000: math.nan}
    with path.open("w") as file:
        for step in range(num_steps):
            line: dict = {"step": step, "loss": spikes.get(step, 1.0), "lr": 0.1}
            if step % 10 == 9:
                line["seconds_vision_encode"] = 2.0
            file.write(json.dumps(line) + "\n")
    loads = json.loads

    def count(line: bytes) -> object:
        nonlocal parsed
        parsed += 1
        return loads(line)

    monkeypatch.setattr(runs.json, "loads", count)
    curves = read_curves(path)
    assert parsed < 5000
    loss = dict(zip(curves["loss"].steps.tolist(), curves["loss"].values.tolist(), strict=True))
    assert loss[778] == 50.0
    assert loss[12_346] == 90.0
    assert math.isnan(loss[15_001])
    assert {1, *range(num_steps - 19, num_steps + 1)} <= loss.keys()
    assert len(curves["seconds_vision_encode"].steps) >= 500
    assert np.diff(curves["loss"].steps).max() < num_steps / 100


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 0, "loss": 3.0, "flag": true, "name": "x"}\n'
    skipped = b'{"step": 1, "loss": null, "tokens": 5}\n'
    damaged = b'null\n[1]\n{"loss": 1.0}\n\xff\xfe\n\n{"step": 1, "los'
    path.write_bytes(good + skipped + damaged)
    curves = read_curves(path)
    assert curves.keys() == {"loss", "tokens"}
    assert curves["loss"].values.tolist() == [3.0]
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
            read_runs(wrong)
