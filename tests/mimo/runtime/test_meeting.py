"""Ranks of torchrun or srun: they meet whatever has their port, and speak with one voice."""

from __future__ import annotations

import datetime
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import InputError, StartError
from mimo.runtime import meeting
from mimo.runtime.door import Peers, find_store, open_store, secret_of
from mimo.runtime.meeting import Meeting, Refused
from mimo.runtime.processes import RanksFailed
from mimo.runtime.ranks import run_on_cpu
from mimo.runtime.run_lock import run_lock
from tests.conftest import RunRanks
from tests.mimo.checkpoint.manifests import small_checkpoint, write_manifest
from tests.mimo.runs import corrupt, metrics
from tests.mimo.runtime.conftest import (
    RANKS,
    as_task_of_srun,
    free_port,
    other_program,
    train,
)

PATIENCE = datetime.timedelta(seconds=5)
HOSTS = Peers("host", "--rdzv-endpoint", "--rdzv-endpoint")

# ------------------------------------------------------- functions that run inside ranks


def train_while_a_thread_fails(port: int, folder: Path, arguments: list[str]) -> int:
    """Like `train`, but the training is stuck for good and a thread beside it fails."""
    from mimo.train import rank

    def stuck(*_: object) -> None:
        threading.Thread(target=fail).start()
        time.sleep(60)

    def fail() -> None:
        raise ValueError("no such luck")

    rank.train_in_world = stuck
    return train(port, folder, arguments)


def meet(port: int) -> tuple[str, float]:
    """What rank 0 says to all, or the error; and the seconds until then."""
    from mimo.runtime.ranks import rank_environment

    started = time.monotonic()
    as_task_of_srun(port)
    environment = rank_environment()
    assert environment is not None
    try:
        met = Meeting(environment, timeout_seconds=20)
        met.agree(None)
        answer = met.from_rank_0(lambda: "welcome")
    except InputError as error:
        answer = str(error)
    if environment.rank == 0:
        time.sleep(1)  # its store is asked until then
    return answer, time.monotonic() - started


def refuse(port: int) -> int:
    """The exit code of ranks that all leave twice, of which rank 1 is late."""
    from mimo.runtime.ranks import rank_environment

    def wrong() -> None:
        raise InputError("wrong")

    as_task_of_srun(port)
    environment = rank_environment()
    assert environment is not None
    met, code = Meeting(environment, timeout_seconds=20), 0
    if environment.rank == 1:
        time.sleep(1)
    try:
        met.from_rank_0(wrong)
    except Refused as refused:
        code = refused.exit_code
    met.leave()
    return code


# -------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("greeting", [None, b"HTTP/1.1 400 Bad Request\r\n"], ids=["mute", "http"])
def test_ranks_meet_at_the_next_port_where_another_program_has_theirs(
    run_ranks: RunRanks, greeting: bytes | None
) -> None:
    with other_program(greeting=greeting) as port:
        met = run_on_cpu(meet, (port,), RANKS, timeout_seconds=60)
    assert [answer for answer, _ in met] == ["welcome"] * RANKS
    assert max(seconds for _, seconds in met) < 15


def test_a_late_rank_hears_why_the_others_leave(run_ranks: RunRanks) -> None:
    assert run_on_cpu(refuse, (free_port(),), RANKS, timeout_seconds=60) == [2] * RANKS


def test_door_and_store_listen_at_the_chosen_address_alone() -> None:
    port = free_port("127.0.0.2")
    store = open_store("127.0.0.2", port, b"secret", PATIENCE)
    assert find_store("127.0.0.2", port, b"secret", 5, 1) == store.port
    for one in (port, store.port):
        socket.create_connection(("127.0.0.2", one), 1).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", one), 1)


def test_a_host_that_takes_its_own_name_for_loopback_says_what_to_give_instead(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    of_debian = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    port = free_port("127.0.0.2")
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_: of_debian)
        store = open_store("gpu01", port, b"secret", PATIENCE, HOSTS)
    assert find_store("127.0.0.2", port, b"secret", 5, 1) == store.port, "others reach it"
    said = capfd.readouterr().err
    assert said.startswith("warning: gpu01 leads to no address of this machine that others reach")
    assert "the store of the hosts" in said
    assert said.endswith("give one of them as --rdzv-endpoint\n")
    with pytest.raises(StartError, match="host 1 did not find host 0 .* else set --rdzv-endpoint$"):
        find_store("127.0.0.2", port, b"another", 0.5, 1, HOSTS)


@pytest.mark.parametrize("wrong", [["--rdzv-endpoint=localhost:29000"], ["--rdzv-conf=rank=0"]])
def test_a_host_whose_line_says_too_little_is_told_where_to_get_it(wrong: list[str]) -> None:
    line = [sys.executable, "-m", "mimo.runtime.agent", "--rdzv-backend=mimo", *wrong, "true"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs --rdzv-endpoint=HOST:PORT" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_does_not_know_the_secret_of_a_job_is_not_told_where_its_store_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIMO_JOB_SECRET", "one")
    port, ours = free_port(), secret_of(RANKS)
    store = open_store("localhost", port, ours, PATIENCE)
    monkeypatch.setenv("MIMO_JOB_SECRET", "another")
    with pytest.raises(StartError, match="rank 1 did not find rank 0"):
        find_store("localhost", port, secret_of(RANKS), 0.5, 1)
    with socket.create_connection(("localhost", port), 5) as visitor:
        visitor.sendall(b"where is it?\n")
        said = visitor.makefile("rb").read()
    assert said.startswith(b"mimo ")
    assert str(store.port).encode() not in said.split()
    assert find_store("localhost", port, ours, 5, 1) == store.port


def test_what_others_write_to_the_store_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Meeting(meeting.RankEnv(1, 2, 0, f"file://{tmp_path / 'store'}"), timeout_seconds=5)
    monkeypatch.setenv("MIMO_JOB_SECRET", "of another job")
    other = Meeting(meeting.RankEnv(0, 2, 0, f"file://{tmp_path / 'store'}"), timeout_seconds=5)
    other.from_rank_0(lambda: "come here")
    with pytest.raises(InputError, match="not of this job"):
        one.from_rank_0(lambda: None)


def test_where_all_ports_are_taken_every_rank_says_so_with_host_port_and_what_to_set(
    run_ranks: RunRanks,
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(other_program(greeting=b"no\n"))
        for port in range(first + 1, first + 8):
            stack.enter_context(other_program(port, greeting=b"no\n"))
        met = run_on_cpu(meet, (first,), RANKS, timeout_seconds=60)
    expected = (
        f"ports {first} to {first + 7} of localhost are taken by other programs, so the ranks "
        "cannot meet there; give a port of that host that is free as MASTER_PORT"
    )
    assert [answer for answer, _ in met] == [expected] * RANKS
    assert max(seconds for _, seconds in met) < 15


def test_what_is_wrong_with_a_recipe_is_printed_once_by_the_job(
    trained: Callable[..., tuple[list[int], list[str]]],
) -> None:
    codes, printed = trained("train.stepps=3")
    assert codes == [2] * RANKS
    assert printed[0].count("did you mean 'steps'") == 1
    assert printed[1:] == ["", ""]


def test_what_only_one_rank_finds_wrong_is_printed_with_its_number_and_ends_all(
    trained: Callable[..., tuple[list[int], list[str]]],
) -> None:
    codes, printed = trained(broken_rank=2)
    assert codes == [2] * RANKS
    assert printed[0].startswith("rank 2: ")
    assert "did you mean 'steps'" in printed[0]
    assert printed[1:] == ["", ""]


def test_all_ranks_learn_that_the_run_folder_is_in_use(
    trained: Callable[..., tuple[list[int], list[str]]], recipe: Path
) -> None:
    run_dir = recipe.parent / "runs" / "tiny"
    with run_lock(run_dir):
        codes, printed = trained("--resume")
    assert codes == [1] * RANKS  # the same job may begin when the other has ended
    assert f"{run_dir}: another job is writing to this run folder (host " in printed[0]
    assert printed[1:] == ["", ""]
    assert not run_dir.exists()


def test_a_resume_that_is_refused_or_has_nothing_to_do_ends_all_ranks_and_writes_nothing(
    trained: Callable[..., tuple[list[int], list[str]]], recipe: Path
) -> None:
    whole = load_recipe(recipe)
    made = small_checkpoint(whole.run_dir / "checkpoints", 3, whole.to_yaml())
    shutil.copytree(recipe.parent / "tokenizer", made / "assets", dirs_exist_ok=True)
    write_manifest(made)
    codes, printed = trained("--resume", "language.model.num_layers=4")
    assert codes == [2] * RANKS
    assert f"language.model.num_layers: got 4, but {made} was trained with 2" in printed[0]
    codes, told = trained("--resume", "train.steps=2")
    assert codes == [0] * RANKS
    assert told[0] == "already at step 3 of 2; raise train.steps to go on\n"
    assert printed[1:] == told[1:] == ["", ""]
    assert [path.name for path in whole.run_dir.iterdir()] == ["checkpoints"]


@pytest.mark.slow
def test_one_command_serves_the_first_start_and_later_ones(
    trained: Callable[..., tuple[list[int], list[str]]],
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIMO_LOCAL_LOGS", str(recipe.parent / "node"))
    monkeypatch.setenv("MIMO_BEGAN", str(time.time() - 1000))
    codes, printed = trained("--resume", "train.steps=1")
    assert codes == [0] * RANKS
    (startup,) = (line for line in printed[1].splitlines() if line.startswith("startup "))
    assert re.match(r"startup 1\d\d\d\.\d s: start and imports 1\d\d\d\.\d \(rank \d\), ", startup)
    for phase in ("meeting", "checks", "world", "groups", "model", "data", "first step"):
        assert f", {phase} " in startup
    logs = [recipe.parent / f"runs/tiny/log_rank_{rank}.txt" for rank in range(RANKS)]
    assert all(f"rank {rank} owns" in log.read_text() for rank, log in enumerate(logs))
    (node,) = recipe.parent.glob("node/*")
    assert not [*node.iterdir()], "each rank has removed what it wrote there"
    run_dir = recipe.parent / "runs" / "tiny"
    assert f"no checkpoint in {run_dir} yet: starting anew\n" in printed[0]
    codes, printed = trained("--resume", "train.steps=2")
    assert codes == [0] * RANKS
    assert f"the run continues from {run_dir / 'checkpoints' / 'step_1'}\n" in printed[0]
    assert [line["step"] for line in metrics(recipe)] == [0, 1]
    assert not list(run_dir.parent.glob("tiny.*")), "moved aside"


def test_an_error_that_all_ranks_meet_in_the_run_is_printed_by_one_of_them(
    trained: Callable[..., tuple[list[int], list[str]]], recipe: Path
) -> None:
    corrupt(recipe)
    codes, printed = trained("data.max_skipped_samples=0")
    assert codes[0] == 1
    text = "".join(printed)
    assert text.count("more than data.max_skipped_samples 0") == 1
    assert text.count("Traceback") == 1


def test_a_thread_that_fails_ends_its_rank_though_the_main_thread_is_stuck(
    run_ranks: RunRanks, recipe: Path
) -> None:
    arguments = [str(recipe), "language.grid.dp=2", "train.micro_batch_size=2"]
    given = (free_port(), recipe.parent, arguments)
    with pytest.raises(RanksFailed) as caught:
        run_on_cpu(train_while_a_thread_fails, given, RANKS, timeout_seconds=30)
    assert all("ended with exit code 1" in error.reason for error in caught.value.errors)
    text = "".join((recipe.parent / f"printed_{rank}").read_text() for rank in range(RANKS))
    assert text.count("Traceback") == 1
    assert text.count("ValueError: no such luck\nrank ") == 1


def test_ranks_that_fail_differently_all_have_their_say(tmp_path: Path) -> None:
    store = tmp_path / "store"
    said = []
    for rank, problem in enumerate(["alike", "alike", "its own"]):
        environment = meeting.RankEnv(rank, RANKS, 0, f"file://{store}")
        one = Meeting(environment, timeout_seconds=5)
        with (tmp_path / "err").open("w") as file, redirect_stderr(file):
            one.last_words(RuntimeError(problem), tmp_path)
        said.append((tmp_path / "err").read_text().splitlines()[-2:])
    assert said == [
        ["RuntimeError: alike", "rank 0 failed"],
        [],
        ["RuntimeError: its own", "rank 2 failed"],
    ]
    assert "alike" in (tmp_path / "error_rank_1.txt").read_text()


def test_ranks_wait_as_long_as_one_of_them_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_PROGRESS_SECONDS", 0.05)
    store = f"file://{tmp_path / 'store'}"
    patient, slow = (
        Meeting(meeting.RankEnv(rank, 2, 0, store), timeout_seconds=0.5) for rank in range(2)
    )

    def work() -> None:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            slow.get_on()
            time.sleep(0.02)
        slow.agree(None)

    worker = threading.Thread(target=work)
    worker.start()
    patient.agree(None)
    worker.join()
    with (tmp_path / "err").open("w") as file, redirect_stderr(file), pytest.raises(Refused):
        patient.agree(None)
    assert (tmp_path / "err").read_text() == "rank 1: did not join within 0.5 s\n"


def test_ranks_that_do_not_come_are_named_within_the_time(tmp_path: Path) -> None:
    environment = meeting.RankEnv(0, RANKS, 0, f"file://{tmp_path / 'store'}")
    with redirect_stderr(StringIO()) as printed, pytest.raises(Refused) as refused:
        Meeting(environment, timeout_seconds=0.3).agree(None)
    assert printed.getvalue() == "ranks 1, 2: did not join within 0.3 s\n"
    assert refused.value.exit_code == 1  # no mistake of a person: another start may work


def test_a_wrong_input_counts_more_than_ranks_that_do_not_come(tmp_path: Path) -> None:
    environment = meeting.RankEnv(0, RANKS, 0, f"file://{tmp_path / 'store'}")
    with redirect_stderr(StringIO()) as printed, pytest.raises(Refused) as refused:
        Meeting(environment, timeout_seconds=0.3).agree(InputError("no such key"))
    assert printed.getvalue() == "rank 0: no such key\nranks 1, 2: did not join within 0.3 s\n"
    assert refused.value.exit_code == 2
