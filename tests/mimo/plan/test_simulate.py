"""Simulated time: the longest path with a core for each rank, and equal shares of fewer cores."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.plan.simulate import Deadlock, Task, Worker, run_tasks

SECONDS = st.floats(0, 10)
Step = tuple[list[Worker], list[Task]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Workers, each its numbers module, and tasks that wait for earlier ones in the list."""
    num_workers, num_tasks = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    workers = [Worker(f"m{n}", ranks=draw(st.integers(1, 3))) for n in range(num_workers)]
    tasks = list[Task]()
    for number in range(num_tasks):
        before = draw(st.lists(st.integers(0, number - 1), unique=True)) if number else []
        after = [(n, draw(SECONDS)) for n in before]
        worker = draw(st.integers(0, num_workers - 1))
        tasks.append(Task(worker, f"m{worker}", "forward", number, draw(SECONDS), after))
    return workers, tasks


def longest_paths(tasks: Sequence[Task]) -> np.ndarray:
    """Return the end of each task by Bellman-Ford over an edge list, tasks in any order."""
    edges, previous = list[tuple[int, int, float]](), dict[int, int]()
    for number, task in enumerate(tasks):
        edges += [(before, number, seconds) for before, seconds in task.after]
        if task.worker in previous:
            edges.append((previous[task.worker], number, 0.0))
        previous[task.worker] = number
    cost = np.array([task.seconds for task in tasks])
    end = cost.copy()
    for _ in tasks:
        for before, number, seconds in reversed(edges):
            end[number] = max(end[number], end[before] + seconds + cost[number])
    return end


@given(steps())
def test_with_a_core_for_each_rank_tasks_end_at_the_longest_path(step: Step) -> None:
    workers, tasks = step
    timeline = run_tasks(workers, tasks)
    np.testing.assert_allclose(timeline.end, longest_paths(tasks), atol=1e-9)
    np.testing.assert_allclose(timeline.end - timeline.start, [t.seconds for t in tasks], atol=1e-9)


@given(steps(), st.data())
def test_time_never_falls_when_a_cost_or_a_message_rises(step: Step, data: st.DataObject) -> None:
    workers, tasks = step
    number = data.draw(st.integers(0, len(tasks) - 1))
    more, slower = data.draw(SECONDS), data.draw(SECONDS)
    task = tasks[number]
    after = [(before, seconds + slower) for before, seconds in task.after]
    raised = [*tasks]
    raised[number] = replace(task, seconds=task.seconds + more, after=after)
    before, later = run_tasks(workers, tasks), run_tasks(workers, raised)
    assert (later.end >= before.end - 1e-9).all()
    assert later.end[number] >= before.end[number] + more - 1e-9


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 1), (3, 2), (2.5, 1), (12, 3)])
def test_equal_workers_share_cores_equally(cores: float, ranks: int) -> None:
    workers = [Worker("language", lane=lane, ranks=ranks) for lane in range(4)]
    tasks = [Task(worker, "language", "forward", 0, s) for worker in range(4) for s in (2.0, 3.0)]
    timeline = run_tasks(workers, tasks, cores)
    assert timeline.seconds == pytest.approx(5.0 * max(1.0, 4 * ranks / cores))


def test_a_worker_alone_on_its_core_speeds_up_when_the_other_one_is_done() -> None:
    tasks = [Task(worker, "m", "forward", 0, s) for worker, s in enumerate((1.0, 3.0))]
    timeline = run_tasks([Worker("vision"), Worker("language")], tasks, cores=1)
    np.testing.assert_allclose(timeline.end, [2.0, 4.0])  # both at half speed, then one at full
    tasks[1].after = [(0, 2.5)]  # a message takes no core
    late = run_tasks([Worker("vision"), Worker("language")], tasks, cores=1)
    np.testing.assert_allclose(late.end, [1.0, 6.5])


@given(steps())
def test_work_waits_and_the_idle_end_of_each_worker_make_up_the_step(step: Step) -> None:
    workers, tasks = step
    timeline = run_tasks(workers, tasks)
    busy, waits = timeline.busy(), timeline.waits()
    idle = timeline.idle(tail=1.0)
    for number, worker in enumerate(workers):
        numbers = [n for n, task in enumerate(tasks) if task.worker == number]
        work = busy.get((worker.module, "forward"), 0.0)
        waited = sum(seconds for (who, _), seconds in waits.items() if who == worker.role)
        at_end = timeline.seconds - max(timeline.end[numbers], default=0.0)
        assert work + waited + at_end == pytest.approx(timeline.seconds, abs=1e-9)
        share = (waited + at_end) / (timeline.seconds + 1.0)
        assert idle[worker.role] == pytest.approx(share, abs=1e-9)


def test_workers_that_wait_for_each_other_deadlock_and_are_named() -> None:
    tasks = [
        Task(0, "vision", "backward", 0, 1.0, [(3, 0.0)]),
        Task(0, "vision", "forward", 1, 1.0),
        Task(1, "language", "forward", 1, 1.0, [(1, 0.0)]),
        Task(1, "language", "backward", 0, 1.0),
    ]
    with pytest.raises(Deadlock) as caught:
        run_tasks([Worker("vision"), Worker("language")], tasks)
    assert "vision backward 0 waits for language backward 0" in str(caught.value)
    assert "language forward 1 waits for vision forward 1" in str(caught.value)
