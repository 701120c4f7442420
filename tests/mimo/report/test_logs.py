"""`mimo logs` of run folders made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mimo.errors import InputError
from mimo.report.logs import first_error, logs
from mimo.runtime.run_files import record
from tests.mimo.report.folders import make_run, write_state
from tests.mimo.runs import mimo

CAUSE = """Traceback (most recent call last):
  File "a.py", line 3, in step
    divide()
ZeroDivisionError: division by zero
"""
RESULT = CAUSE.replace("ZeroDivisionError: division by zero", "mimo.RankLost: rank 2 failed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run")
    (folder / "launch").mkdir()
    return folder


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def at(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


def test_lines_of_all_ranks_are_printed_with_their_rank(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "log_rank_0.txt").write_text("first\n  goes on\nlast one, cut")
    (run / "log_rank_1.txt").write_text("second\n")
    assert logs(run, None, follow=False) == 0
    lines = ["[rank 0] first", "[rank 0]   goes on", "[rank 0] last one, cut", "[rank 1] second"]
    assert printed(capsys) == lines


def test_all_of_one_rank_is_printed_from_the_job_and_from_the_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "launch" / "rank_3.log").write_text("printed \x1b]0;x\n")
    (run / "launch" / "rank_30.log").write_text("of another\n")
    (run / "log_rank_3.txt").write_text("logged\n")
    assert logs(run, 3, follow=False) == 0
    assert sorted(printed(capsys)) == ["logged", "printed  ]0;x"]
    with pytest.raises(InputError, match="no output of rank 4"):
        logs(run, 4, follow=False)


@pytest.mark.parametrize("log_dir", ["logs", "{}/logs"])
def test_logs_of_jobs_are_found_where_the_recipe_puts_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], log_dir: str
) -> None:
    (run / "launch" / "recipe.yaml").write_text(
        f"cluster: {{log_dir: {log_dir.format(tmp_path)}}}\n"
    )
    for name in (run.name, "other"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "rank_0.log").write_text("elsewhere\n")
    assert logs(run, None, follow=False) == 0
    assert printed(capsys) == ["[rank 0] elsewhere"]


def test_the_output_of_a_job_without_ranks_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "job_7.out").write_text("x.yaml:3: no\nexit code 2 at noon\n")
    assert logs(tmp_path, None, follow=False) == 0
    assert printed(capsys) == ["[job 7] x.yaml:3: no", "[job 7] exit code 2 at noon"]


def test_only_the_end_of_huge_files_is_shown_beside_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "log_rank_0.txt").write_text("".join(f"line {n:09}\n" for n in range(10_000)))
    assert logs(run, None, follow=False) == 0
    lines = printed(capsys)
    assert lines[-1] == "[rank 0] line 000009999"
    assert len(lines) == 2**14 // 15


def test_following_prints_new_lines_until_the_run_ends(run: Path) -> None:
    path = run / "launch" / "rank_0.log"
    (run / "launch" / "rank_1.log").write_text("of another rank\n")
    write_state(run, 0)
    arguments = ["logs", str(run), "--rank", "0", "--follow"]
    set_up = "from mimo.report import logs; logs._LOOK_SECONDS = 0; from mimo.cli.main import app"
    command = [sys.executable, "-c", f"{set_up}; app({arguments})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        time.sleep(1.5)  # it looks before there is a file
        path.write_text("first\n")
        assert process.stdout.readline() == "first\n"
        with path.open("a") as file:
            file.write("second\nth")
        assert process.stdout.readline() == "second\n"
        path.rename(path.with_suffix(".old"))
        path.write_text("first\nsecond\nthird\n")  # the same file, copied anew from a node
        (run / "ranks" / "rank_0.json").unlink()
        assert process.stdout.read() == "third\n"
        assert process.wait(20) == 0


def test_the_first_error_is_the_one_that_others_followed_from(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    for rank, text in ((0, RESULT), (1, CAUSE), (2, CAUSE.replace("by zero", "again"))):
        (run / f"error_rank_{rank}.txt").write_text(text)
        at(run / f"error_rank_{rank}.txt", now + rank)
    record(run, "crash", "rank 2 (vision, lane 0) failed: ZeroDivisionError: ...", 7, rank=2)
    assert first_error(run) == 0
    lines = printed(capsys)
    assert lines[0].endswith("crash: rank 2 (vision, lane 0) failed: ZeroDivisionError: ...")
    assert lines[1].startswith("rank 2 (")
    assert lines[2:6] == CAUSE.replace("by zero", "again").splitlines()
    assert lines[6] == "later, or because of it:"
    assert lines[7].endswith("error_rank_1.txt): ZeroDivisionError: division by zero")
    assert lines[8].endswith("error_rank_0.txt): mimo.RankLost: rank 2 failed")


def test_an_error_is_found_in_the_output_of_tasks_and_slurm_is_quoted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run / "launch" / "rank_1.log"
    output.write_text(f"training\n{RESULT}\nduring that:\n\n{CAUSE}rank 1 failed\ngoodbye\n")
    (run / "launch" / "job_7.out").write_text(
        "job 7, start 1, on a\nsrun: error: of before\n"
        "job 7, start 2, on a\nsrun: error: node2: task 1: Killed\n"
    )
    assert first_error(run) == 0
    lines = printed(capsys)
    assert lines[0].startswith("rank 1 (")
    assert lines[1:5] == CAUSE.splitlines()
    assert lines[5:] == ["SLURM says:", "srun: error: node2: task 1: Killed"]


def test_an_incident_that_caused_all_errors_comes_first(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "error_rank_0.txt").write_text(RESULT)
    record(run, "hang", "the run hangs: rank 1 ...", 3, ranks=[1])
    assert first_error(run) == 0
    hang, later, result = printed(capsys)
    assert hang.endswith("hang: the run hangs: rank 1 ...")
    assert later == "later, or because of it:"
    assert result.endswith("mimo.RankLost: rank 2 failed")


def test_errors_of_an_earlier_start_are_marked(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "error_rank_0.txt").write_text(CAUSE)
    (run / "environment.json").write_text('[{"time": "2126-01-01T00:00:00+0000", "ranks": 1}]')
    first_error(run)
    assert printed(capsys)[0] == "Of an earlier start; the run has gone on since:"
    (run / "error_rank_0.txt").unlink()
    first_error(run)
    assert printed(capsys) == ["no rank has failed, as far as the run folder tells"]


def test_without_errors_of_ranks_the_end_of_the_job_output_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "jobs.jsonl").write_text('{"job_id": "7", "kind": "job"}\n')
    (tmp_path / "launch" / "job_7.out").write_text("x.yaml:3: no\x1b[2J\nexit code 2 at noon\n")
    first_error(tmp_path)
    expected = ["job_7.out: x.yaml:3: no [2J", "job_7.out: exit code 2 at noon"]
    assert printed(capsys) == ["no rank has failed, as far as the run folder tells", *expected]


def test_first_error_and_follow_are_refused_together(run: Path) -> None:
    done = mimo("logs", run, "--first-error", "--follow")
    assert (done.returncode, "--first-error" in done.stderr) == (2, True)
