"""Batches are read, planned, packed and staged off the training thread, few at a time.

Rank 0 has the tower, rank 1 the language model; rank 1 is slow at everything that it prepares.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.dataset import open_dataset
from mimo.parallel.connections import SHARED_MEMORY
from tests.conftest import RunRanks
from tests.mimo.runs import corrupt, open_trainer, shards

STEPS = 5
# Not packed by the thread that trains: the names, and where each is called.
PREPARING = (
    ("mimo.model.step_plan.StepPlanner", "microbatches"),
    ("mimo.model.step_plan.StepPlanner", "finish"),
    ("bridge.plan", "_exchange"),
    ("mimo.model.decoding", "pack_lane"),
    ("mimo.train.batches", "gather_items"),
    ("mimo.model.modules", "stage_lane"),
    ("mimo.model.modules", "stage_items"),
    ("mimo.model.step_plan.StepFlops", "of"),
    ("data.index.reader.SampleReader", "sample"),
    ("data.index.reader.SampleReader", "patches"),
)
ONE_RANK = ("encoders.vision.placement=colocated",)
VALIDATED = ("train.validate_every=2", "train.validation_batches=2")


@pytest.fixture
def recipe(recipe: Path) -> Path:
    corrupt(recipe)
    return recipe


# ------------------------------------------------------- functions that run inside ranks


def _around(where: str, name: str, before: Callable[[], None]) -> None:
    """Call ``before`` before each call of what ``where`` calls ``name``."""
    from pydoc import locate

    owner: Any = locate(where)
    original = getattr(owner, name)

    def called(*args: Any, **settings: Any) -> Any:
        before()
        return original(*args, **settings)

    setattr(owner, name, called)


def _trained(path: Path, *overrides: str) -> Iterator[dict[str, Any]]:
    """The metrics of training on this rank, as they are made."""
    from mimo.train.step import StepObserver

    recipe = load_recipe(path, [f"train.steps={STEPS}", *overrides])
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    trainer, dataset = open_trainer(recipe)
    validation = open_dataset(recipe, "validation", trainer.chat, trainer.processors)
    return trainer.train(dataset, validation, StepObserver())


def _own_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("loader", "preparer"))]


def train_beside_a_slow_rank(rank: int, path: Path, overrides: list[str]) -> dict[str, Any]:
    """Train while rank 1 is slow; return its threads, messages and metrics."""
    from mimo.train import batches
    from mimo.train.step import StepSums

    threads, messages = dict[str, set[str]](), list[tuple[str, bool]]()
    for where, name in PREPARING:
        seen = threads[f"{where}.{name}"] = set()
        _around(where, name, lambda seen=seen: seen.add(threading.current_thread().name))
    if rank == 1:
        _around("mimo.model.decoding", "pack_lane", lambda: time.sleep(0.02))
        _around("data.index.reader.SampleReader", "sample", lambda: time.sleep(0.01))
    summed = batches.sum_over_world

    def note_and_sum(terms: Any) -> Any:
        messages.append((threading.current_thread().name, isinstance(terms[0], StepSums)))
        return summed(terms)

    batches.sum_over_world = note_and_sum
    metrics = list(_trained(path, *overrides))
    seen = {"threads": threads, "messages": messages, "metrics": metrics}
    return seen | {"left": _own_threads()}


def train_and_count(rank: int, path: Path, mib: int) -> list[tuple[int, int]]:
    """For each step, how many read batches and how many prepared ones there are meanwhile."""
    from data.loader import LoadedStep
    from mimo.train import step as steps
    from mimo.train.batches import RankBatch

    made: list[tuple[type, weakref.ref[Any]]] = []
    for kind in (LoadedStep, RankBatch):
        initialise = kind.__init__

        def note(
            self: Any, *args: Any, _kind=kind, _initialise=initialise, **settings: Any
        ) -> None:
            _initialise(self, *args, **settings)
            made.append((_kind, weakref.ref(self)))

        kind.__init__ = note  # type: ignore[method-assign]
    counts = []

    def count() -> None:
        quiet = 0
        while quiet < 3:  # the background does what it may
            used = time.process_time()
            time.sleep(0.2)
            quiet = quiet + 1 if time.process_time() - used < 0.02 else 0
        gc.collect()
        alive = [kind for kind, one in list(made) if one() is not None]
        counts.append((alive.count(LoadedStep), alive.count(RankBatch)))

    _around("mimo.train.step", "run_modules", count)
    assert steps.run_modules.__name__ == "called"
    list(_trained(path, *ONE_RANK, f"data.prefetch_mib={mib}"))
    return counts


def fail_while_preparing(rank: int, path: Path, where: str, name: str) -> dict[str, Any]:
    """Training in which the third step's call of ``name`` fails in the background."""
    calls = 0

    def fail_later() -> None:
        nonlocal calls
        calls += 1
        if calls == 3 * (1 if name == "finish" else 12):
            error = KeyError("the third step")
            error.add_note("noted in the background")
            raise error

    _around(where, name, fail_later)
    done: list[dict[str, Any]] = []
    with pytest.raises(KeyError) as raised:
        done.extend(_trained(path, *ONE_RANK))
    error = (*raised.value.args, *raised.value.__notes__)
    return {"error": error, "done": len(done), "left": _own_threads()}


def train_and_share(rank: int, path: Path, shared: bool, overrides: list[str]) -> dict[str, Any]:
    """Metrics, what this rank decoded itself, and its host.

    shared: whether the ranks know that they are on one host.
    """
    from mimo.model import decoding
    from mimo.parallel.connections import Host

    find_host, decoded, hosts = decoding.find_host, list[str](), list[Host]()

    def find() -> Host:
        host = find_host()
        hosts.append(host if shared else replace(host, ranks=(rank,), job=f"test{rank}"))
        return hosts[-1]

    decoding.find_host = find
    for name in ("sample", "patches"):
        where = "data.index.reader.SampleReader"
        _around(where, name, lambda name=name: decoded.append(name))
    metrics = list(_trained(path, *overrides))
    return {"metrics": metrics, "decoded": decoded, "host": hosts[0]}


# ---------------------------------------------------------------------------- tests


@pytest.mark.slow
def test_the_training_thread_neither_reads_nor_plans_nor_packs_whatever_is_prepared_ahead(
    run_ranks: RunRanks, recipe: Path
) -> None:
    validated = [shards(recipe, "train", split="validation"), *VALIDATED]
    losses = []
    for mib, settings in ((0, validated), (512, validated), (512, [])):
        overrides = [*settings, f"data.prefetch_mib={mib}"]
        ranks = run_ranks(train_beside_a_slow_rank, 2, recipe, overrides)
        for seen in ranks:
            assert seen["left"] == []
            for name, threads in seen["threads"].items():
                assert not any(thread == "MainThread" for thread in threads), name
            # One sum per step and one before the first, each by the training thread.
            assert {thread for thread, _ in seen["messages"]} == {"MainThread"}
            sums = len(seen["messages"])
            assert sums == (1 + STEPS + 2 * (1 + 2) if settings else 1 + STEPS)
            # Rank 0 could not read it; each rank leaves it out of every step and counts it once.
            steps = [m for m in seen["metrics"] if "loss" in m]
            assert [m["skipped_samples"] for m in steps] == [1] * STEPS
        assert ranks[0]["messages"] == ranks[1]["messages"]
        planned = [seen["threads"]["mimo.model.step_plan.StepPlanner.finish"] for seen in ranks]
        assert planned == [{"preparer_0"}] * 2
        losses.append([m["loss"] for m in ranks[0]["metrics"] if "loss" in m])
    assert losses == [losses[0]] * 3


def test_what_ranks_of_a_colocated_encoder_lane_share_out_is_planned_ahead_too(
    run_ranks: RunRanks, recipe: Path
) -> None:
    overrides = [*ONE_RANK, "encoders.vision.grid={tp: 2}", "language.grid={dp: 2}"]
    overrides.append("train.global_batch_size=16")
    for seen in run_ranks(train_beside_a_slow_rank, 2, recipe, overrides):
        assert seen["threads"]["bridge.plan._exchange"] == {"preparer_0"}


@pytest.mark.parametrize(
    ("mib", "most"),
    [(0, (1, 2)), pytest.param(512, (STEPS - 2, 2), marks=pytest.mark.slow)],
)
def test_one_step_waits_whatever_the_recipe_says_and_two_at_most_are_staged(
    run_ranks: RunRanks, recipe: Path, mib: int, most: tuple[int, int]
) -> None:
    (counts,) = run_ranks(train_and_count, 1, recipe, mib)
    assert len(counts) == STEPS
    assert counts[0] == most
    assert all(read <= most[0] and staged <= most[1] for read, staged in counts)
    assert counts[-1] == (0, 1)


@pytest.mark.parametrize(
    ("where", "name"),
    [("mimo.model.step_plan.StepPlanner", "finish"), ("data.index.reader.SampleReader", "sample")],
)
def test_an_error_in_the_background_reaches_the_training_thread_as_it_was(
    run_ranks: RunRanks, recipe: Path, where: str, name: str
) -> None:
    (seen,) = run_ranks(fail_while_preparing, 1, recipe, where, name)
    assert seen["error"] == ("the third step", "noted in the background")
    # What was read before it is trained on: the third step's samples are read during the first.
    assert seen["done"] == (2 if name == "finish" else 0)
    assert seen["left"] == []


@pytest.mark.slow
def test_ranks_of_a_lane_on_one_host_decode_once_for_all_of_them_and_learn_the_same(
    run_ranks: RunRanks, recipe: Path
) -> None:
    pair = ["language.grid.tp=2", "encoders.vision.grid.tp=2", *ONE_RANK, *VALIDATED]
    pair.append(shards(recipe, "train", split="validation"))
    runs = [
        run_ranks(train_and_share, 2, recipe, shared, [*pair, f"data.workers={workers}"])
        for shared, workers in ((False, 0), (True, 0), (True, 1), (False, 2))
    ]
    keys = ("loss", "validation_loss", "skipped_samples")
    lines = [[[[m.get(k) for k in keys] for m in rank["metrics"]] for rank in run] for run in runs]
    assert lines == [lines[0]] * len(runs)
    assert lines[0][0] == lines[0][1]
    assert [skipped for loss, _, skipped in lines[0][0] if loss is not None] == [1] * STEPS
    alone, together, *with_workers = ([rank["decoded"] for rank in run] for run in runs)
    for kind in ("sample", "patches"):
        assert alone[0].count(kind) == alone[1].count(kind) == sum(d.count(kind) for d in together)
        assert all(d.count(kind) > alone[0].count(kind) / 3 for d in together), "evenly"
    assert with_workers == [[[], []]] * 2
    hosts = [rank["host"] for run in runs for rank in run]
    assert [host.ranks for host in hosts[:4]] == [(0,), (1,), (0, 1), (0, 1)]
    assert {host.cores_per_rank for host in hosts} == {len(os.sched_getaffinity(0)) // 2}
    assert not [left for host in hosts for left in SHARED_MEMORY.glob(f"mimo-*-{host.job}")]


def test_waits_for_data_are_reported_apart_from_the_host_s_own_time(
    run_ranks: RunRanks, recipe: Path
) -> None:
    ranks = run_ranks(train_and_wait, 2, recipe)
    for metrics in ranks:
        for step in metrics:
            # Rank 1 is all of the language model; rank 0, which is quick, waits for it elsewhere.
            assert step["data_wait_seconds"] >= SLOW
            assert step["step_seconds"] >= step["data_wait_seconds"] * (metrics is ranks[1])
            assert 0 < step["host_seconds"] <= step["step_seconds"]
    for step in ranks[1]:
        assert step["host_seconds"] + step["data_wait_seconds"] <= step["step_seconds"]


SLOW = 0.25


def train_and_wait(rank: int, path: Path) -> list[dict[str, Any]]:
    """Metrics of steps whose samples rank 1 is slow to get."""
    if rank == 1:
        _around("data.loader.StepLoader", "next", lambda: time.sleep(SLOW))
    metrics = list(_trained(path))
    return metrics[: STEPS - 2]  # the last two steps read nothing
