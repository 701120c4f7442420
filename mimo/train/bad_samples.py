"""`bad_samples.jsonl` in the run folder, one line per sample that is left out, and their limits.

A rank that cannot read a sample leaves a note in the store of the world, before the sum in which
all ranks learn that somebody could not. So the one rank that writes finds the note of each.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from data.index.samples import ENOUGH, SkippedSample, worst_shards
from mimo.checkpoint.folder import Progress
from mimo.config.training import Data
from mimo.model.dataset import Dataset
from mimo.train import incidents
from mimo.train.run_files import BAD_SAMPLES

_MOST_OF_AN_INDEX = 10_000  # lines
_LONGEST = 2000  # characters of a reason
_LONGEST_TOLD = 200
_TOLD = 10  # skipped samples of a run before only every doubling of their number is told


def leave_note(step: int, number: int, rank: int, bad: SkippedSample) -> None:
    """Tell the rank that writes what is wrong with a sample, given by its number in the step."""
    note = {"step": step, "rank": rank} | asdict(bad)
    _get_default_store().set(_place(step, number), json.dumps(note))


def _place(step: int, number: int) -> str:
    return f"bad sample {number} of step {step}"


class BadSamples:
    """The list of bad samples; used by the one rank that speaks for the run.

    A resumed run continues it: what is known of the index is written anew, and of what was found
    when reading, lines from the step on from which it resumes are dropped.
    """

    def __init__(
        self, run_dir: Path, first_step: int, say: Callable[[str], object] = print
    ) -> None:
        """say: takes a line for the console."""
        self._run_dir, self._path, self._say = run_dir, run_dir / BAD_SAMPLES, say
        self._read: list[str] = []
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines()
            self._read = [line for line in lines if _step_of(line) < first_step]
        self._count = self._count_told = len(self._read)

    def of_indexes(self, splits: Mapping[str, Dataset | None]) -> None:
        """List what the indexes leave out: all are counted, ten thousand of each are named."""
        lines = []
        for split, dataset in splits.items():
            for source, index in enumerate(dataset.indexes if dataset else ()):
                named = itertools.islice(index.skipped_samples(), _MOST_OF_AN_INDEX)
                where = {"found": "index", "split": split, "source": source}
                lines += [_line(where | asdict(bad)) for bad in named]
                if (more := index.num_skipped - _MOST_OF_AN_INDEX) > 0:
                    lines.append(_line(where | {"more": more}))
        text = "".join(f"{line}\n" for line in (*lines, *self._read))
        self._path.write_text(text, encoding="utf-8")

    def found(self, step: int, numbers: Iterable[int]) -> None:
        """Append samples that some rank could not read, given by their numbers in the step.

        Tells them on the console and as an incident: the first ten of a run, then each time that
        their number has doubled.
        """
        notes = [json.loads(_get_default_store().get(_place(step, number))) for number in numbers]
        if not notes:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(_line({"found": "reading"} | note) + "\n" for note in notes)
        before, self._count = self._count, self._count + len(notes)
        if before >= _TOLD and self._count < 2 * self._count_told:
            return
        self._count_told = self._count
        last = SkippedSample(**{k: v for k, v in notes[-1].items() if k not in ("step", "rank")})
        text = (
            f"{len(notes)} skipped in this step, {self._count} in all; the last: "
            f"{' '.join(str(last).split())[:_LONGEST_TOLD]}; all are in {BAD_SAMPLES}"
        )
        self._say(f"skipped samples: step {step + 1}: {text}")
        incidents.record(self._run_dir, "skipped samples", text, step, num_samples=self._count)


def _line(entry: dict[str, Any]) -> str:
    entry = {key: value for key, value in entry.items() if value is not None}
    if "reason" in entry:
        entry["reason"] = entry["reason"][:_LONGEST]
    return json.dumps(entry)


def _step_of(line: str) -> float:
    """The step in which a bad sample was found; infinite for one of the index."""
    try:
        return json.loads(line).get("step", float("inf"))
    except ValueError:
        return float("inf")  # the last line of a run that was killed while writing


def check_skipped(limits: Data, progress: Progress, used: int, dataset: Dataset) -> None:
    """Raise RuntimeError when more samples were skipped than the recipe allows.

    used: samples of the order so far; in later epochs they are the same ones again.
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
    by_shard = Counter(dataset.indexes[one].shard_of(sample) for one, sample in progress.skipped)
    raise RuntimeError(
        f"{bad} samples could not be read, {limit}; {worst_shards(by_shard)}; {BAD_SAMPLES} in the "
        "run folder names each with its reason: mend these shards, or raise the limit"
    )
