"""Experiments as jobs; SLURM's commands are made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.errors import EXIT_CONTINUE, RecipeError
from mimo.report import experiment_runs as runs
from mimo.report.experiment import main
from mimo.report.experiment_runs import Run
from tests.mimo.report.folders import install
from tests.mimo.report.test_experiment_runs import FILE, trains
from tests.mimo.tiny import write_recipe


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment of two layouts; sbatch keeps what it got, squeue says what `queue` has."""
    install(tmp_path, monkeypatch, "sbatch", f'echo "$2" >> {tmp_path}/submitted; echo 12')
    install(tmp_path, monkeypatch, "squeue", f"cat {tmp_path}/queue")
    monkeypatch.setattr("mimo.report.experiment.write_page", lambda *_: None)

    def nothing_runs_here(run: Run, *_: object) -> int:
        raise AssertionError(run.name)

    monkeypatch.setattr(runs, "_train", nothing_runs_here)
    write_recipe(tmp_path)
    (tmp_path / "queue").touch()
    (tmp_path / "site.yaml").write_text("gpus_per_node: 0\nranks_per_node: 4\n")
    path = tmp_path / "made.yaml"
    # As many ranks as the other, so that one array has both.
    text = FILE.replace("{name: one}", "{name: one, language.grid: {dp: 2}}")
    path.write_text(text.replace("repeats: 2", "repeats: 1\nset: {train.micro_batch_size: 2}"))
    return path


def submitted(file: Path) -> list[str]:
    path = file.parent / "submitted"
    return path.read_text().splitlines() if path.exists() else []


def submit(file: Path) -> int:
    return main(file, [], submitting=True, cluster=file.parent / "site.yaml")


def trained(file: Path, name: str) -> None:
    """Write the files that the job of a layout leaves behind."""
    trains(Run(file.parent / "runs" / "made", name, 1))


def test_runs_are_submitted_as_one_array_and_their_results_collected_later(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(file) == 0
    (script,) = submitted(file)
    assert Path(script).name == "array.sh"
    assert all(name in Path(script).read_text() for name in ("made/one.1", "made/two.1"))
    assert "one.1: job 12_0\ntwo.1: job 12_1\n" in capsys.readouterr().out

    queue = file.parent / "queue"
    queue.write_text("12_0|RUNNING|1:00|2:00|node1\n12_1|PENDING|0:00|2:00|(Resources)\n")
    assert main(file, []) == EXIT_CONTINUE
    assert "12_1 (array): PENDING" in capsys.readouterr().out
    assert submit(file) == 0
    assert len(submitted(file)) == 1, "what is in the queue is not submitted again"

    queue.write_text("")
    trained(file, "one")
    trained(file, "two")
    assert main(file, []) == 0
    assert "2 of 2 layouts follow" in capsys.readouterr().out


def test_without_an_answer_of_slurm_nothing_is_resubmitted_and_finished_runs_are_collected(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(file) == 0
    squeue = file.parent / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho 'error: no controller' >&2\nexit 1\n")
    trained(file, "one")
    capsys.readouterr()
    assert submit(file) == 0
    assert len(submitted(file)) == 1
    printed = capsys.readouterr().out
    assert "two.1: not submitted again; 12_1 (array): submitted" in printed
    assert "SLURM does not answer: error: no controller" in printed
    assert "one.1" not in printed
    assert main(file, []) == EXIT_CONTINUE
    assert "1 of 2 layouts follow the losses of one" in capsys.readouterr().out


def test_a_layout_that_slurm_refuses_does_not_keep_the_others_away(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(file.read_text().replace("{dp: 2}", "{dp: 2, tp: 2}"))  # of more ranks
    sbatch = file.parent / "bin" / "sbatch"
    refuses = "then echo 'too many' >&2; exit 1; fi"
    text = sbatch.read_text().replace("#!/bin/sh", f"#!/bin/sh\nif grep -q made/one $2; {refuses}")
    sbatch.write_text(text)
    assert submit(file) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("two.1: job 12_0\n")
    assert "one.1: sbatch refused" in printed.err


def test_a_job_that_ended_early_is_reported_and_resubmitted_alone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(file) == 0
    trained(file, "one")
    # It was killed, so nobody has removed this.
    lock = file.parent / "runs" / "made" / ".two.1.lock"
    lock.write_text("host elsewhere, process 1, since now, SLURM job 12")
    assert main(file, []) == 1
    assert "its job ended before the run did" in capsys.readouterr().out
    assert submit(file) == 0
    _, again = submitted(file)
    assert "made/one.1" not in Path(again).read_text()


def test_layouts_that_cannot_run_are_refused_together_before_any_is_submitted(
    file: Path,
) -> None:
    text = file.read_text().replace("tp: 2", "tp: 3").replace("{dp: 2}", "{dp: 5}")
    file.write_text(text)
    with pytest.raises(RecipeError) as refused:
        submit(file)
    one, two, *_ = refused.value.problems
    assert one.startswith("one: ")
    assert "train.global_batch_size" in one
    assert two.startswith("two: ")
    assert "language.grid: tp=3 must divide" in two
    assert submitted(file) == []
