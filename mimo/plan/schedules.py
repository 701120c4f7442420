"""The tasks of a step: the order of each rank's schedule, and what each task waits for.

The orders are those of Megatron: 1F1B, with or without run-ahead, and interleaved 1F1B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

import numpy as np

from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.plan.simulate import Task, Worker

Op = tuple[str, int, int]
"""Kind, microbatch, chunk."""
FORWARD, BACKWARD, ENCODE = "forward", "backward", "encode"


@dataclass(frozen=True)
class ModuleCosts:
    """Seconds of a module's passes and messages, for M microbatches, L lanes, P parts of layers.

    A chunk of a stage computes part ``chunk * pp + stage``. forward, backward: (M, L, P). message:
    (M, L) from a stage to the next. rows: (M, L, D) of an encoder's or generator's exchange with
    each of D lanes of the language model; NaN where there is none.
    """

    forward: np.ndarray
    backward: np.ndarray
    message: np.ndarray
    has_backward: bool = True
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))


def order_of_stage(
    numbers: Sequence[int], stage: int, grid: GridSpec, ahead: int = 0, has_backward: bool = True
) -> list[Op]:
    """Return a stage's order: forwards to warm up, then pairs, then the remaining backwards.

    With chunks, pp microbatches pass through each chunk in turn. ahead: further forwards to warm up
    without chunks.
    """
    pp, vpp = grid.pp, grid.vpp
    groups = [numbers[first : first + pp] for first in range(0, len(numbers), pp)]
    table = [(n, chunk) for group in groups for chunk in range(vpp) for n in group]
    forwards = [(FORWARD, n, chunk) for n, chunk in table]
    if not has_backward:
        return forwards
    backwards = [(BACKWARD, n, vpp - 1 - chunk) for n, chunk in table]
    later = pp - stage - 1
    warmup = min(len(table), later + ahead if vpp == 1 else 2 * later + (vpp - 1) * pp)
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *chain(*pairs), *backwards[len(table) - warmup :]]


class StepTasks:
    """The workers and tasks of one step of a layout. costs: by module.

    run_ahead: of each disjoint encoder. group: number of microbatches that colocated encoders
    encode at once. Colocated encoders run on the language model's workers; a worker takes the time
    of its slowest lane. number: of a task by module, kind, microbatch, lane and part; for colocated
    encoders by module, kind, first microbatch of a group, worker and 0.
    """

    def __init__(
        self,
        layout: Layout,
        costs: Mapping[str, ModuleCosts],
        run_ahead: Mapping[str, int],
        group: int,
    ) -> None:
        self.layout, self.costs = layout, costs
        self.workers, self.tasks = list[Worker](), list[Task]()
        self.number = dict[tuple[str, str, int, int, int], int]()
        microbatches = range(len(costs[LANGUAGE].forward))
        self.groups = [microbatches[first : first + group] for first in microbatches[::group]]
        for name, grid in layout.grids.items():
            if name in layout.colocated:
                continue
            for stage, lane in product(range(grid.pp), range(grid.dp)):
                self.workers.append(Worker(name, stage, lane, grid.tp * grid.cp))
                if name == LANGUAGE:
                    for numbers in self.groups:
                        self._add_colocated(ENCODE, numbers, stage, lane)
                        self._add_passes(name, stage, lane, numbers, layout.ahead)
                        self._add_colocated(BACKWARD, numbers, stage, lane)
                elif name in layout.encoders:
                    self._add_passes(name, stage, lane, microbatches, run_ahead[name])
                else:
                    for m in microbatches:
                        self._add_draw(name, m, lane)
        self._connect_stages()
        for name in layout.encoders:
            self._connect_encoder(name)
        for name in layout.generators:
            self._connect_generator(name)

    # ------------------------------------------------------------------ tasks in order

    def _add(self, name: str, op: str, key: tuple[int, int, int], seconds: float) -> None:
        """Add a task of the newest worker. key: the rest of the key in `number`."""
        self.number[(name, op, *key)] = len(self.tasks)
        self.tasks.append(Task(len(self.workers) - 1, name, op, key[0], float(seconds)))

    def _add_passes(self, name: str, stage: int, lane: int, numbers: range, ahead: int) -> None:
        """Add the passes of these microbatches in the order of a stage."""
        grid, costs = self.layout.grids[name], self.costs[name]
        order = order_of_stage(numbers, stage, grid, ahead, costs.has_backward)
        for op, m, chunk in order:
            part = chunk * grid.pp + stage
            kind = ENCODE if op == FORWARD and name != LANGUAGE else op
            self._add(name, kind, (m, lane, part), getattr(costs, op)[m, lane, part])
            if kind == FORWARD:
                for generator in self.layout.generators:
                    if generator in self.layout.colocated:
                        self._add_draw(generator, m, lane)

    def _add_colocated(self, op: str, numbers: range, stage: int, lane: int) -> None:
        """Add the forward, or backward, of colocated encoders for a group of microbatches."""
        grid = self.layout.language
        ranks = np.arange(grid.tp * grid.cp) + grid.tp * grid.cp * (lane + grid.dp * stage)
        for name, encoder in self.layout.encoders.items():
            costs = self.costs[name]
            if name not in self.layout.colocated or (op == BACKWARD and not costs.has_backward):
                continue
            of_pass = costs.forward if op == ENCODE else costs.backward
            totals = of_pass[numbers.start : numbers.stop, :, 0].sum(axis=0)
            seconds = totals[ranks // encoder.tp % encoder.dp].max()
            self._add(name, op, (numbers[0], len(self.workers) - 1, 0), seconds)

    def _add_draw(self, name: str, m: int, lane: int) -> None:
        """Add a generator's passes of a microbatch. lane: lane of the worker."""
        costs, lanes = self.costs[name], range(self.layout.generators[name].dp)
        of_worker = [n for n in lanes if self._lane_of_draw(name, n) == lane]
        for op in (FORWARD, BACKWARD)[: 1 + costs.has_backward]:
            seconds = getattr(costs, op)[m, of_worker].max(initial=0.0)
            self._add(name, op, (m, lane, 0), seconds)

    def _lane_of_draw(self, name: str, lane: int) -> int:
        """Return the lane of the worker that runs a generator's lane."""
        generator, is_colocated = self.layout.generators[name], name in self.layout.colocated
        host = self.layout.language if is_colocated else generator
        return lane * host.dp // generator.dp

    # ------------------------------------------------------------------ who waits for whom

    def _wait(self, later: int, before: int, seconds: float) -> None:
        self.tasks[later].after.append((before, float(seconds)))

    def _connect_stages(self) -> None:
        """A forward waits for that of the part before, a backward for that of the part after."""
        for (name, op, m, lane, part), task in self.number.items():
            before = self.number.get((name, op, m, lane, part + (1 if op == BACKWARD else -1)))
            if before is not None:
                self._wait(task, before, self.costs[name].message[m, lane])

    def _connect_encoder(self, name: str) -> None:
        """Connect an encoder's lanes; if colocated, all workers before and after each group."""
        language, rows, links = (
            self.layout.language,
            self.costs[name].rows,
            self.layout.links_of(name),
        )
        parts = {chunk * language.pp + link.stage for link in links for chunk in link.chunks}
        if name not in self.layout.colocated:
            for m, lane, to in np.argwhere(~np.isnan(rows)).tolist():
                self._connect_rows(name, range(m, m + 1), lane, to, parts, rows[m, lane, to])
            return
        workers = [n for n, worker in enumerate(self.workers) if worker.module == LANGUAGE]
        for numbers in self.groups:
            of_group = np.nan_to_num(rows[numbers.start : numbers.stop])
            seconds = of_group.max(axis=(1, 2)).sum()
            for worker, to in product(workers, range(language.dp)):
                self._connect_rows(name, numbers, worker, to, parts, seconds)

    def _connect_rows(
        self, name: str, numbers: range, lane: int, to: int, parts: set[int], seconds: float
    ) -> None:
        """Send an encoder's rows of these microbatches, and their gradients back.

        lane: the encoder's, or a worker. to, parts: of the language model.
        """
        first, last, number = numbers[0], numbers[-1], self.number
        stage = self.layout.encoders[name].pp - 1
        for part in parts:
            sent = number[name, ENCODE, first, lane, stage]
            self._wait(number[LANGUAGE, FORWARD, first, to, part], sent, seconds)
            if self.costs[name].has_backward:
                returned = number[LANGUAGE, BACKWARD, last, to, part]
                self._wait(number[name, BACKWARD, first, lane, stage], returned, seconds)

    def _connect_generator(self, name: str) -> None:
        number, language, rows = self.number, self.layout.language, self.costs[name].rows
        last = language.pp * language.vpp - 1
        last_pass = BACKWARD if self.costs[name].has_backward else FORWARD
        for m, lane, to in np.argwhere(~np.isnan(rows)).tolist():
            key, seconds = (m, self._lane_of_draw(name, lane), 0), rows[m, lane, to]
            begun, drawn = number[name, FORWARD, *key], number[name, last_pass, *key]
            self._wait(begun, number[LANGUAGE, FORWARD, m, to, last], seconds)
            if self.costs[LANGUAGE].has_backward:
                self._wait(number[LANGUAGE, BACKWARD, m, to, last], drawn, seconds)
