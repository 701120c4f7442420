"""Ranks of torchrun or srun: they agree on the input and report with one voice."""

from __future__ import annotations

import os
import shutil
import threading
import time
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
from tests.conftest import RunRanks
from tests.mimo.checkpoint.manifests import small_checkpoint, write_manifest
from tests.mimo.runs import corrupt
from tests.mimo.runtime.conftest import (
    RANKS,
    SETTINGS,
    Trained,
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


def join(port: int, timeout_seconds: float) -> Rendezvous:
    from mimo.runtime.ranks import rank_environment

    as_task_of_srun(port)
    environment = rank_environment()
    assert environment is not None
    return Rendezvous(environment, timeout_seconds)


def fail_to_join(port: int) -> str:
    """Return the error."""
    try:
        join(port, 5)
    except InputError as error:
        return str(error)
    return "joined"


def refuse(port: int) -> int:
    """The exit code of ranks that all leave twice, of which rank 1 is late."""

    def wrong() -> None:
        raise InputError("wrong")

    met, code = join(port, 20), 0
    if os.environ["SLURM_PROCID"] == "1":
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
        answers = run_on_cpu(fail_to_join, (port,), RANKS, timeout_seconds=60)
    for rank, answer in enumerate(answers):
        action = "did not find the store of rank 0" if rank else "opened no store"
        assert answer.startswith(f"rank {rank} {action} at localhost:{port}: "), answer
        assert answer.endswith("else set MASTER_ADDR and MASTER_PORT")


@pytest.mark.parametrize("broken_rank", [None, 2])
def test_what_is_wrong_with_a_recipe_is_printed_once_and_with_the_rank_if_others_find_nothing(
    trained: Trained, broken_rank: int | None
) -> None:
    overrides = ["train.stepps=3"] if broken_rank is None else []
    codes, printed = trained(*overrides, broken_rank=broken_rank)
    assert codes == [2] * RANKS
    assert printed[0].count("did you mean 'steps'") == 1
    assert printed[0].startswith("rank 2: ") == (broken_rank == 2)
    assert printed[1:] == ["", ""]


def test_a_resume_that_is_refused_or_has_nothing_to_do_ends_all_ranks_and_writes_nothing(
    trained: Trained, recipe: Path
) -> None:
    whole = load_recipe(recipe)
    made = small_checkpoint(whole.run_dir / "checkpoints", 3, whole.to_yaml())
    shutil.copytree(recipe.parent / "tokenizer", made / "assets", dirs_exist_ok=True)
    write_manifest(made)
    codes, printed = trained("--resume", "language.model.num_layers=4")
    assert codes == [2] * RANKS
    assert f"language.model.num_layers: got 4, but {made} was trained with 2" in printed[0]
    codes, printed_later = trained("--resume", "train.steps=2")
    assert codes == [0] * RANKS
    assert printed_later[0] == "already at step 3 of 2; raise train.steps to go on\n"
    assert printed[1:] == printed_later[1:] == ["", ""]
    assert [path.name for path in whole.run_dir.iterdir()] == ["checkpoints"]


def test_an_error_that_all_ranks_meet_in_the_run_is_printed_by_one_of_them(
    trained: Trained, recipe: Path
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
    arguments = (free_port(), recipe.parent, [str(recipe), *SETTINGS])
    with pytest.raises(RanksFailed) as caught:
        run_on_cpu(train_while_a_thread_fails, arguments, RANKS, timeout_seconds=30)
    assert all("ended with exit code 1" in error.reason for error in caught.value.errors)
    text = "".join((recipe.parent / f"printed_{rank}").read_text() for rank in range(RANKS))
    assert text.count("Traceback") == 1
    assert text.count("ValueError: no such luck\nrank ") == 1


def test_ranks_that_fail_differently_all_have_their_say(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ends = []
    for rank, problem in enumerate(["alike", "alike", "its own"]):
        environment = RankEnv(rank, RANKS, 0, f"file://{store}")
        ranks = Rendezvous(environment, timeout_seconds=5)
        with (tmp_path / "err").open("w") as file, redirect_stderr(file):
            ranks.report_failure(RuntimeError(problem), tmp_path)
        ends.append((tmp_path / "err").read_text().splitlines()[-2:])
    assert ends == [
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


@pytest.mark.parametrize("problem", ["", "no such key"])
def test_ranks_that_do_not_come_are_named_within_the_time_and_bad_input_decides_the_exit_code(
    tmp_path: Path, problem: str
) -> None:
    environment = RankEnv(0, RANKS, 0, f"file://{tmp_path / 'store'}")
    error = InputError(problem) if problem else None
    with redirect_stderr(StringIO()) as printed, pytest.raises(Refused) as refused:
        Rendezvous(environment, timeout_seconds=0.3).agree(error)
    expected = f"rank 0: {problem}\n" if problem else ""
    assert printed.getvalue() == f"{expected}ranks 1, 2: did not join within 0.3 s\n"
    assert refused.value.exit_code == (2 if problem else 1)  # another start may work
