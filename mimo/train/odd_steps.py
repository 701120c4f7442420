"""Steps that went wrong: a loss or gradient norm that is not finite, and spikes of the loss.

The samples of each such step are kept in ``batches/step_<n>.json`` in the run folder, beside what
was wrong, and an incident tells of it. `mimo replay` runs the step again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mimo.config.schema import Train
from mimo.device import barrier
from mimo.model.dataset import Dataset
from mimo.model.step_plan import StepPlan
from mimo.train import incidents
from mimo.train.metrics import StepResult
from mimo.train.restarts import job_name
from mimo.train.run_files import METRICS

BATCHES = "batches"
_NAMED = 16  # samples in an incident
# The median of distances from the median of a normal distribution, in standard deviations.
_MAD = 0.6745
_LEAST_SPREAD = 1e-3  # of the median: below it losses are equal


class LossSpikes:
    """Robust z-scores of losses among those of so many steps before.

    Median and median absolute deviation take the place of mean and standard deviation, so that a
    spike does not hide the next one. Source: Iglewicz and Hoaglin 1993, How to Detect and Handle
    Outliers.
    """

    def __init__(self, window: int, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, window)

    def score(self, loss: float) -> float:
        """Of a loss that then joins the others; 0 while they are fewer than half of the window."""
        others = np.array(self._losses)
        self._losses.append(loss)
        if 2 * len(others) < (self._losses.maxlen or 0):
            return 0.0
        median = float(np.median(others))
        spread = float(np.median(np.abs(others - median)))
        return _MAD * (loss - median) / max(spread, _LEAST_SPREAD * abs(median), 1e-12)


class OddSteps:
    """Looks at the outcome of every step, on every rank; the one that reports also writes."""

    def __init__(self, train: Train, run_dir: Path, dataset: Dataset, reports: bool) -> None:
        """The run continues the metrics in ``run_dir``, if there are any."""
        self._train, self._run_dir, self._dataset = train, run_dir, dataset
        self._reports, self._in_a_row = reports, list[int]()
        self._spikes = None
        if reports and train.loss_spike_zscore is not None:
            window = train.loss_spike_window
            self._spikes = LossSpikes(window, deque(_losses(run_dir / METRICS), window))

    def look_at(self, step: int, done: StepResult) -> None:
        """Every rank calls it, after each step.

        Raises FloatingPointError, on all ranks, once more than `train.max_skipped_steps` steps in
        a row were skipped.
        """
        self._in_a_row = [*self._in_a_row, step] if done.is_skipped else []
        if self._reports:
            self._record(step, done)
        if len(self._in_a_row) <= self._train.max_skipped_steps:
            return
        first = self._in_a_row[0]
        told = (
            f"step {step}: the loss is {_loss(done):g}, the gradient norm {done.grad_norm:g}, and "
            f"none of {len(self._in_a_row)} steps since step {first} was finite, more than "
            f"train.max_skipped_steps {self._train.max_skipped_steps}; their samples are in "
            f"{self._run_dir / BATCHES}: look at them with `mimo replay {self._run_dir} --step "
            f"{first}`, or lower train.learning_rate"
        )
        if self._reports:  # it would come again, so the job must not restart
            incidents.record(self._run_dir, "not finite", told, step, job=job_name())
        barrier()  # a rank that ends early would end the one that still writes
        raise FloatingPointError(told)

    def _record(self, step: int, done: StepResult) -> None:
        loss = _loss(done)
        if done.is_skipped:
            norms = ", ".join(f"{name} {norm:g}" for name, norm in done.grad_norms.items())
            text = (
                f"the loss is {loss:g}, the gradient norm {done.grad_norm:g} ({norms}): "
                f"no module was updated"
            )
            self._keep("skipped step", text, step, done)
        elif self._spikes is not None:
            score, limit = self._spikes.score(loss), self._train.loss_spike_zscore
            if limit is not None and score > limit:
                window = self._train.loss_spike_window
                text = f"the loss {loss:g} has the z-score {score:.1f} among {window} steps before"
                self._keep("loss spike", text, step, done)

    def _keep(self, kind: incidents.Kind, text: str, step: int, done: StepResult) -> None:
        samples = list(samples_of(done.plan, self._dataset))
        path = self._run_dir / BATCHES / f"step_{step}.json"
        told = {"step": step, "kind": kind, "text": text, "samples": samples}
        kept = str(path.relative_to(self._run_dir))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(told), encoding="utf-8")
        except OSError as error:
            kept = f"not kept: {error}"
        named = [one["key"] for one in samples[:_NAMED]]
        incidents.record(
            self._run_dir, kind, text, step, samples=named, num_samples=len(samples), batch=kept
        )


def samples_of(plan: StepPlan, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Every sample of a step: where it is, and its microbatch and lane."""
    for number, planned in enumerate(plan.microbatches):
        own = planned.samples
        columns = (own.source.tolist(), own.sample.tolist(), own.lane.tolist())
        for source, sample, lane in zip(*columns, strict=True):
            index = dataset.indexes[source]
            where = {"source": source, "sample": sample, "shard": str(index.shard_of(sample))}
            yield where | {"key": index.key(sample), "microbatch": number, "lane": lane}


def _loss(done: StepResult) -> float:
    """Per token."""
    return done.loss / max(done.plan.num_loss_tokens, 1)


def _losses(metrics: Path) -> Iterator[float]:
    """The losses of training that were logged so far, without those of skipped steps."""
    if metrics.exists():
        with metrics.open(encoding="utf-8") as file:
            for line in file:
                found = json.loads(line)
                if found.get("loss") is not None and found.get("grad_norm") is not None:
                    yield found["loss"]
