"""Ranks of torchrun or srun: they agree on the input and report with one voice."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import InputError
from mimo.runtime import rendezvous
from mimo.runtime.processes import RanksFailed
from mimo.runtime.ranks import RankEnv, run_on_cpu
from mimo.runtime.rendezvous import Refused, Rendezvous
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


def meet(port: int) -> str:
    """Return what rank 0 tells all ranks, or the error."""
    from mimo.runtime.ranks import rank_environment

    as_task_of_srun(port)
    environment = rank_environment()
    assert environment is not None
    try:
        met = Rendezvous(environment, timeout_seconds=5)
        met.agree(None)
        answer = met.from_rank_0(lambda: "welcome")
    except InputError as error:
        answer = str(error)
    if environment.rank == 0:
        time.sleep(1)  # its store is used until then
    return answer


def refuse(port: int) -> int:
    """The exit code of ranks that all leave twice, of which rank 1 is late."""
    from mimo.runtime.ranks import rank_environment

    def wrong() -> None:
        raise InputError("wrong")

    as_task_of_srun(port)
    environment = rank_environment()
    assert environment is not None
    met, code = Rendezvous(environment, timeout_seconds=20), 0
    if environment.rank == 1:
        time.sleep(1)
    try:
        met.from_rank_0(wrong)
    except Refused as refused:
        code = refused.exit_code
    met.leave()
    return code


# -------------------------------------------------------------------------------- tests


def test_a_late_rank_hears_why_the_others_leave(run_ranks: RunRanks) -> None:
    assert run_on_cpu(refuse, (free_port(),), RANKS, timeout_seconds=60) == [2] * RANKS


def test_a_port_that_is_taken_is_named_by_every_rank_with_what_to_set() -> None:
    with other_program(greeting=b"no\n") as port:
        answers = run_on_cpu(meet, (port,), RANKS, timeout_seconds=60)
    for rank, answer in enumerate(answers):
        action = "did not find the store of rank 0" if rank else "opened no store"
        assert answer.startswith(f"rank {rank} {action} at localhost:{port}: "), answer
        assert answer.endswith("else set MASTER_ADDR and MASTER_PORT")


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
    trained: Callable[..., tuple[list[int], list[str]]], recipe: Path
) -> None:
    codes, printed = trained("--resume", "train.steps=1")
    assert codes == [0] * RANKS
    logs = [recipe.parent / f"runs/tiny/log_rank_{rank}.txt" for rank in range(RANKS)]
    assert all(f"rank {rank} owns" in log.read_text() for rank, log in enumerate(logs))
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
        environment = RankEnv(rank, RANKS, 0, f"file://{store}")
        one = Rendezvous(environment, timeout_seconds=5)
        with (tmp_path / "err").open("w") as file, redirect_stderr(file):
            one.report_failure(RuntimeError(problem), tmp_path)
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
    monkeypatch.setattr(rendezvous, "_PROGRESS_SECONDS", 0.05)
    store = f"file://{tmp_path / 'store'}"
    patient, slow = (
        Rendezvous(RankEnv(rank, 2, 0, store), timeout_seconds=0.5) for rank in range(2)
    )

    def work() -> None:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            slow.report_progress()
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
    environment = RankEnv(0, RANKS, 0, f"file://{tmp_path / 'store'}")
    with redirect_stderr(StringIO()) as printed, pytest.raises(Refused) as refused:
        Rendezvous(environment, timeout_seconds=0.3).agree(None)
    assert printed.getvalue() == "ranks 1, 2: did not join within 0.3 s\n"
    assert refused.value.exit_code == 1  # no mistake of a person: another start may work


def test_a_wrong_input_counts_more_than_ranks_that_do_not_come(tmp_path: Path) -> None:
    environment = RankEnv(0, RANKS, 0, f"file://{tmp_path / 'store'}")
    with redirect_stderr(StringIO()) as printed, pytest.raises(Refused) as refused:
        Rendezvous(environment, timeout_seconds=0.3).agree(InputError("no such key"))
    assert printed.getvalue() == "rank 0: no such key\nranks 1, 2: did not join within 0.3 s\n"
    assert refused.value.exit_code == 2
