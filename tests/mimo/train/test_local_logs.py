"""Logs that ranks write on the node first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mimo.errors import InputError
from mimo.train import local_logs
from mimo.train.local_logs import local_log, take_logs


@pytest.fixture
def to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder; this process is the first rank of a node."""
    monkeypatch.setenv("MIMO_LOCAL_LOGS", str(tmp_path / "node"))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for name, value in {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_rank_that_fails_leaves_its_log_and_those_of_killed_ranks_in_the_run_folder(
    to: Path,
) -> None:
    def fail() -> None:
        with local_log(to / "log_rank_4.txt") as log:
            assert "-77-" in log.parent.name
            log.write_text("mine\n")
            (log.parent / "log_rank_5.txt").write_text("of a rank that was killed\n")
            assert not [*to.iterdir()]
            raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        fail()
    assert (to / "log_rank_4.txt").read_text() == "mine\n"
    assert (to / "log_rank_5.txt").read_text() == "of a rank that was killed\n"


def test_only_what_is_new_is_taken_now_and_then_and_after_another_start(
    to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = to / "log_rank_4.txt"
    monkeypatch.setattr(local_logs, "_EVERY_SECONDS", 0.01)
    with local_log(path) as log:
        log.write_text("one\n")
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, "nobody takes it"
            time.sleep(0.01)
    with local_log(path) as log, log.open("a") as file:
        print("two", file=file, flush=True)
        take_logs()
        assert path.read_text() == "one\ntwo\n"
        print("three", file=file, flush=True)
    assert path.read_text() == "one\ntwo\nthree\n"
    assert not [*log.parent.iterdir()], "nothing is left on the node"


def test_a_rank_that_has_just_left_leaves_nothing_that_another_brings_back(
    to: Path, tmp_path: Path
) -> None:
    here = tmp_path / "node"
    here.mkdir()
    local_logs._take(here / "log_rank_5.txt", to / "log_rank_5.txt")
    assert not [*here.iterdir()]


def test_a_folder_that_cannot_be_made_is_bad_input(
    to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIMO_LOCAL_LOGS", str(tmp_path / "file"))
    refused = pytest.raises(InputError, match=r"cluster\.local_logs: .* cannot be made")
    with refused as error, local_log(to / "log_rank_4.txt"):
        pass
    assert error.value.exit_code == 2


def test_a_folder_that_somebody_else_may_have_put_there_is_refused(
    to: Path, tmp_path: Path
) -> None:
    with local_log(to / "log_rank_4.txt") as log:
        folder = log.parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    refused = pytest.raises(InputError, match="not a folder of this user; give another")
    with refused, local_log(to / "log_rank_4.txt"):
        pass


def test_another_rank_of_the_node_takes_its_own_log_alone(
    to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with local_log(to / "log_rank_4.txt") as log:
        log.write_text("mine\n")
        (log.parent / "log_rank_5.txt").write_text("another's\n")
    assert [path.name for path in to.iterdir()] == ["log_rank_4.txt"]


def test_without_a_folder_on_the_node_logs_are_where_they_belong(
    to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MIMO_LOCAL_LOGS")
    with local_log(to / "log_rank_4.txt") as log:
        assert log == to / "log_rank_4.txt"
