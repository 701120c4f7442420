"""Run the tasks of a step in simulated time.

A worker is a group of ranks in lock step: the ranks of one lane and stage. It runs its tasks in a
fixed order, each as soon as its messages have arrived. On a CPU, ranks that compute at the same
time share the cores equally.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


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
    def role(self) -> tuple[str, int]:
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

    def busy(self) -> dict[tuple[str, str], float]:
        """Return the seconds by module and kind: the mean over the workers with such tasks."""
        totals, workers = defaultdict[tuple[str, str], float](float), defaultdict(set)
        for number, task in enumerate(self.tasks):
            totals[task.module, task.kind] += float(self.end[number] - self.start[number])
            workers[task.module, task.kind].add(task.worker)
        return {key: total / len(workers[key]) for key, total in totals.items()}

    def idle(self, tail: float = 0.0) -> dict[tuple[str, int], float]:
        """Return the share of a step in which the ranks of each role are idle.

        tail: seconds from the last task to the end of the step; all ranks count as busy in it.
        """
        busy, ranks = defaultdict[tuple[str, int], float](float), defaultdict(int)
        for number, task in enumerate(self.tasks):
            worker = self.workers[task.worker]
            busy[worker.role] += float(self.end[number] - self.start[number]) * worker.ranks
        for worker in self.workers:
            ranks[worker.role] += worker.ranks
        worked = {role: busy[role] / ranks[role] + tail for role in ranks}
        return {role: 1 - seconds / (self.seconds + tail) for role, seconds in worked.items()}

    def waits(self) -> dict[tuple[tuple[str, int], tuple[str, int]], float]:
        """Return the seconds that a worker of the first role waits for the second: the mean.

        A wait counts for the task whose message ends it.
        """
        free, waits = defaultdict[int, float](float), defaultdict[tuple, float](float)
        count = defaultdict[tuple[str, int], int](int)
        for worker in self.workers:
            count[worker.role] += 1
        for number, task in enumerate(self.tasks):  # in the order of each worker
            role, waited = self.workers[task.worker].role, self.start[number] - free[task.worker]
            if waited > 0 and self.awaited[number] >= 0:
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
    queues: list[list[int]] = [[] for _ in workers]
    following: list[list[tuple[int, float]]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        queues[task.worker].append(number)
        for before, seconds in task.after:
            following[before].append((number, seconds))
    position = [0] * len(workers)
    missing = [len(task.after) for task in tasks]
    arrival, awaited = np.zeros(len(tasks)), np.full(len(tasks), -1)
    start, end = np.full(len(tasks), math.inf), np.full(len(tasks), math.inf)
    arriving: list[tuple[float, int]] = []  # (arrival of the last message, task)
    running: list[tuple[float, int]] = []  # (value of `work` at its end, task)
    has_arrived, is_busy = [not count for count in missing], [False] * len(workers)
    now = work = 0.0  # seconds; and seconds of work done for each busy rank so far
    num_active = 0

    def begin_next(worker: int) -> None:
        nonlocal num_active
        if is_busy[worker] or position[worker] == len(queues[worker]):
            return
        number = queues[worker][position[worker]]
        if has_arrived[number]:
            is_busy[worker], start[number] = True, now
            num_active += workers[worker].ranks
            heapq.heappush(running, (work + tasks[number].seconds, number))

    for worker in range(len(workers)):
        begin_next(worker)
    while running or arriving:
        speed = min(1.0, cores / num_active) if num_active else 1.0
        at_end = now + max(0.0, running[0][0] - work) / speed if running else math.inf
        if arriving and arriving[0][0] <= at_end:
            time, number = heapq.heappop(arriving)
            work, now = work + (time - now) * speed, time
            has_arrived[number] = True
            begin_next(tasks[number].worker)
            continue
        work, number = heapq.heappop(running)
        now, worker = at_end, tasks[number].worker
        end[number], is_busy[worker] = now, False
        num_active -= workers[worker].ranks
        position[worker] += 1
        for later, seconds in following[number]:
            if (arrives := now + seconds) >= arrival[later]:
                arrival[later], awaited[later] = arrives, number
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(arriving, (float(arrival[later]), later))
        begin_next(worker)
    stuck = [w for w, queue in enumerate(queues) if position[w] < len(queue)]
    if stuck:
        heads = [tasks[queues[w][position[w]]] for w in stuck]
        waits = [
            f"{head} waits for {next(tasks[n] for n, _ in head.after if end[n] == math.inf)}"
            for head in heads
            if any(end[n] == math.inf for n, _ in head.after)
        ]
        raise Deadlock("; ".join(waits[:3]))
    return Timeline(workers, tasks, start, end, awaited)
