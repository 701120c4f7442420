"""Read a run folder: curves, incidents and jobs, and whether the run has ended, died or goes on."""

import json
import math
import os
import re
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mimo.checkpoint.folder import phase_folders
from mimo.config.source import read_yaml
from mimo.errors import InputError, RecipeError
from mimo.runtime.heartbeat import RankState, read_states
from mimo.runtime.run_files import LAUNCH, METRICS, incidents, json_lines, starts_of

TIMES = re.compile(r"seconds_(?P<module>.+?)_(?P<phase>[a-z]+(_wait)?)(?P<max>_max)?")
"""Metrics of where time goes: the mean over a module's ranks, or the largest."""
_ALIVE_SECONDS = 120.0  # far longer than the time between two heartbeats of a rank


@dataclass(frozen=True)
class Curve:
    """A metric over time. steps: (n,) updates done, ascending. values: (n,), some not finite."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """The finite values (n',)."""
        return self.values[np.isfinite(self.values)]

    @property
    def is_zero(self) -> bool:
        return not self.finite.any()


@dataclass(frozen=True)
class RunData:
    """One run.

    curves: by metric; an entry of a mapping, such as `epochs`, is a metric such as `epochs_0`.
    recipe: plain data. starts: see `mimo.runtime.run_files`. states: of ranks that ended badly.
    """

    title: str
    folder: Path
    curves: Mapping[str, Curve]
    recipe: Mapping[str, Any]
    recipe_text: str
    incidents: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    states: Mapping[int, RankState]

    @property
    def alive(self) -> list[int]:
        """Ranks with a recent heartbeat and no failure."""
        states = self.states.items()
        return [r for r, s in states if not s.failure and s.age_seconds < _ALIVE_SECONDS]

    @property
    def summary(self) -> dict[str, str]:
        """Facts about the last start, from `mimo.train.run_summary`; empty if there are none."""
        return self.starts[-1].get("summary", {}) if self.starts else {}

    @property
    def steps_done(self) -> int:
        return max((int(curve.steps[-1]) for curve in self.curves.values()), default=0)

    @property
    def steps_planned(self) -> int | None:
        return self.value_of("train.steps")

    @property
    def state(self) -> str:
        if self.steps_planned is not None and self.steps_done >= self.steps_planned:
            return "ended"
        if self.alive:
            return "running"
        last = self.incidents[-1] if self.incidents else {}
        if last.get("kind") == "signal" and last.get("step") == self.steps_done - 1:
            return str(last.get("text"))
        return f"stopped after step {self.steps_done}"

    def value_of(self, key: str) -> Any:
        """Return the recipe's value of a dotted key, or None."""
        value: Any = self.recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def median(self, name: str) -> float | None:
        values = self.curves[name].finite if name in self.curves else ()
        return float(np.median(values)) if len(values) else None

    def last(self, name: str, num_values: int = 1) -> float | None:
        """Return the mean of a metric's last values, or None."""
        values = self.curves[name].finite[-num_values:] if name in self.curves else ()
        return float(np.mean(values)) if len(values) else None


def read_runs(folder: Path, newest_bytes: int | None = None) -> list[RunData]:
    """Read a folder's run or its phases, in order; see `read_curves`. Raises InputError."""
    folders = [*phase_folders(folder).values()] or [folder]
    if not any((f / "recipe.yaml").exists() or (f / METRICS).exists() for f in folders):
        raise InputError(
            f"{folder}: no run is here; give the folder of a run, such as runs/quickstart"
        )
    name = folder.resolve().name
    titles = {f: f"{name}/{f.name}" if f != folder else name for f in folders}
    return [_read_run(f, title, newest_bytes) for f, title in titles.items()]


def begun_runs(folder: Path, newest_bytes: int | None = None) -> list[RunData]:
    """Read the runs as `read_runs`; empty if a job was launched whose ranks have not started."""
    try:
        return read_runs(folder, newest_bytes)
    except InputError:
        if not (folder / LAUNCH).is_dir():
            raise
        return []


def _read_run(folder: Path, title: str, newest_bytes: int | None) -> RunData:
    text, recipe = "", dict[str, Any]()
    path = folder / "recipe.yaml"
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        with suppress(RecipeError):  # a run that was killed while it wrote its recipe
            recipe = read_yaml(path).data
    return RunData(
        title=title,
        folder=folder,
        curves=read_curves(folder / METRICS, newest_bytes),
        recipe=recipe,
        recipe_text=text,
        incidents=incidents(folder),
        starts=starts_of(folder),
        states=read_states(folder, time.time()),
    )


def read_curves(path: Path, newest_bytes: int | None = None) -> dict[str, Curve]:
    """Read the metrics of a file or its newest bytes; null is NaN, damaged lines are skipped."""
    points = dict[str, tuple[array[int], array[float]]]()
    if not path.exists():
        return {}
    with path.open("rb") as file:
        if newest_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - newest_bytes))
        for line in file:
            try:
                record = json.loads(line)
                # Training counts the steps before an update, validation those after it.
                step = int(record.pop("step")) + ("loss" in record)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            for name, value in _flat(record):
                steps, values = points.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                values.append(value)
    return {name: Curve(*map(np.array, columns)) for name, columns in points.items()}


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat({f"{name}_{key}": entry for key, entry in value.items()})
        elif value is None:
            yield name, math.nan
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def times_by_module(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the metrics of the mean times of a step, by module and part of the step."""
    modules = dict[str, dict[str, str]]()
    for match in filter(None, map(TIMES.fullmatch, names)):
        if not match["max"]:
            modules.setdefault(match["module"], {})[match["phase"]] = match[0]
    return modules


BY_HAND = "by hand"  # the kind of a job that recorded itself
_READ_BYTES = 2**16  # of a job's output, from its end


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the submitted jobs, the oldest first: time, job_id, kind and script.

    A job records itself, too, in case a person submitted it; the kind from `mimo launch` counts.
    """
    jobs: dict[str, dict[str, Any]] = {}
    for line in json_lines(folder / LAUNCH / "jobs.jsonl"):
        number = str(line.get("job_id"))
        if number not in jobs or jobs[number].get("kind") == BY_HAND:
            jobs[number] = line
    return [*jobs.values()]


def job_folders(folder: Path) -> list[Path]:
    """Return the folders of jobs' output: in the run folder, and in `cluster.log_dir`."""
    launch = folder / LAUNCH
    try:
        log_dir = (read_yaml(launch / "recipe.yaml").data.get("cluster") or {}).get("log_dir")
    except InputError:  # no job was launched, or the file is being written
        log_dir = None
    if log_dir is None:
        return [launch]
    # A relative log_dir begins in the folder where the path of the run begins, one of its parents.
    places = (parent / log_dir / folder.name for parent in folder.resolve().parents)
    return [launch, *(place for place in places if place.is_dir())]


def last_output(folder: Path, num_lines: int) -> tuple[Path, Sequence[str]] | None:
    """Return the output file of the newest job and its last lines that are not empty, or None."""
    files: list[tuple[float, Path]] = []
    for path in (path for where in job_folders(folder) for path in where.glob("job_*.out")):
        with suppress(FileNotFoundError):  # it is being deleted
            files.append((path.stat().st_mtime, path))
    for _, newest in sorted(files, reverse=True):
        with suppress(FileNotFoundError), newest.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return newest, deque((line for line in lines if line.strip()), num_lines)
    return None
