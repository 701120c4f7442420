"""`bad_samples.jsonl` in the run folder, one line per sample that is left out, and their limits.

A rank that cannot read a sample leaves a note in the store of the world, before the sum in which
all ranks learn that somebody could not. So the one rank that writes finds the note of each.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from data.index.samples import ENOUGH, SkippedSample, worst_shards
from mimo.checkpoint.folder import Progress
from mimo.recipe.data import Data
from mimo.step.dataset import Dataset

BAD_SAMPLES = "bad_samples.jsonl"
_MOST_OF_AN_INDEX = 10_000  # lines
_LONGEST = 2000  # characters of a reason


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

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._path = run_dir / BAD_SAMPLES
        self._read: list[str] = []
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines()
            self._read = [line for line in lines if _step_of(line) < first_step]

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
        """Append samples that some rank could not read, given by their numbers in the step."""
        for number in numbers:
            note = json.loads(_get_default_store().get(_place(step, number)))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line({"found": "reading"} | note) + "\n")


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
