"""What goes wrong in data and steps, and how much of it a run tolerates.

Samples that cannot be read are listed in ``bad_samples.jsonl`` in the run folder. The samples of a
step whose loss or gradient norm is not finite, or whose loss spikes, are kept in
``batches/step_<n>.json``; `mimo replay` runs the step again.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.distributed_c10d import _get_default_store

from data.index.samples import ENOUGH, SkippedSample, worst_shards
from mimo.checkpoint.folder import Progress
from mimo.config.schema import Train
from mimo.config.training import Data
from mimo.device import barrier
from mimo.model.dataset import Dataset
from mimo.model.step_plan import StepPlan
from mimo.runtime.run_files import BAD_SAMPLES, json_lines, record
from mimo.train.metrics import StepResult
from mimo.train.restarts import job_name

BATCHES = "batches"
_STORE_KEY = "bad sample {} of step {}"
_SHOWN_SAMPLES = 16  # in an incident
# The median of distances from the median of a normal distribution, in standard deviations.
_MAD = 0.6745
_LEAST_SPREAD = 1e-3  # of the median: below it losses are equal
_LONGEST_REASON = 2000  # characters
_LONGEST_ON_CONSOLE = 200


# ------------------------------------------------------------------- unreadable samples


def publish_bad_sample(step: int, number: int, rank: int, bad: SkippedSample) -> None:
    """Publish why a sample cannot be read, for the rank that lists it.

    number: of the sample in the step. The store of the world has it before the sum in which all
    ranks learn of the sample.
    """
    entry = {"step": step, "rank": rank} | asdict(bad)
    _get_default_store().set(_STORE_KEY.format(number, step), json.dumps(entry))


class BadSamples:
    """The list of bad samples in the run folder; used by the one rank that reports.

    A resumed run continues it: the samples that indexes leave out are listed anew, and lines of the
    steps that are repeated are dropped.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._run_dir, self._path = run_dir, run_dir / BAD_SAMPLES
        # Entries of indexes have no step.
        self._read = [e for e in json_lines(self._path) if e.get("step", math.inf) < first_step]
        self._count = len(self._read)

    def list_of_indexes(self, splits: Mapping[str, Dataset | None]) -> None:
        entries: list[dict[str, Any]] = []
        for split, dataset in splits.items():
            for source, index in enumerate(dataset.indexes if dataset else ()):
                where = {"found": "index", "split": split, "source": source}
                entries += [where | asdict(bad) for bad in index.skipped_samples()]
        self._path.write_text("".join(map(_line, (*entries, *self._read))), encoding="utf-8")

    def append(self, step: int, numbers: Iterable[int]) -> None:
        """Append samples that some rank could not read, by their numbers in the step.

        The console and an incident report the first, then each doubling of their number.
        """
        store = _get_default_store()
        entries = [json.loads(store.get(_STORE_KEY.format(number, step))) for number in numbers]
        if not entries:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(_line({"found": "reading"} | entry) for entry in entries)
        before, self._count = self._count, self._count + len(entries)
        if before.bit_length() == self._count.bit_length():
            return
        last = SkippedSample(**{k: v for k, v in entries[-1].items() if k not in ("step", "rank")})
        text = (
            f"{len(entries)} skipped in this step, {self._count} in all; the last: "
            f"{' '.join(str(last).split())[:_LONGEST_ON_CONSOLE]}; all are in {BAD_SAMPLES}"
        )
        print(f"skipped samples: step {step + 1}: {text}", flush=True)
        record(self._run_dir, "skipped samples", text, step, num_samples=self._count)


def _line(entry: dict[str, Any]) -> str:
    entry = {key: value for key, value in entry.items() if value is not None}
    if "reason" in entry:
        entry["reason"] = entry["reason"][:_LONGEST_REASON]
    return json.dumps(entry) + "\n"


def check_skipped(limits: Data, progress: Progress, used: int, dataset: Dataset) -> None:
    """Raise RuntimeError when more samples were skipped than the recipe allows.

    used: number of samples so far; later epochs repeat them.
    """
    bad = progress.skipped_samples
    used = min(used, sum(map(len, dataset.indexes)))
    if bad > limits.max_skipped_samples:
        limit = f"more than data.max_skipped_samples {limits.max_skipped_samples}"
    elif used >= ENOUGH and bad > limits.max_skipped_fraction * used:
        limit = (
            f"{bad / used:.2%} of the {used} used so far and above data.max_skipped_fraction "
            f"{limits.max_skipped_fraction:g}"
        )
    else:
        return
    by_shard = Counter(
        dataset.indexes[source].shard_of(sample) for source, sample in progress.skipped
    )
    raise RuntimeError(
        f"{bad} samples could not be read, {limit}; {worst_shards(by_shard)}; {BAD_SAMPLES} in the "
        "run folder names each with its reason: mend these shards, or raise the limit"
    )


# ------------------------------------------------------------------- steps


class LossSpikes:
    """Robust z-scores of losses among those of the ``window`` steps before.

    Median and median absolute deviation take the place of mean and standard deviation, so that a
    spike does not hide the next one. Source: Iglewicz and Hoaglin 1993, How to Detect and Handle
    Outliers.
    """

    def __init__(self, window: int, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, window)

    def score(self, loss: float) -> float:
        """Return the score of a loss, 0 while the window is less than half full; keep the loss."""
        others = np.array(self._losses)
        self._losses.append(loss)
        if 2 * len(others) < (self._losses.maxlen or 0):
            return 0.0
        median = float(np.median(others))
        spread = float(np.median(np.abs(others - median)))
        return _MAD * (loss - median) / max(spread, _LEAST_SPREAD * abs(median), 1e-12)


class AnomalyDetector:
    """Checks the outcome of every step on every rank; the reporting rank also writes."""

    def __init__(self, train: Train, run_dir: Path, dataset: Dataset, reports: bool) -> None:
        self._train, self._run_dir, self._dataset = train, run_dir, dataset
        self._reports, self._skipped_in_a_row = reports, list[int]()
        self._spikes = LossSpikes(train.loss_spike_window)

    def check(self, step: int, done: StepResult) -> None:
        """Check one step; every rank calls it after each.

        Raises FloatingPointError on all ranks after more than `train.max_skipped_steps` in a row.
        """
        self._skipped_in_a_row = [*self._skipped_in_a_row, step] if done.is_skipped else []
        if self._reports:
            self._record(step, done)
        if len(self._skipped_in_a_row) <= self._train.max_skipped_steps:
            return
        first = self._skipped_in_a_row[0]
        text = (
            f"step {step}: the loss is {done.mean_loss:g}, the gradient norm {done.grad_norm:g}, "
            f"and none of {len(self._skipped_in_a_row)} steps since step {first} was finite, more "
            f"than train.max_skipped_steps {self._train.max_skipped_steps}; their samples are in "
            f"{self._run_dir / BATCHES}: look at them with `mimo replay {self._run_dir} --step "
            f"{first}`, or lower train.learning_rate"
        )
        if self._reports:  # it would recur, so the job must not restart
            record(self._run_dir, "not finite", text, step, job=job_name())
        barrier()  # a rank that ends early would end the one that still writes
        raise FloatingPointError(text)

    def _record(self, step: int, done: StepResult) -> None:
        loss = done.mean_loss
        if done.is_skipped:
            norms = ", ".join(f"{name} {norm:g}" for name, norm in done.grad_norms.items())
            text = f"the loss is {loss:g}, the gradient norm {done.grad_norm:g} ({norms}): "
            text += "no module was updated"
            self._keep("skipped step", text, step, done)
        elif (score := self._spikes.score(loss)) > (self._train.loss_spike_zscore or math.inf):
            window = self._train.loss_spike_window
            text = f"the loss {loss:g} has the z-score {score:.1f} among {window} steps before"
            self._keep("loss spike", text, step, done)

    def _keep(self, kind: str, text: str, step: int, done: StepResult) -> None:
        samples = list(samples_of(done.plan, self._dataset))
        name = f"{BATCHES}/step_{step}.json"
        content = {"step": step, "kind": kind, "text": text, "samples": samples}
        (self._run_dir / BATCHES).mkdir(exist_ok=True)
        (self._run_dir / name).write_text(json.dumps(content), encoding="utf-8")
        keys = [sample["key"] for sample in samples[:_SHOWN_SAMPLES]]
        record(self._run_dir, kind, text, step, samples=keys, num_samples=len(samples), batch=name)


def samples_of(plan: StepPlan, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield every sample of a step: where it is, and its microbatch and lane."""
    for number, planned in enumerate(plan.microbatches):
        batch = planned.samples
        columns = (batch.source.tolist(), batch.sample.tolist(), batch.lane.tolist())
        for source, sample, lane in zip(*columns, strict=True):
            index = dataset.indexes[source]
            where = {"source": source, "sample": sample, "shard": str(index.shard_of(sample))}
            yield where | {"key": index.key(sample), "microbatch": number, "lane": lane}
