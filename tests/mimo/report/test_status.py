"""`mimo status` of run folders made by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mimo.report.status import facts_of, read_view, status
from mimo.runtime.run_files import record
from tests.mimo.report.folders import RECIPE, install, make_run, write_state

SECONDS = {
    "step_seconds": 0.5,
    "idle_fraction_vision": 0.25,
    "bridge_wait_seconds_vision_forward": 0.125,
    "memory_gib_vision": 1.5,
}


def facts(folder: Path) -> dict[str, str]:
    return dict(facts_of(read_view(folder)))


def squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: str) -> None:
    """Install a squeue that prints ``rows``."""
    answer = "\n".join(rows)
    install(folder, monkeypatch, "squeue", f"cat <<'END'\n{answer}\nEND")


def submitted(run: Path, *jobs: str) -> None:
    (run / "launch").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": "now", "job_id": job, "kind": "train"}) for job in jobs]
    (run / "launch" / "jobs.jsonl").write_text("\n".join([*lines, '{"time": "cut']))


def test_the_status_of_a_running_run_fits_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", num_steps=60, metrics=SECONDS)
    write_state(run, 0, step=60)
    write_state(run, 1, step=59, who="language, lane 0", activity="gradients")
    (run / "environment.json").write_text(json.dumps([{"ranks": 3}]))
    (run / "checkpoints" / "step_50").mkdir(parents=True)
    (run / "checkpoints" / "step_50" / "progress.json").touch()
    (run / "checkpoints" / "latest").write_text("step_50")
    record(run, "restart", "restart 1 of 3: rank 1 was killed\nby \x1b[31msomebody", 20)
    shown = facts(run)
    assert shown["state"] == "running, 2 of 3 ranks answer"
    assert shown["furthest behind"] == "rank 1 (language, lane 0) at step 59, in 'gradients'"
    assert shown["step"] == "60 of 100 (60.0 %)"
    assert shown["loss"] == "150.5, validation 7"  # the mean of 160, 159, ...
    assert shown["rate"] == "1,001 tokens/s, MFU –"
    assert shown["left"] == "0:00:20 at 0.5 s a step, without checkpoints"
    assert shown["idle"] == "vision 25.0 %"
    assert shown["checkpoint"].startswith("checkpoints/step_50, 0:00:0")
    assert shown["restarts"] == "1"
    assert status(run) == 0
    printed = capsys.readouterr().out
    assert "restart: restart 1 of 3: rank 1 was killed by  [31msomebody" in printed
    assert "\x1b" not in printed


def test_a_killed_run_has_stopped_and_a_failed_run_shows_its_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=40)
    write_state(run, 0)
    write_state(run, 1, failure="OSError: the disk is full")
    before = time.time() - 3600
    for rank in (0, 1):
        os.utime(run / "ranks" / f"rank_{rank}.json", (before, before))
    state = facts(run)["state"]
    assert state.startswith("stopped after step 40, 0 of 2 ranks answer; rank 1 (vision, lane 0)")
    assert state.endswith("failed: OSError: the disk is full")
    assert not read_view(run).goes_on


def test_the_status_of_phases_is_that_of_the_running_phase(tmp_path: Path) -> None:
    make_run(tmp_path / "job" / "phase_1_align")
    make_run(tmp_path / "job" / "phase_2_sft", num_steps=7)
    make_run(tmp_path / "job" / "phase_3_last", num_steps=0)
    write_state(tmp_path / "job" / "phase_2_sft", 0)
    (tmp_path / "job" / "recipe.yaml").write_text(RECIPE)
    view = read_view(tmp_path / "job")
    phases = [value for name, value in facts_of(view) if name == "phase"]
    assert phases == [
        "job/phase_1_align: ended",
        "job/phase_2_sft: running, 1 of 1 ranks answer",
        "job/phase_3_last: stopped after step 0",
    ]
    assert dict(facts_of(view))["step"] == "7 of 100 (7.0 %)"


def test_the_holder_of_the_lock_is_shown_unless_its_process_has_ended(
    tmp_path: Path,
) -> None:
    run, lock = make_run(tmp_path / "run"), tmp_path / ".run.lock"
    lock.write_text(f"host {socket.gethostname()}, process {os.getpid()}, since now")
    assert read_view(run).goes_on
    assert facts(run)["begun by"] == lock.read_text()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock.write_text(f"host {socket.gethostname()}, process {ended.pid}, since now")
    assert not read_view(run).goes_on
    lock.write_text("host elsewhere, process 1, since now")
    assert read_view(run).goes_on


def test_a_pending_job_is_shown_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path / "run", "6", "7")
    rows = ("5|RUNNING|0:00|1:00:00|of another run", "7|PENDING|0:00|1:00:00|(Priority)")
    squeue(tmp_path, monkeypatch, *rows)
    view = read_view(tmp_path / "run")
    assert view.jobs == ["6 (train): no longer in the queue", "7 (train): PENDING, (Priority)"]
    assert view.goes_on
    assert facts(tmp_path / "run")["state"] == "no rank has started yet"


def test_elements_of_an_array_and_parts_of_a_heterogeneous_job_have_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, "6", "9")
    rows = "6_1|RUNNING|1:00|2:00|node1\n6_2|FAILED|0:01|0:00|(NonZeroExitCode)"
    squeue(tmp_path, monkeypatch, f"{rows}\n9+0|COMPLETED|0:10|0:00|node2")
    assert read_view(run).jobs == [
        "6_1 (train): RUNNING for 1:00, 2:00 left, node1",
        "6_2 (train): FAILED, (NonZeroExitCode)",
        "9+0 (train): COMPLETED, node2",
    ]
    assert read_view(run).goes_on


def test_without_slurm_the_status_comes_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    submitted(run, "6")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "SLURM does not answer: " in facts(run)["job"]
    assert facts(run)["state"] == "ended"
    assert not read_view(run).goes_on


@pytest.mark.parametrize(
    ("state", "goes_on"),
    [
        *((state, True) for state in ("PENDING", "COMPLETING", "REQUEUE_HOLD", "SPECIAL_EXIT")),
        *((state, True) for state in ("STAGE_OUT", "RESIZING", "SIGNALING", "STOPPED", "NEW")),
        *((state, False) for state in ("COMPLETED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL")),
    ],
)
def test_a_job_goes_on_in_every_state_but_those_that_it_ends_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, goes_on: bool
) -> None:
    submitted(tmp_path / "run", "7")
    squeue(tmp_path, monkeypatch, f"7|{state}|0:00|1:00:00|node1")
    assert read_view(tmp_path / "run").goes_on == goes_on


LOST = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (LOST, "slurm_load_jobs error: Unable to contact slurm controller"),
        ("exec sleep 60", "timed out after 0.5 seconds"),
    ],
)
def test_where_slurm_does_not_say_a_run_may_be_queued_unless_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, answer: str
) -> None:
    if command != LOST:
        monkeypatch.setattr("mimo.report.status._SQUEUE_SECONDS", 0.5)
    install(tmp_path, monkeypatch, "squeue", command)
    submitted(tmp_path / "run", "7")
    view = read_view(tmp_path / "run")
    assert view.jobs[0].startswith("7 (train): submitted now; SLURM does not answer: ")
    assert view.jobs[0].endswith(answer)
    assert (view.is_queued, view.goes_on) == (None, True)
    assert not read_view(make_run(tmp_path / "run")).goes_on


def test_the_end_of_the_output_of_a_finished_job_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    submitted(run, "7")
    (run / "launch" / "job_7.out").write_text("a\nb\nx.yaml:3: no\n\nexit code 2 at noon\n")
    squeue(tmp_path, monkeypatch, "7|RUNNING|0:01|1:00|node1")
    assert "job_7.out" not in facts(run)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")
    lines = [value for name, value in facts_of(read_view(run)) if name == "job_7.out"]
    assert lines == ["b", "x.yaml:3: no", "exit code 2 at noon"]
    make_run(run)
    assert "job_7.out" not in facts(run), "it has ended well"


def test_looking_needs_no_torch() -> None:
    code = "import sys, mimo.report.logs, mimo.report.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
