"""Run the tasks of a step in simulated time.

A worker is a group of ranks in lock step: the ranks of one lane and stage. It runs its tasks in a
fixed order, each as soon as its messages have arrived. On a CPU, ranks that compute at the same
time share the cores equally.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

Role = tuple[str, int]
"""Module and stage."""
Pass = tuple[str, str]
"""Module and kind of pass."""


class Deadlock(Exception):
    """Workers wait for each other; the message names up to three of the waits."""


@dataclass(frozen=True)
class Worker:
    """The ranks of one stage and lane of a module, in lock step. ranks: their number."""

    module: str
    stage: int = 0
    lane: int = 0
    ranks: int = 1

    @property
    def role(self) -> Role:
        return self.module, self.stage


@dataclass
class Task:
    """A pass of one worker, such as vision's forward of microbatch 3.

    seconds: its duration with a core for each rank. after: numbers of the tasks that must end
    first, each with the seconds until its message arrives.
    """

    worker: int
    module: str
    kind: str
    microbatch: int
    seconds: float
    after: list[tuple[int, float]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.module} {self.kind} {self.microbatch}"


def mean_seconds(tasks: Sequence[Task], seconds: Iterable[float]) -> dict[Pass, float]:
    """Return the seconds of each kind of pass: the mean over the workers with such tasks."""
    totals, workers = defaultdict[Pass, float](float), defaultdict[Pass, set[int]](set)
    for task, duration in zip(tasks, seconds, strict=True):
        totals[task.module, task.kind] += float(duration)
        workers[task.module, task.kind].add(task.worker)
    return {key: total / len(workers[key]) for key, total in totals.items()}


@dataclass(frozen=True)
class Timeline:
    """Start and end of each task, (n,) seconds. awaited: the task it waited for last, or -1."""

    workers: Sequence[Worker]
    tasks: Sequence[Task]
    start: np.ndarray
    end: np.ndarray
    awaited: np.ndarray

    @property
    def seconds(self) -> float:
        return float(self.end.max(initial=0.0))

    def busy(self) -> dict[Pass, float]:
        """Return the seconds of each kind of pass: the mean over the workers with such tasks."""
        return mean_seconds(self.tasks, self.end - self.start)

    def idle(self, tail: float = 0.0) -> dict[Role, float]:
        """Return the share of a step in which the workers of each role are idle.

        tail: seconds from the last task to the end of the step; all ranks count as busy in it.
        """
        workers = [task.worker for task in self.tasks]
        busy = np.bincount(workers, self.end - self.start, len(self.workers)) + tail
        shares = defaultdict[Role, list[float]](list)
        for worker, share in zip(self.workers, 1 - busy / (self.seconds + tail), strict=True):
            shares[worker.role].append(share)
        return {role: float(np.mean(of_role)) for role, of_role in shares.items()}

    def waits(self) -> dict[tuple[Role, Role], float]:
        """Return the seconds that a worker of the first role waits for the second: the mean.

        A wait counts for the task whose message ends it.
        """
        free, waits = defaultdict[int, float](float), defaultdict[tuple[Role, Role], float](float)
        count = Counter(worker.role for worker in self.workers)
        for number, task in enumerate(self.tasks):  # in the order of each worker
            role, waited = self.workers[task.worker].role, self.start[number] - free[task.worker]
            if waited > 0:
                other = self.workers[self.tasks[self.awaited[number]].worker].role
                waits[role, other] += float(waited) / count[role]
            free[task.worker] = float(self.end[number])
        return dict(waits)


def run_tasks(
    workers: Sequence[Worker], tasks: Sequence[Task], cores: float = math.inf
) -> Timeline:
    """Run all tasks, each worker's in the order of the list. Raises Deadlock.

    cores: number of ranks that compute at full speed at the same time.
    """
    following: list[list[tuple[int, float]]] = [[] for _ in tasks]
    missing, previous = [0] * len(tasks), dict[int, int]()
    for number, task in enumerate(tasks):
        before = [(previous[task.worker], 0.0)] if task.worker in previous else []
        for earlier, seconds in (*before, *task.after):
            following[earlier].append((number, seconds))
            missing[number] += 1
        previous[task.worker] = number
    arrival, awaited = [0.0] * len(tasks), np.full(len(tasks), -1)
    start, end = np.full(len(tasks), math.inf), np.full(len(tasks), math.inf)
    ready = [(0.0, number) for number, count in enumerate(missing) if not count]  # (start, task)
    running: list[tuple[float, int]] = []  # (value of `work` at its end, task)
    now = work = 0.0  # seconds; and seconds of work done for each busy rank so far
    num_active = 0
    while running or ready:
        speed = min(1.0, cores / num_active) if num_active else 1.0
        at_end = now + max(0.0, running[0][0] - work) / speed if running else math.inf
        if ready and ready[0][0] <= at_end:
            time, number = heapq.heappop(ready)
            work, now = work + (time - now) * speed, time
            start[number] = now
            num_active += workers[tasks[number].worker].ranks
            heapq.heappush(running, (work + tasks[number].seconds, number))
            continue
        work, number = heapq.heappop(running)
        end[number] = now = at_end
        num_active -= workers[tasks[number].worker].ranks
        for later, seconds in following[number]:
            if now + seconds >= arrival[later]:
                arrival[later], awaited[later] = now + seconds, number
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (arrival[later], later))
    unfinished = reversed(np.flatnonzero(np.isinf(end)).tolist())
    stuck = {tasks[n].worker: tasks[n] for n in unfinished}  # the first of each worker
    if stuck:
        heads = [(stuck[worker], dict(stuck[worker].after)) for worker in sorted(stuck)[:3]]
        waits = [(head, next(n for n in after if math.isinf(end[n]))) for head, after in heads]
        raise Deadlock("; ".join(f"{head} waits for {tasks[n]}" for head, n in waits))
    return Timeline(workers, tasks, start, end, awaited)
