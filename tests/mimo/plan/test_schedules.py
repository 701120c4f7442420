"""The tasks of a step: Megatron's orders, closed forms of their time, deadlocks, who waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
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
    Rows,
    StepCosts,
    StepTasks,
    interleaved,
    one_f_one_b,
)
from mimo.plan.simulate import Deadlock, Timeline, run_tasks


def costs_of(
    m: int, lanes: int, parts: int, forward: float, backward: float, message: float = 0.0
) -> ModuleCosts:
    shape = m, lanes, parts
    seconds = np.full(shape, forward), np.full(shape, backward)
    return ModuleCosts(*seconds, np.full((m, lanes), message), backward > 0)


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
    language: tuple[float, float, float] = (1.0, 2.0, 0.0),
    message: float = 0.0,
) -> StepTasks:
    """Return a step in which every lane of a module exchanges rows with all of the language's.

    language: seconds of forward and backward of all parts of a stage, and of a message between
    stages. message: seconds of the rows of a microbatch.
    """
    grid = GridSpec(LANGUAGE, pp=pp, vpp=vpp, dp=dp)
    guests = {**encoders, **generators}
    layers = max(2 * pp * vpp, levels)
    links = {name: links_of(name, pp, vpp, layers, levels) for name in encoders if levels}
    size = grid.size + sum(g.size for name, g in guests.items() if name not in colocated)
    layout = Layout(grid, dict(encoders), size, colocated, links, generators=dict(generators))
    forward, backward, between = language
    modules = {LANGUAGE: costs_of(m, dp, pp * vpp, forward / vpp, backward / vpp, between)}
    rows = dict[str, Sequence[Rows]]()
    for name, guest in guests.items():
        modules[name] = costs_of(m, guest.dp, guest.pp, 0.3, 0.0 if name in frozen else 0.6)
        pairs = np.array([*product(range(guest.dp), range(dp))])
        rows[name] = [Rows(pairs, np.full(len(pairs), message))] * m
    ahead = dict.fromkeys(encoders, run_ahead)
    return StepTasks(layout, StepCosts(modules, rows), ahead, group or m)


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


@pytest.mark.parametrize("pp", [2, 3])
def test_messages_between_stages_delay_the_first_microbatch_there_and_back(pp: int) -> None:
    step = step_of(1, pp, language=(1.0, 2.0, 0.25))
    assert run(step).seconds == pytest.approx(3.0 * pp + 2 * 0.25 * (pp - 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "vpp", "m"), [(2, 2, 2), (2, 2, 4), (4, 2, 8), (3, 3, 6), (4, 1, 6)]
)
def test_stages_run_in_the_order_of_megatron(pp: int, vpp: int, m: int) -> None:
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        pipeline: Any = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None
        )
        total, _, warmup, remaining = get_pp_rank_microbatches(
            m, vpp, pp, p2p_communicator=pipeline
        )
        table = get_schedule_table(m, vpp, pp)
        forwards: list[Op] = [(FORWARD, *place) for place in table]
        backwards: list[Op] = [(BACKWARD, n, vpp - 1 - chunk) for n, chunk in table]
        expected = forwards[:warmup]
        for place in range(remaining):
            expected += [forwards[warmup + place], backwards[place]]
        expected += backwards[remaining:]
        order = one_f_one_b(range(m), pp - stage - 1)
        if vpp > 1:
            order = interleaved(range(m), stage, pp, vpp)
        assert [*order] == expected
        assert len(expected) == 2 * total


def test_without_a_backward_a_stage_runs_its_forwards_in_the_same_order() -> None:
    assert [*one_f_one_b(range(5), 1, has_backward=False)] == [(FORWARD, n, 0) for n in range(5)]
    both = [op for op in interleaved(range(4), 1, 2, 2) if op[0] == FORWARD]
    assert [*interleaved(range(4), 1, 2, 2, has_backward=False)] == both


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
        assert not any(t.module == "vision" and t.kind == BACKWARD for t in step.tasks)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_a_generator_of_its_own_ranks_draws_between_forward_and_backward(lanes: int) -> None:
    grids = {"image": GridSpec("image", dp=lanes)}
    for pp, vpp, m in GRID:
        step = step_of(m, pp, vpp, dp=2, generators=grids, message=0.5)
        timeline, last = run(step), step_number(step)
        for n, lane, to in product(range(m), range(lanes), range(2)):
            part = pp * vpp - 1
            begun = timeline.start[last["image", FORWARD, n, lane, 0]]
            assert begun >= timeline.end[last[LANGUAGE, FORWARD, n, to, part]] + 0.5
            drawn = timeline.end[last["image", BACKWARD, n, lane, 0]]
            assert timeline.start[last[LANGUAGE, BACKWARD, n, to, part]] >= drawn + 0.5


def step_number(step: StepTasks) -> dict[tuple[str, str, int, int, int], int]:
    """Number the tasks by module, kind, microbatch, lane and part, from the order of each worker.

    A task of the n-th chunk is the n-th of its microbatch on its worker, backward reversed.
    """
    numbers, seen = dict[tuple[str, str, int, int, int], int](), dict[tuple[int, str, int], int]()
    for number, task in enumerate(step.tasks):
        worker = step.workers[task.worker]
        grid = step.layout.grids[task.module]
        key = task.worker, f"{task.module} {task.kind}", task.microbatch
        chunk = seen[key] = seen.get(key, -1) + 1
        chunk = grid.vpp - 1 - chunk if task.kind == BACKWARD else chunk
        part = chunk * grid.pp + worker.stage
        numbers[task.module, task.kind, task.microbatch, worker.lane, part] = number
    return numbers


def test_a_colocated_generator_lengthens_the_forward_by_its_forward_and_backward() -> None:
    step = step_of(3, dp=2, generators=IMAGE, colocated=frozenset({"image"}))
    assert run(step).seconds == pytest.approx(3 * (1.0 + 2.0 + 0.3 + 0.6))
    assert step.layout.ahead == 0
    assert {worker.module for worker in step.workers} == {LANGUAGE}


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("levels", [0, 3])
def test_rows_are_waited_for_by_each_stage_that_has_a_link(pp: int, vpp: int, levels: int) -> None:
    m, message = 4, 0.75
    ahead = minimum_run_ahead(pp, vpp, m) + 1
    sizes = {"dp": 2, "encoders": VISION, "levels": levels, "message": message}
    step = step_of(m, pp, vpp, run_ahead=ahead, **sizes)
    timeline, numbers = run(step), step_number(step)
    # Two layers to a part: levels 1 and 2 are added in part 0, level 3 in part 1.
    parts = {0} | {layer // 2 for layer in range(levels) if layer // 2 < pp * vpp}
    if pp * vpp == 1:
        parts = {0}
    for part in range(pp * vpp):
        for n, lane, to in product(range(m), range(2), range(2)):
            forward = step.tasks[numbers[LANGUAGE, FORWARD, n, to, part]]
            sent = numbers["vision", ENCODE, n, lane, 0]
            assert ((sent, message) in forward.after) == (part in parts)
            backward = numbers[LANGUAGE, BACKWARD, n, to, part]
            returned = step.tasks[numbers["vision", BACKWARD, n, lane, 0]]
            assert ((backward, message) in returned.after) == (part in parts)
            start = timeline.start[numbers["vision", BACKWARD, n, lane, 0]]
            assert part not in parts or start >= timeline.end[backward] + message - 1e-9


# ------------------------------------------------------------------ colocated encoders


@pytest.mark.parametrize(
    ("pp", "vpp", "group"), [(1, 1, 1), (1, 1, 3), (2, 1, 2), (2, 1, 6), (2, 2, 2), (2, 2, 4)]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_colocated_encoders_encode_a_group_before_its_forwards(
    pp: int, vpp: int, group: int, frozen: bool
) -> None:
    encoders = {"vision": GridSpec("vision", dp=2 * pp), "audio": GridSpec("audio", tp=pp, dp=2)}
    step = step_of(
        6,
        pp,
        vpp,
        dp=2,
        encoders=encoders,
        colocated=frozenset(encoders),
        group=group,
        frozen=frozenset(encoders) if frozen else frozenset(),
        message=0.4,
    )
    timeline = run(step)
    assert len(step.workers) == 2 * pp

    def times(module: str, kind: str, numbers: range) -> list[tuple[float, float]]:
        return [
            (timeline.start[n], timeline.end[n])
            for n, task in enumerate(step.tasks)
            if (task.module, task.kind) == (module, kind) and task.microbatch in numbers
        ]

    for first in range(0, 6, group):
        numbers = range(first, min(first + group, 6))
        # Rows of a group are exchanged in one go.
        exchange = 0.4 * len(numbers)
        start = min(s for s, _ in times(LANGUAGE, FORWARD, numbers))
        end = max(e for _, e in times(LANGUAGE, BACKWARD, numbers))
        for name in encoders:
            encodes = times(name, ENCODE, numbers)
            assert len(encodes) == 2 * pp
            assert max(e for _, e in encodes) + exchange <= start + 1e-9
            for began, ended in encodes:
                assert ended - began == pytest.approx(0.3 * len(numbers))
            backwards = times(name, BACKWARD, numbers)
            assert len(backwards) == (0 if frozen else 2 * pp)
            first_part = timeline.end[last_backward_of_stage_0(step, numbers)].max()
            assert all(s >= first_part + exchange - 1e-9 for s, _ in backwards)
            assert end >= first_part


def last_backward_of_stage_0(step: StepTasks, numbers: range) -> list[int]:
    """Return the last backward of a group on the first stage, for each lane."""
    last = dict[int, int]()
    for number, task in enumerate(step.tasks):
        is_first_stage = step.workers[task.worker].stage == 0
        if (task.module, task.kind) == (LANGUAGE, BACKWARD) and is_first_stage:
            last |= {task.worker: number} if task.microbatch in numbers else {}
    return [*last.values()]


def test_a_group_with_unequal_lanes_waits_for_the_slowest_lane() -> None:
    encoders = {"vision": GridSpec("vision", dp=2)}
    step = step_of(2, dp=2, encoders=encoders, colocated=frozenset(encoders))
    even = run(step).seconds
    costs = step.costs.modules["vision"]
    costs.forward[:, 1] += 1.0
    uneven = StepTasks(step.layout, step.costs, {}, 2)
    assert run(uneven).seconds == pytest.approx(even + 2.0)
