"""The figures of a step: its outcome, where its time went, and its line in metrics.jsonl."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mimo.config.schema import Train
from mimo.device import peak_flops, peak_memory
from mimo.model.step_plan import StepPlan
from mimo.parallel.grids import Layout
from mimo.spans import RANK, SPANS

WAITS = ("data", "bridge_wait", "pipeline_wait", "sync")
"""Parts of a step in which a rank does nothing."""
_OF_RANKS = (*WAITS, "other")
_OF_MODULES = ("backward", "gradients", "update", "bridge_wait", "pipeline_wait")
_GIB = 2**30

Column = tuple[str, str]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one training step, over the whole world.

    mean_loss: per token. grad_norm: before clipping, over all modules; grad_norms: of each that
    trains. is_skipped: loss or gradient norm is not finite, so no module was updated. metrics: see
    docs/runs.md; None where a figure is unknown or was not measured.
    """

    plan: StepPlan
    mean_loss: float
    grad_norm: float
    grad_norms: Mapping[str, float]
    is_skipped: bool
    metrics: Mapping[str, float | None]


def router_metrics(sums: np.ndarray, size: tuple[int, int]) -> dict[str, float]:
    """Return the metrics of routers; none if nothing was counted.

    sums: see `mimo.engines.contract.Module.add_router_sums`, flattened; size: its shape.
    `expert_tokens_<n>` is the number of tokens of expert n, averaged over layers; `expert_tokens`
    is the mean of all, with `_min` that of the idlest expert of any layer; `expert_imbalance` is
    the largest over the mean, averaged over layers, with `_max` that of the worst layer. The others
    are means over tokens and layers; of losses, those with a coefficient, without it.
    """
    if not sums.any():
        return {}
    loads, others = np.split(sums.reshape(size), [-4], axis=1)
    imbalance = loads.max(axis=1) / loads.mean(axis=1)
    entropy, *losses = (others[:, 1:] / others[:, :1]).mean(axis=0).tolist()
    named = zip(("balance_loss", "z_loss"), losses, strict=True)
    return {
        **{f"expert_tokens_{n}": tokens for n, tokens in enumerate(loads.mean(axis=0).tolist())},
        "expert_tokens": float(loads.mean()),
        "expert_tokens_min": float(loads.min()),
        "expert_imbalance": float(imbalance.mean()),
        "expert_imbalance_max": float(imbalance.max()),
        "router_entropy": entropy,
        **{name: loss for name, loss in named if loss},
    }


def is_logged(train: Train, step: int) -> bool:
    """Return whether a step, counted from 0, gets a line on the console."""
    return (step + 1) % train.log_every == 0 or step + 1 == train.steps


class StepTimes:
    """The times of one rank's spans; all ranks of the world make the same table.

    Its columns are seconds of (module, part of the step), those of the edges of bridges, the bytes
    that go over these, and the memory; each is (ranks,) fp64.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        spans: list[Column] = [(RANK, phase) for phase in _OF_RANKS]
        for module in layout.grids:
            phases = ("encode" if module in layout.encoders else "forward", *_OF_MODULES)
            spans += [(module, phase) for phase in phases]
        ways = [f"{name}_{way}" for name in layout.item_grids for way in ("forward", "backward")]
        of_edges = ("edge", "sent", "least")
        edges: list[Column] = [(column, way) for column in of_edges for way in ways]
        self._columns = [*spans, *edges, ("memory", "")]
        self._spans, self._ways = spans, ways

    def utilization(self, flops: Mapping[str, float], seconds: float) -> float | None:
        """Return MFU: FLOPs of a step as a share of the peak of all ranks; None if unknown."""
        peak = peak_flops()
        return sum(flops.values()) / (seconds * peak * self._layout.world_size) if peak else None

    def of_this_rank(self, bridge_bytes: Mapping[Column, int]) -> dict[Column, np.ndarray]:
        """Return the table with this rank's figures since the last call, and 0 of the others."""
        table = {column: np.zeros(self._layout.world_size) for column in self._columns}
        for (module, phase, edge), seconds in SPANS.take().items():
            table[module, phase][self._rank] += seconds
            if edge:
                table["edge", edge][self._rank] += seconds
        for column, count in bridge_bytes.items():
            table[column][self._rank] = count
        table["memory", ""][self._rank] = peak_memory()
        return table

    def mean_terms(self, value: float) -> dict[str, float]:
        """Return, by module, this rank's term of the mean of ``value`` over the module's ranks."""
        grids = self._layout.grids.items()
        return {name: value / grid.size * (self._rank in grid.ranks) for name, grid in grids}

    def figures(self, table: Mapping[Column, np.ndarray]) -> dict[str, float]:
        """Return the metrics in the table of all ranks; none of an empty one.

        `seconds_<module>_<part>` is the mean over the module's ranks, with `_max` the largest;
        waits for data and for other ranks count for every module of a rank. `idle_fraction` is the
        share of their time in `WAITS`. `bridge_wait_seconds_<edge>` and `memory_gib_<module>` are
        those of the rank where they are largest. `bridge_bytes_<edge>` is what all ranks together
        have sent in this step, `bridge_least_bytes_<edge>` what they would if each row, or its
        gradient, took its way once.
        """
        if not table:
            return {}
        seconds = {name: table[name] for name in self._spans}
        total = np.sum(list(seconds.values()), axis=0)
        idle = np.sum([part for (_, phase), part in seconds.items() if phase in WAITS], axis=0)
        figures = {"idle_fraction": float(idle.sum() / total.sum())} if total.any() else {}
        for module, grid in self._layout.grids.items():
            members = list(grid.ranks)
            parts = dict[str, np.ndarray]()
            for (owner, phase), part in seconds.items():
                if owner in (RANK, module):
                    parts[phase] = parts.get(phase, 0.0) + part[members]
            for phase, part in parts.items():
                if part.any():
                    figures[f"seconds_{module}_{phase}"] = float(part.mean())
                    figures[f"seconds_{module}_{phase}_max"] = float(part.max())
            if total[members].any():
                fraction = float(idle[members].sum() / total[members].sum())
                figures[f"idle_fraction_{module}"] = fraction
            memory = table["memory", ""][members]
            figures[f"memory_gib_{module}"] = float(memory.max()) / _GIB
        for way in self._ways:
            figures[f"bridge_wait_seconds_{way}"] = float(table["edge", way].max())
            figures[f"bridge_bytes_{way}"] = float(table["sent", way].sum())
            figures[f"bridge_least_bytes_{way}"] = float(table["least", way].sum())
        return figures
