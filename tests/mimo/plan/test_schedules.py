"""The tasks of a step: Megatron's orders, closed forms of their time, deadlocks, and waits."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, links_of, minimum_run_ahead
from mimo.plan.schedules import (
    BACKWARD,
    ENCODE,
    FORWARD,
    ModuleCosts,
    Op,
    StepTasks,
    order_of_stage,
)
from mimo.plan.simulate import Deadlock, Timeline, run_tasks


def costs_of(shape: tuple[int, int, int], first: float, back: float) -> ModuleCosts:
    """Return equal costs. shape: (M, L, P). first, back: seconds of forward and backward."""
    passes = np.full(shape, first), np.full(shape, back)
    return ModuleCosts(*passes, np.zeros(shape[:2]), back > 0)


def step_of(
    m: int,
    pp: int = 1,
    vpp: int = 1,
    dp: int = 1,
    encoders: Mapping[str, GridSpec] = {},
    generators: Mapping[str, GridSpec] = {},
    colocated: frozenset[str] = frozenset(),
    run_ahead: int = 1,
    group: int | None = None,
    frozen: frozenset[str] = frozenset(),
    levels: int = 0,
    message: float = 0.0,
) -> StepTasks:
    """Return a step in which every lane of a module exchanges rows with all of the language's.

    A stage has a forward of 1 s and a backward of 2 s. message: seconds of a microbatch's rows.
    """
    grid, layers = GridSpec(LANGUAGE, pp=pp, vpp=vpp, dp=dp), max(2 * pp * vpp, levels)
    guests = {**encoders, **generators}
    links = {name: links_of(name, pp, vpp, layers, levels) for name in encoders if levels}
    size = grid.size + sum(g.size for name, g in guests.items() if name not in colocated)
    layout = Layout(grid, dict(encoders), size, colocated, links, generators=dict(generators))
    costs = {LANGUAGE: costs_of((m, dp, pp * vpp), 1.0 / vpp, 2.0 / vpp)}
    for name, guest in guests.items():
        of_passes = costs_of((m, guest.dp, guest.pp), 0.3, 0.0 if name in frozen else 0.6)
        costs[name] = replace(of_passes, rows=np.full((m, guest.dp, dp), message))
    return StepTasks(layout, costs, dict.fromkeys(encoders, run_ahead), group or m)


def run(step: StepTasks) -> Timeline:
    return run_tasks(step.workers, step.tasks)


VISION = {"vision": GridSpec("vision", dp=2)}
IMAGE = {"image": GridSpec("image", dp=2)}


@pytest.mark.parametrize(("pp", "m"), [*product((1, 2, 4), (1, 3, 8))])
def test_1f1b_with_equal_costs_takes_its_closed_form(pp: int, m: int) -> None:
    assert run(step_of(m, pp)).seconds == pytest.approx((m + pp - 1) * 3.0)


@pytest.mark.parametrize(("pp", "vpp", "groups"), [*product((2, 3, 4), (2, 3), (1, 3))])
def test_interleaved_1f1b_with_equal_costs_takes_its_closed_form(
    pp: int, vpp: int, groups: int
) -> None:
    m = groups * pp
    assert run(step_of(m, pp, vpp)).seconds == pytest.approx((m + (pp - 1) / vpp) * 3.0)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 2), (2, 2, 4), (4, 2, 8), (4, 1, 6)])
def test_stages_run_in_the_order_of_megatron(pp: int, vpp: int, m: int) -> None:
    from megatron.core.pipeline_parallel import schedules as megatron

    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        chunks = {"virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None}
        pipeline: Any = SimpleNamespace(pp_group=group, **chunks)
        _, _, warmup, remaining = megatron.get_pp_rank_microbatches(
            m, vpp, pp, p2p_communicator=pipeline
        )
        table = megatron.get_schedule_table(m, vpp, pp)
        forwards: list[Op] = [(FORWARD, *place) for place in table]
        backwards: list[Op] = [(BACKWARD, n, vpp - 1 - chunk) for n, chunk in table]
        pairs = zip(forwards[warmup:], backwards, strict=False)
        expected = [*forwards[:warmup], *chain(*pairs), *backwards[remaining:]]
        assert order_of_stage(range(m), stage, GridSpec(LANGUAGE, pp=pp, vpp=vpp)) == expected


# ---------------------------------------------------------------------- disjoint modules

GRID = [
    (pp, vpp, m)
    for pp, vpp, m in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12))
    if vpp == 1 or (pp > 1 and m % pp == 0)
]


@pytest.mark.parametrize("generators", [{}, IMAGE], ids=["reads", "draws"])
def test_an_encoder_deadlocks_exactly_below_the_least_run_ahead(
    generators: Mapping[str, GridSpec],
) -> None:
    for pp, vpp, m in GRID:
        ahead = int(bool(generators) and vpp == 1)
        least = minimum_run_ahead(pp, vpp, m, ahead)
        for run_ahead in range(least + 2):
            step = step_of(m, pp, vpp, encoders=VISION, generators=generators, run_ahead=run_ahead)
            assert step.layout.ahead == ahead
            if run_ahead < least:
                with pytest.raises(Deadlock, match=r"vision backward \d+ waits for language backw"):
                    run(step)
            else:
                assert math.isfinite(run(step).seconds)


def test_a_frozen_encoder_never_deadlocks() -> None:
    for pp, vpp, m in GRID:
        frozen = frozenset({"vision"})
        step = step_of(m, pp, vpp, encoders=VISION, run_ahead=0, frozen=frozen)
        assert math.isfinite(run(step).seconds)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_a_disjoint_generator_runs_between_the_last_forward_and_backward(lanes: int) -> None:
    grids = {"image": GridSpec("image", dp=lanes)}
    for pp, vpp, m in GRID:
        step = step_of(m, pp, vpp, dp=2, generators=grids, message=0.5)
        timeline, last = run(step), step.number
        for n, lane, to in product(range(m), range(lanes), range(2)):
            part = pp * vpp - 1
            begun = timeline.start[last["image", FORWARD, n, lane, 0]]
            assert begun >= timeline.end[last[LANGUAGE, FORWARD, n, to, part]] + 0.5
            drawn = timeline.end[last["image", BACKWARD, n, lane, 0]]
            assert timeline.start[last[LANGUAGE, BACKWARD, n, to, part]] >= drawn + 0.5


def test_a_colocated_generator_runs_its_forward_and_backward_in_the_forward() -> None:
    step = step_of(3, dp=2, generators=IMAGE, colocated=frozenset({"image"}))
    assert run(step).seconds == pytest.approx(3 * (1.0 + 2.0 + 0.3 + 0.6))
    assert {worker.module for worker in step.workers} == {LANGUAGE}


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("levels", [0, 3])
def test_rows_are_waited_for_by_each_stage_that_has_a_link(pp: int, vpp: int, levels: int) -> None:
    m, message, ahead = 4, 0.75, minimum_run_ahead(pp, vpp, 4) + 1
    step = step_of(m, pp, vpp, 2, VISION, run_ahead=ahead, levels=levels, message=message)
    timeline, numbers = run(step), step.number
    # Two layers to a part: levels 1 and 2 are added in part 0, level 3 in part 1.
    parts = {layer // 2 for layer in range(max(1, levels)) if layer // 2 < pp * vpp}
    for part, n, lane, to in product(range(pp * vpp), range(m), range(2), range(2)):
        forward = numbers[LANGUAGE, FORWARD, n, to, part]
        sent = numbers["vision", ENCODE, n, lane, 0]
        assert ((sent, message) in step.tasks[forward].after) == (part in parts)
        assert timeline.start[forward] >= timeline.end[sent] + message - 1e-9
        backward = numbers[LANGUAGE, BACKWARD, n, to, part]
        returned = numbers["vision", BACKWARD, n, lane, 0]
        assert ((backward, message) in step.tasks[returned].after) == (part in parts)
        assert part not in parts or timeline.start[returned] >= timeline.end[backward] + message


# ------------------------------------------------------------------ colocated encoders


@pytest.mark.parametrize(
    ("pp", "vpp", "group"), [(1, 1, 1), (1, 1, 3), (2, 1, 2), (2, 1, 6), (2, 2, 2), (2, 2, 4)]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_colocated_encoders_encode_a_group_before_its_forwards(
    pp: int, vpp: int, group: int, frozen: bool
) -> None:
    encoders = {"vision": GridSpec("vision", dp=2 * pp), "audio": GridSpec("audio", tp=pp, dp=2)}
    together = frozenset(encoders)
    options = {"colocated": together, "frozen": together if frozen else frozenset()}
    step = step_of(6, pp, vpp, dp=2, encoders=encoders, group=group, message=0.4, **options)
    timeline, number = run(step), step.number
    for first in range(0, 6, group):
        numbers = range(first, min(first + group, 6))
        exchange = 0.4 * len(numbers)  # rows of a group are exchanged at once
        forwards = [
            timeline.start[n]
            for n, task in enumerate(step.tasks)
            if (task.module, task.kind) == (LANGUAGE, FORWARD) and task.microbatch in numbers
        ]
        last = [number[LANGUAGE, BACKWARD, numbers[-1], lane, 0] for lane in range(2)]
        for name, worker in product(encoders, range(2 * pp)):
            encode = number[name, ENCODE, first, worker, 0]
            assert timeline.end[encode] + exchange <= min(forwards) + 1e-9
            assert step.tasks[encode].seconds == pytest.approx(0.3 * len(numbers))
            backward = number.get((name, BACKWARD, first, worker, 0))
            assert (backward is None) == frozen
            if backward is not None:
                assert timeline.start[backward] >= timeline.end[last].max() + exchange - 1e-9
