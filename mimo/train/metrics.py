"""The figures of a step: its outcome, where its time went, and its line in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mimo.config.schema import Train
from mimo.device import peak_flops, peak_memory
from mimo.model.step_plan import StepPlan
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.spans import RANK, SPANS

WAITS = ("data", "bridge_wait", "pipeline_wait", "sync")
"""Parts of a step in which a rank does nothing."""
_OF_RANKS = (*WAITS, "other")
_OF_MODULES = ("backward", "gradients", "update", "bridge_wait", "pipeline_wait")
_GIB = 2**30

_Column = tuple[str, str]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one training step, over the whole world.

    flops: by module, over all ranks; counted on the rank that reports. loss: summed over the global
    batch. grad_norm: before clipping. rates: learning rate of each module that trains.
    step_seconds: from asking for the batch until the update is queued.
    data_wait_seconds: waiting for batches, or for samples to be read: the mean over the ranks of
    the module where it is largest.
    host_seconds: the rest of this rank's step, without its waits for data, for transfers of bridges
    and for the sum over all ranks. On a device: the time to launch its work; on a CPU: the work.
    is_skipped: loss or gradient norm is not finite, so no module was updated. grad_norms: of each
    module that trains. update_norms: how much the update before this step changed the weights of
    each, as a norm; None where it was not measured.
    times: figures of `StepTimes`, in logged steps.
    """

    plan: StepPlan
    flops: Mapping[str, float]
    loss: float
    grad_norm: float
    rates: Mapping[str, float]
    step_seconds: float
    data_wait_seconds: float
    host_seconds: float
    is_skipped: bool
    grad_norms: Mapping[str, float]
    update_norms: Mapping[str, float | None]
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_loss(self) -> float:
        """The loss per token."""
        return self.loss / max(self.plan.num_loss_tokens, 1)


def is_logged(train: Train, step: int) -> bool:
    """Return whether a step, counted from 0, gets a line on the console."""
    return (step + 1) % train.log_every == 0 or step + 1 == train.steps


def step_metrics(
    done: StepResult, layout: Layout, skipped_samples: int, skipped_steps: int
) -> dict[str, float | None]:
    """Return the line of a step in metrics.jsonl, without its number.

    skipped_samples, skipped_steps: since the run began.
    mfu is the share of the peak of all ranks of the job together, those of encoders included; None
    if the device's peak is unknown.
    """
    plan, seconds, peak = done.plan, done.step_seconds, peak_flops()
    return {
        "loss": done.mean_loss,
        "grad_norm": done.grad_norm,
        **{f"grad_norm_{name}": norm for name, norm in done.grad_norms.items()},
        **{f"update_norm_{name}": norm for name, norm in done.update_norms.items()},
        "lr": max(done.rates.values()),
        **{f"lr_{name}": rate for name, rate in done.rates.items()},
        "tokens": plan.num_tokens,
        "loss_tokens": plan.num_loss_tokens,
        "tokens_per_second": plan.num_tokens / seconds,
        "mfu": sum(done.flops.values()) / (seconds * peak * layout.world_size) if peak else None,
        **{f"flops_{name}": count for name, count in done.flops.items()},
        "encoder_imbalance": plan.encoder_imbalance,
        "skipped_samples": skipped_samples,
        "skipped_steps": skipped_steps,
        "step_seconds": seconds,
        "data_wait_seconds": done.data_wait_seconds,
        "host_seconds": done.host_seconds,
        **done.times,
    }


class StepTimes:
    """The times of one rank's spans; all ranks of the world make the same table.

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

    def of_this_rank(self, bridge_bytes: Mapping[_Column, int]) -> np.ndarray:
        """Return a table (ranks x columns,) fp64 with this rank's row, since the last call.

        bridge_bytes: what `MimoModel.bridge_bytes` returns for this step.
        """
        table = np.zeros((self._layout.world_size, len(self._columns)))
        row = table[self._rank]
        for (module, phase, edge), seconds in SPANS.take().items():
            row[self._columns[module, phase]] += seconds
            if edge:
                row[self._columns["edge", edge]] += seconds
        for column, count in bridge_bytes.items():
            row[self._columns[column]] = count
        row[self._columns["memory", ""]] = peak_memory()
        return table.ravel()

    def mean_terms(self, value: float) -> dict[str, float]:
        """Return, by module, this rank's term of the mean of ``value`` over the module's ranks."""
        grids = self._layout.grids.items()
        return {name: value / grid.size * (self._rank in grid.ranks) for name, grid in grids}

    def figures(self, table: np.ndarray) -> dict[str, float]:
        """Return the metrics in the table (ranks x columns,) of all ranks; none of an empty one.

        `seconds_<module>_<part>` is the mean over the module's ranks, with `_max` the largest;
        waits for data and for other ranks count for every module of a rank. `idle_fraction` is the
        share of their time in `WAITS`. `bridge_wait_seconds_<edge>` and `memory_gib_<module>` are
        those of the rank where they are largest. `bridge_bytes_<edge>` is what all ranks together
        have sent in this step, `bridge_least_bytes_<edge>` what they would if each row, or its
        gradient, took its way once.
        """
        if not table.size:
            return {}
        ranks = table.reshape(self._layout.world_size, -1)
        seconds = {name: ranks[:, self._columns[name]] for name in self._spans}
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
            memory = ranks[members, self._columns["memory", ""]]
            figures[f"memory_gib_{module}"] = float(memory.max()) / _GIB
        for way in self._ways:
            waits = ranks[:, self._columns["edge", way]]
            figures[f"bridge_wait_seconds_{way}"] = float(waits.max())
            for column, name in (("sent", "bridge_bytes"), ("least", "bridge_least_bytes")):
                figures[f"{name}_{way}"] = float(ranks[:, self._columns[column, way]].sum())
        return figures
