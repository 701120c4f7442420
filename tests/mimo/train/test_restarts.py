"""Ranks that fail and are started again: by the launcher, or by torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.resume import Start
from mimo.errors import EXIT_CONTINUE, InputError
from mimo.runtime.processes import RanksFailed
from mimo.runtime.ranks import RENDEZVOUS, run_on_cpu
from mimo.runtime.run_files import INCIDENTS, incidents, record
from mimo.train import main as job
from mimo.train.restarts import (
    NotRestarted,
    job_name,
    note_start,
    record_restart,
    start_time,
)
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.disturbed import disturbing, when_at
from tests.mimo.runs import ADAM, LAYOUT, metrics, run
from tests.mimo.train.test_phased_runs import FIRST, SECOND
from tests.mimo.train.test_phased_runs import SETTINGS as PHASED
from tests.mimo.train.test_phased_runs import write_recipe as write_phases
from tests.mimo.train.test_stalls import CASES, TIMEOUT_SECONDS
from tests.mimo.train.test_stalls import HERE as STALLS
from tests.ranks import MarkedJob

pytestmark = pytest.mark.usefixtures("run_ranks")  # its fork server
HERE = "tests.mimo.train.test_restarts"
SETTINGS = [*LAYOUT, *ADAM, "train.global_batch_size=4", "train.steps=5", "train.save_every=2"]
SAME = ("step", "loss", "grad_norm", "tokens", "epochs")


def same_metrics(recipe: Path, run: str, other: str) -> bool:
    lines, expected = (
        [{key: line[key] for key in SAME} for line in metrics(recipe, name)]
        for name in (run, other)
    )
    return lines == expected


# ----------------------------------------------------------------- what runs inside ranks


def fail_always(step: int, attempt: int, run_dir: Path, start: Start) -> None:
    if os.environ["RANK"] == "1":
        when_at(step, "update", lambda: 1 / 0)


def never_finite(_: None, attempt: int, run_dir: Path, start: Start) -> None:
    from mimo.train import loop

    step = loop.train_step
    loop.train_step = lambda **arguments: replace(step(**arguments), is_skipped=True)


def fail_in_second_phase(_: None, attempt: int, run_dir: Path, start: Start) -> None:
    """Before its first checkpoint, and after one."""
    if run_dir.name == SECOND and os.environ["RANK"] == "1" and attempt <= 2:
        when_at(0 if attempt == 1 else 1, "norm and loss", lambda: os.kill(os.getpid(), 9))


def train_under_torchrun(port: int, restart: int, arguments: list[str], signum: int) -> int:
    """The command line as a worker of torchrun's agent after so many restarts.

    signum: sent to rank 1 in step 3; 0 for none.
    """
    from mimo.cli.main import app

    del os.environ[RENDEZVOUS]
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "a run",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    if os.environ["RANK"] == "1" and signum:
        when_at(3, "update", lambda: os.kill(os.getpid(), signum))
    printed = Path(arguments[0]).parent / f"printed_{restart}_{os.environ['RANK']}"
    with printed.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        return app(["train", *arguments], standalone_mode=False) or 0


@pytest.fixture
def attempt(recipe: Path) -> Callable[..., list[int]]:
    """`attempt(restart, *settings, signum=0)`: ranks under torchrun; returns their exit codes."""
    # The agent's store outlives the ranks of an attempt and keeps what they wrote.
    store = TCPStore("localhost", 0, None, True, wait_for_workers=False)

    def run(restart: int, *settings: str, signum: int = 0) -> list[int]:
        args = (store.port, restart, [str(recipe), *SETTINGS, *settings], signum)
        return run_on_cpu(train_under_torchrun, args, 3, 60)

    return run


def restarts_of(run_dir: Path) -> list[dict[str, Any]]:
    """Incidents without the crashes that restarts follow."""
    return [incident for incident in incidents(run_dir) if incident["kind"] == "restart"]


# -------------------------------------------------------------------------------- tests


def test_the_restarts_of_a_job_are_counted_and_end_where_its_folder_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        record_restart(tmp_path, 9)
    file = tmp_path / INCIDENTS
    file.write_text(file.read_text().replace(socket.gethostname(), "elsewhere", 1))
    record_restart(tmp_path, 9)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"restart {n} of 9" for n in (1, 2, 2)]
    shutil.rmtree(tmp_path)
    with pytest.raises(NotRestarted, match="is gone"):
        record_restart(tmp_path, 9)


@pytest.mark.slow
def test_a_run_whose_numbers_stay_not_finite_is_not_started_again(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = disturbing(monkeypatch, f"{HERE}:never_finite", None)
    expected = "none of 2 steps since step 0 was finite.*: not started again"
    with pytest.raises(NotRestarted, match=expected) as caught:
        train(recipe, [*SETTINGS, "train.max_skipped_steps=1"], max_restarts=9)
    assert caught.value.exit_code == 1
    kinds = [incident["kind"] for incident in incidents(recipe.parent / "runs" / "tiny")]
    assert "restart" not in kinds
    assert kinds.count("not finite") == 1


def test_what_befell_a_job_before_it_was_requeued_under_its_name_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        record_restart(tmp_path, 9)
    record(tmp_path, "signal", "ended by SIGTERM", 2, job=job_name())
    with pytest.raises(NotRestarted):
        record_restart(tmp_path, 9)
    requeued = time.time() + 2
    record_restart(tmp_path, 9, requeued)
    assert capsys.readouterr().out.splitlines()[-1].startswith("restart 1 of 9")
    note_start(tmp_path, time.monotonic())
    assert start_time(tmp_path) == pytest.approx(time.time(), abs=60)


@pytest.mark.slow
def test_a_run_that_hangs_is_explained_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, path = CASES["encode"], tiny.write_recipe(tmp_path)
    tiny.write_samples(tmp_path, (2, 1, 1, 3) * 3)
    settings = [case.layout, *ADAM, "train.steps=4", "train.save_every=1"]
    settings += ["train.global_batch_size=12", "train.micro_batch_size=2"]
    assert job.main(path, [*settings, "name=whole"]) == 0
    train = disturbing(monkeypatch, f"{STALLS}:stall", case)
    limit = f"train.step_timeout_seconds={TIMEOUT_SECONDS}"
    assert train(path, [*settings, limit], max_restarts=1) == 0
    run_dir = tmp_path / "runs" / "tiny"
    assert [incident["kind"] for incident in incidents(run_dir)] == ["hang", "restart"]
    assert (run_dir / "hang.1" / "summary.txt").exists()
    assert not (run_dir / "hang").exists()
    assert same_metrics(path, "tiny", "whole")


@pytest.mark.slow
def test_a_run_that_goes_back_to_an_earlier_checkpoint_restarts_from_there_and_says_why(
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_ranks: RunRanks,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run(run_ranks, recipe, *SETTINGS, "train.keep_checkpoints=9")
    run_dir = recipe.parent / "runs" / "tiny"
    train = disturbing(monkeypatch, f"{HERE}:fail_always", 3)
    first = run_dir / "checkpoints" / "step_2"
    assert train(recipe, SETTINGS, resume_from=first, max_restarts=1) == 1
    (restart,) = restarts_of(run_dir)
    assert (restart["step"], restart["rank"], restart["checkpoint"]) == (3, 1, "step_2")
    line = "restart 1 of 1, from step_2: rank 1 failed: ZeroDivisionError: division by zero"
    assert f"\n{line}, at step 3\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_job_with_phases_restarts_in_the_phase_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_phases(tmp_path)
    assert job.main(path, [*PHASED, "name=whole"]) == 0
    train = disturbing(monkeypatch, f"{HERE}:fail_in_second_phase", None)
    assert train(path, PHASED, max_restarts=2) == 0
    runs = tmp_path / "runs"
    restarts = restarts_of(runs / "tiny" / SECOND)
    assert [restart["checkpoint"] for restart in restarts] == [None, "step_1"]
    assert not incidents(runs / "tiny" / FIRST)
    for phase in (FIRST, SECOND):
        assert same_metrics(path, f"tiny/{phase}", f"whole/{phase}")


@pytest.mark.slow
def test_the_time_of_a_job_that_torchrun_starts_again_counts_from_its_first_start(
    recipe: Path, attempt: Callable[..., list[int]]
) -> None:
    with pytest.raises(RanksFailed):
        attempt(0, "train.max_minutes=30", signum=signal.SIGKILL)
    begun = recipe.parent / "runs" / "tiny" / ".begun_by"
    name, seconds = begun.read_text().split("\n")
    begun.write_text(f"{name}\n{float(seconds) - 1800}")
    assert attempt(1, "train.max_minutes=30") == [EXIT_CONTINUE] * 3
    last = incidents(recipe.parent / "runs" / "tiny")[-1]
    assert last["text"] == "ended by train.max_minutes, with a checkpoint after step 3"


@pytest.mark.slow
def test_torchrun_does_not_go_on_with_a_run_that_was_asked_to_end(
    recipe: Path, attempt: Callable[..., list[int]]
) -> None:
    assert attempt(0, "train.steps=9", signum=signal.SIGTERM) == [EXIT_CONTINUE] * 3
    assert attempt(1, "train.steps=9") == [EXIT_CONTINUE] * 3
    printed = (recipe.parent / "printed_1_0").read_text()
    assert "ended by SIGTERM, with a checkpoint after step 5: not started again\n" in printed
    assert find_checkpoint(recipe.parent / "runs" / "tiny").name == "step_5"


def test_ranks_of_torchrun_or_srun_refuse_to_restart_each_other(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="give it to torchrun"):
        job.main(recipe, SETTINGS, max_restarts=1)


@pytest.mark.slow
def test_the_agent_of_torchrun_restarts_a_run_exactly_once_and_leaves_no_process(
    run_ranks: RunRanks, recipe: Path
) -> None:
    """With torchrun itself; the rank that fails does so in a module that the job imports."""
    run(run_ranks, recipe, *SETTINGS, "name=whole")
    runs = recipe.parent / "runs"
    # Another run has that name: the first start moves it aside, the second one does not.
    shutil.copytree(runs / "whole", runs / "tiny")
    script = recipe.parent / "worker.py"
    script.write_text(
        "import os, signal, sys\n"
        "from tests.mimo.disturbed import when_at\n"
        "from mimo.cli.main import app\n"
        "if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10':\n"
        "    when_at(3, 'update', lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "app(['train', *sys.argv[1:]])\n"
    )
    marked = MarkedJob()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "3", "--max-restarts", "2", str(script), str(recipe)),
            *SETTINGS,
        ],
        env={**marked.environment, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert not marked.leftovers()
    assert same_metrics(recipe, "tiny", "whole")
    assert {path.name for path in runs.iterdir() if path.is_dir()} == {"tiny", "tiny.1", "whole"}
    (restart,) = restarts_of(runs / "tiny")
    assert (restart["step"], restart["checkpoint"]) == (3, "step_2")
    assert done.stdout.count("restart 1 of 2, from step_2: ") == 1
