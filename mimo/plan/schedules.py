"""The tasks of a step: the order of each rank's schedule, and what each task waits for.

The orders are those of Megatron: 1F1B, with or without run-ahead, and interleaved 1F1B.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mimo.parallel.grids import LANGUAGE, Layout
from mimo.plan.simulate import Task, Worker

Op = tuple[str, int, int]
"""Kind, microbatch, chunk."""
FORWARD, BACKWARD, ENCODE = "forward", "backward", "encode"


@dataclass(frozen=True)
class ModuleCosts:
    """Seconds of a module's passes, for M microbatches, L lanes and P parts of its layers.

    A chunk of a stage computes part ``chunk * pp + stage``. forward, backward: (M, L, P). message:
    (M, L) from a stage to the next.
    """

    forward: np.ndarray
    backward: np.ndarray
    message: np.ndarray
    has_backward: bool = True


@dataclass(frozen=True)
class Rows:
    """Messages of one microbatch between a module and the language model.

    pairs: (n, 2) lane of the module and lane of the language model of each message. seconds: (n,).
    """

    pairs: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True)
class StepCosts:
    """All costs of a step. rows: by encoder and generator, for each microbatch."""

    modules: Mapping[str, ModuleCosts]
    rows: Mapping[str, Sequence[Rows]] = field(default_factory=dict)


def one_f_one_b(numbers: Sequence[int], warmup: int, has_backward: bool = True) -> Iterator[Op]:
    """Yield a stage's order: ``warmup`` forwards, then pairs, then the remaining backwards."""
    places = [(number, 0) for number in numbers]
    return _alternate(places, places if has_backward else [], warmup)


def interleaved(
    numbers: Sequence[int], stage: int, pp: int, vpp: int, has_backward: bool = True
) -> Iterator[Op]:
    """Yield a stage's order of chunks: pp microbatches through each chunk in turn."""
    groups = [numbers[first : first + pp] for first in range(0, len(numbers), pp)]
    table = [(n, chunk) for group in groups for chunk in range(vpp) for n in group]
    back = [(n, vpp - 1 - chunk) for n, chunk in table]
    return _alternate(table, back if has_backward else [], (pp - stage - 1) * 2 + (vpp - 1) * pp)


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warmup: int
) -> Iterator[Op]:
    """Yield ``warmup`` forwards, then one of each in turn. Places are (microbatch, chunk)."""
    warmup = min(warmup, len(forwards)) if backwards else len(forwards)
    yield from ((FORWARD, *place) for place in forwards[:warmup])
    for number, place in enumerate(backwards, start=warmup):
        yield from ((FORWARD, *ahead) for ahead in forwards[number : number + 1])
        yield BACKWARD, *place


class StepTasks:
    """The workers and tasks of one step of a layout.

    run_ahead: of each disjoint encoder. group: number of microbatches that colocated encoders
    encode at once. Colocated encoders run on the language model's workers; a worker takes the time
    of its slowest lane.
    """

    def __init__(
        self, layout: Layout, costs: StepCosts, run_ahead: Mapping[str, int], group: int
    ) -> None:
        self.layout, self.costs, self.group = layout, costs, group
        self.workers: list[Worker] = []
        self.tasks: list[Task] = []
        self._number = dict[tuple[str, str, int, int, int], int]()
        self._first_worker = dict[str, int]()
        for name, grid in layout.grids.items():
            if name in layout.colocated:
                continue
            self._first_worker[name] = len(self.workers)
            ranks = grid.tp * grid.cp
            places = ((stage, lane) for stage in range(grid.pp) for lane in range(grid.dp))
            self.workers += [Worker(name, stage, lane, ranks) for stage, lane in places]
        self.num_microbatches = len(costs.modules[LANGUAGE].forward)
        self._add_language()
        for name in (n for n in layout.item_grids if n not in layout.colocated):
            if name in layout.encoders:
                self._add_encoder(name, run_ahead[name])
            else:
                self._add_generator(name)
        self._connect_language()
        for name in layout.encoders:
            self._connect_encoder(name)
        for name in layout.generators:
            self._connect_generator(name)

    # ------------------------------------------------------------------ tasks in order

    def _add(self, name: str, op: str, key: tuple[int, int, int], worker: int, cost: float) -> None:
        """key: microbatch, lane, part; of colocated encoders, first of a group, worker, 0."""
        self._number[(name, op, *key)] = len(self.tasks)
        self.tasks.append(Task(worker, name, op, key[0], float(cost)))

    def _add_language(self) -> None:
        grid, costs = self.layout.language, self.costs.modules[LANGUAGE]
        for stage in range(grid.pp):
            for lane in range(grid.dp):
                worker = self._first_worker[LANGUAGE] + stage * grid.dp + lane
                for first in range(0, self.num_microbatches, self.group):
                    numbers = range(first, min(first + self.group, self.num_microbatches))
                    self._add_colocated(ENCODE, numbers, stage, lane, worker)
                    if grid.vpp > 1:
                        ops = interleaved(numbers, stage, grid.pp, grid.vpp, costs.has_backward)
                    else:
                        warmup = grid.pp - stage - 1 + self.layout.ahead
                        ops = one_f_one_b(numbers, warmup, costs.has_backward)
                    for op, m, chunk in ops:
                        part = chunk * grid.pp + stage
                        seconds = getattr(costs, op)[m, lane, part]
                        self._add(LANGUAGE, op, (m, lane, part), worker, seconds)
                        for name in self.layout.generators if op == FORWARD else ():
                            if name in self.layout.colocated:
                                self._add_draw(name, m, lane, worker)
                    self._add_colocated(BACKWARD, numbers, stage, lane, worker)

    def _add_colocated(self, op: str, numbers: range, stage: int, lane: int, worker: int) -> None:
        """Add the forward, or backward, of colocated encoders for a group of microbatches."""
        grid, key = self.layout.language, (numbers[0], worker, 0)
        for name in self.layout.encoders:
            costs = self.costs.modules[name]
            if name not in self.layout.colocated or (op == BACKWARD and not costs.has_backward):
                continue
            of_pass = costs.forward if op == ENCODE else costs.backward
            totals = of_pass[numbers.start : numbers.stop, :, 0].sum(axis=0)
            lanes, tp = len(totals), self.layout.encoders[name].tp
            ranks = np.arange(grid.tp * grid.cp) + grid.tp * grid.cp * (lane + grid.dp * stage)
            self._add(name, op, key, worker, totals[np.unique(ranks // tp) % lanes].max())

    def _add_draw(self, name: str, m: int, lane: int, worker: int) -> None:
        """Add a generator's passes of a microbatch. lane: lane of the worker."""
        costs, lanes = self.costs.modules[name], self.layout.generators[name].dp
        numbers = [n for n in range(lanes) if self._lane_of_draw(name, n) == lane]
        for op in (FORWARD, BACKWARD)[: 1 + costs.has_backward]:
            seconds = getattr(costs, op)[m, numbers].max(initial=0.0)
            self._add(name, op, (m, lane, 0), worker, seconds)

    def _lane_of_draw(self, name: str, lane: int) -> int:
        """Return the lane of the worker that runs a generator's lane."""
        if name not in self.layout.colocated:
            return lane
        return lane * self.layout.language.dp // self.layout.generators[name].dp

    def _add_encoder(self, name: str, run_ahead: int) -> None:
        grid, costs = self.layout.encoders[name], self.costs.modules[name]
        for stage in range(grid.pp):
            for lane in range(grid.dp):
                worker = self._first_worker[name] + stage * grid.dp + lane
                warmup = grid.pp - stage - 1 + run_ahead
                numbers = range(self.num_microbatches)
                for op, m, _ in one_f_one_b(numbers, warmup, costs.has_backward):
                    seconds = getattr(costs, op)[m, lane, stage]
                    kind = ENCODE if op == FORWARD else op
                    self._add(name, kind, (m, lane, stage), worker, seconds)

    def _add_generator(self, name: str) -> None:
        for lane in range(self.layout.generators[name].dp):
            for m in range(self.num_microbatches):
                self._add_draw(name, m, lane, self._first_worker[name] + lane)

    # ------------------------------------------------------------------ who waits for whom

    def _wait(self, later: int, before: int, seconds: float) -> None:
        self.tasks[later].after.append((before, float(seconds)))

    def _connect_language(self) -> None:
        grid, costs, number = self.layout.language, self.costs.modules[LANGUAGE], self._number
        parts = grid.pp * grid.vpp
        for (name, op, m, lane, part), task in number.items():
            if name != LANGUAGE:
                continue
            before = part - 1 if op == FORWARD else part + 1
            if 0 <= before < parts:
                seconds = costs.message[m, lane] * (grid.pp > 1)
                self._wait(task, number[LANGUAGE, op, m, lane, before], seconds)

    def _connect_encoder(self, name: str) -> None:
        grid, costs, number = self.layout.encoders[name], self.costs.modules[name], self._number
        language = self.layout.language
        parts = [
            c * language.pp + link.stage for link in self.layout.links_of(name) for c in link.chunks
        ]
        if name in self.layout.colocated:
            self._connect_colocated(name, sorted(set(parts)))
            return
        for (module, op, m, lane, stage), task in number.items():
            before = stage - 1 if op == ENCODE else stage + 1
            if module == name and 0 <= before < grid.pp:
                self._wait(task, number[name, op, m, lane, before], costs.message[m, lane])
        for m, rows in enumerate(self.costs.rows[name]):
            for (lane, to), seconds in zip(rows.pairs.tolist(), rows.seconds, strict=True):
                sent = number[name, ENCODE, m, lane, grid.pp - 1]
                for part in set(parts):
                    self._wait(number[LANGUAGE, FORWARD, m, to, part], sent, seconds)
                    if costs.has_backward:
                        returned = number[LANGUAGE, BACKWARD, m, to, part]
                        self._wait(number[name, BACKWARD, m, lane, grid.pp - 1], returned, seconds)

    def _connect_colocated(self, name: str, parts: Sequence[int]) -> None:
        """Exchange rows after a group's forward and gradients before its backward, on all ranks."""
        grid, number, costs = self.layout.language, self._number, self.costs.modules[name]
        start = self._first_worker[LANGUAGE]
        workers = range(start, start + grid.pp * grid.dp)
        for first in range(0, self.num_microbatches, self.group):
            last = min(first + self.group, self.num_microbatches) - 1
            rows = self.costs.rows[name][first : last + 1]
            seconds = sum(max(of.seconds, default=0.0) for of in rows)
            for worker, lane, part in itertools.product(workers, range(grid.dp), parts):
                place, encoded = (lane, part), number[name, ENCODE, first, worker, 0]
                self._wait(number[LANGUAGE, FORWARD, first, *place], encoded, seconds)
                if costs.has_backward:
                    returned = number[LANGUAGE, BACKWARD, last, *place]
                    self._wait(number[name, BACKWARD, first, worker, 0], returned, seconds)

    def _connect_generator(self, name: str) -> None:
        number, language = self._number, self.layout.language
        last, costs = language.pp * language.vpp - 1, self.costs.modules[LANGUAGE]
        last_pass = BACKWARD if self.costs.modules[name].has_backward else FORWARD
        for m, rows in enumerate(self.costs.rows[name]):
            for (lane, to), seconds in zip(rows.pairs.tolist(), rows.seconds, strict=True):
                key = m, self._lane_of_draw(name, lane), 0
                begun, drawn = number[name, FORWARD, *key], number[name, last_pass, *key]
                self._wait(begun, number[LANGUAGE, FORWARD, m, to, last], seconds)
                if costs.has_backward:
                    self._wait(number[LANGUAGE, BACKWARD, m, to, last], drawn, seconds)
