"""Where the time of a step goes: of every module, by its parts, mean and largest over its ranks.

Each rank has a row of its own in one table, so the sum over the world that a step does anyway
brings every rank's figures to every rank. It goes along with the steps that are logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mimo.device import memory_taken
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.spans import RANK, SPANS

WAITS = ("data", "bridge_wait", "pipeline_wait", "sync")
"""Parts of a step in which a rank does nothing."""
_OF_RANKS = (*WAITS, "other")
_OF_MODULES = ("backward", "gradients", "update", "bridge_wait", "pipeline_wait")
_GIB = 2**30

_Column = tuple[str, str]


class StepTimes:
    """Of one rank's spans; all ranks of the world make the same table.

    columns: seconds of (module, part of the step), those of the edges of bridges, the bytes that go
    over these, and the memory.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        spans: list[_Column] = [(RANK, phase) for phase in _OF_RANKS]
        for module in layout.grids:
            phases = ("forward" if module == LANGUAGE else "encode", *_OF_MODULES)
            spans += [(module, phase) for phase in phases]
        ways = [f"{name}_{way}" for name in layout.encoders for way in ("forward", "backward")]
        of_edges = ("edge", "sent", "least")
        edges: list[_Column] = [(column, way) for column in of_edges for way in ways]
        names = [*spans, *edges, ("memory", "")]
        self._columns = {name: number for number, name in enumerate(names)}
        self._spans, self._ways = spans, ways

    def of_this_rank(self, bridge_bytes: Mapping[_Column, int]) -> list[float]:
        """The table (ranks · columns) with this rank's row: of a period since it was last asked.

        bridge_bytes: of this step, as of `MimoModel.bridge_bytes`.
        """
        table = np.zeros((self._layout.world_size, len(self._columns)))
        own = table[self._rank]
        for (module, phase, edge), seconds in SPANS.take().items():
            own[self._columns[module, phase]] += seconds
            if edge:
                own[self._columns["edge", edge]] += seconds
        for column, count in bridge_bytes.items():
            own[self._columns[column]] = count
        own[self._columns["memory", ""]] = memory_taken()
        return table.ravel().tolist()

    def figures(self, table: Sequence[float]) -> dict[str, float]:
        """The metrics in the table of all ranks; none of an empty one.

        `seconds_<module>_<part>` is the mean over the module's ranks, with `_max` the largest;
        waits for data and for other ranks count for every module of a rank. `idle_fraction` is the
        share of their time in `WAITS`. `bridge_wait_seconds_<edge>` and `memory_gib_<module>` are
        those of the rank where they are largest. `bridge_bytes_<edge>` is what all ranks together
        have sent in this step, `bridge_least_bytes_<edge>` what they would if each row, or its
        gradient, took its way once.
        """
        if not table:
            return {}
        ranks = np.array(table).reshape(self._layout.world_size, -1)
        busy = [self._columns[name] for name in self._spans if name[1] not in WAITS]
        total = ranks[:, [self._columns[name] for name in self._spans]].sum(axis=1)
        idle = total - ranks[:, busy].sum(axis=1)
        found = {"idle_fraction": float(idle.sum() / total.sum())} if total.any() else {}
        for module, grid in self._layout.grids.items():
            own = list(grid.ranks)
            for phase, seconds in self._phases(ranks[own], module).items():
                found[f"seconds_{module}_{phase}"] = float(seconds.mean())
                found[f"seconds_{module}_{phase}_max"] = float(seconds.max())
            if total[own].any():
                found[f"idle_fraction_{module}"] = float(idle[own].sum() / total[own].sum())
            memory = ranks[own, self._columns["memory", ""]]
            found[f"memory_gib_{module}"] = float(memory.max()) / _GIB
        for way in self._ways:
            waits = ranks[:, self._columns["edge", way]]
            found[f"bridge_wait_seconds_{way}"] = float(waits.max())
            for column, name in (("sent", "bridge_bytes"), ("least", "bridge_least_bytes")):
                found[f"{name}_{way}"] = float(ranks[:, self._columns[column, way]].sum())
        return found

    def _phases(self, ranks: np.ndarray, module: str) -> Mapping[str, np.ndarray]:
        """(n,) seconds of the module's ranks by part of the step, of parts that took any."""
        found = dict[str, np.ndarray]()
        for owner, phase in self._spans:
            if owner in (RANK, module):
                own = ranks[:, self._columns[owner, phase]]
                found[phase] = found.get(phase, 0.0) + own
        return {phase: seconds for phase, seconds in found.items() if seconds.any()}
