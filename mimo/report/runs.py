"""What a run folder holds of its run and its jobs, whether the run has ended, died or goes on.

A file of metrics may be long, so it is thinned while it is read: of many neighbouring steps the
first one and the one with the highest loss are kept, so that no spike is lost.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
_BINS = 500  # at least so many points of a longer curve are kept
_TAIL = 20  # steps at the end that are all kept
_ALIVE_SECONDS = 120.0  # ranks write far more often that they are there


@dataclass(frozen=True)
class Curve:
    """A metric over time. steps: (n,) updates done, ascending. values: (n,) may not be finite."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """The values (n',) that are numbers."""
        return self.values[np.isfinite(self.values)]


@dataclass(frozen=True)
class RunData:
    """One run.

    curves: by the name of the metric; an entry of a mapping, such as `epochs`, has a name of its
    own, such as `epochs_0`. recipe: its keys as plain data, recipe_text as the file has them.
    starts: see `mimo.runtime.run_files`. states: of ranks that did not end well.
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
        """Ranks that were there a moment ago."""
        found = self.states.items()
        return [r for r, one in found if not one.failure and one.age_seconds < _ALIVE_SECONDS]

    @property
    def summary(self) -> dict[str, str]:
        """Facts of the last start, of `mimo.train.run_summary`; none where they were not kept."""
        found = self.starts[-1].get("summary") if self.starts else None
        return (
            {str(name): str(text) for name, text in found.items()}
            if isinstance(found, dict)
            else {}
        )

    @property
    def steps_done(self) -> int:
        """Steps in its metrics."""
        return max((int(curve.steps[-1]) for curve in self.curves.values()), default=0)

    @property
    def steps_planned(self) -> int | None:
        """Those of the recipe; None if that cannot be read."""
        found = self.value_of("train.steps")
        return found if isinstance(found, int) else None

    @property
    def state(self) -> str:
        """Where it stands, in words."""
        if self.steps_planned is not None and self.steps_done >= self.steps_planned:
            return "ended"
        if self.alive:
            return "running"
        last = self.incidents[-1] if self.incidents else {}
        if last.get("kind") == "signal" and last.get("step") == self.steps_done - 1:
            return str(last.get("text"))
        return f"stopped after step {self.steps_done}"

    def value_of(self, key: str) -> Any:
        """The recipe's value of a dotted key; None where it has none."""
        found: Any = self.recipe
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def median(self, name: str) -> float | None:
        """Of a metric over all steps that were kept."""
        found = self.curves[name].finite if name in self.curves else ()
        return float(np.median(found)) if len(found) else None

    def last(self, name: str, of: int = 1) -> float | None:
        """The mean of a metric's last values."""
        found = self.curves[name].finite[-of:] if name in self.curves else ()
        return float(np.mean(found)) if len(found) else None


def read_runs(folder: Path, newest_bytes: int | None = None) -> list[RunData]:
    """The run in a folder, or those of its phases, in order.

    newest_bytes: as of `read_curves`. Raises InputError if there is none.
    """
    found = [*phase_folders(folder).values()] or [folder]
    if not any((one / "recipe.yaml").exists() or (one / METRICS).exists() for one in found):
        raise InputError(
            f"{folder}: no run is here; give the folder of a run, such as runs/quickstart"
        )
    name = folder.resolve().name
    titles = {one: f"{name}/{one.name}" if one != folder else name for one in found}
    return [_read_run(one, title, newest_bytes) for one, title in titles.items()]


def begun_runs(folder: Path, newest_bytes: int | None = None) -> list[RunData]:
    """The same, and none where a job was launched whose ranks have not started."""
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
        title,
        folder,
        read_curves(folder / METRICS, newest_bytes),
        recipe,
        text,
        incidents(folder),
        starts_of(folder),
        read_states(folder, time.time()),
    )


def read_curves(path: Path, newest_bytes: int | None = None) -> dict[str, Curve]:
    """Every metric of a file, thinned; lines that are cut off or damaged are left out.

    newest_bytes: how much is read, from its end; None for all of it.
    """
    points = dict[str, dict[int, float]]()
    for line in _thinned_lines(path, newest_bytes) if path.exists() else ():
        try:
            record = json.loads(line)
            # Training counts the steps before an update, validation those after it.
            step = int(record.pop("step")) + ("loss" in record)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        for name, value in _flat(record):
            points.setdefault(name, {})[step] = value
    curves = {}
    for name, own in points.items():
        ordered = sorted(own.items())
        steps, values = zip(*ordered, strict=True)
        curves[name] = Curve(np.array(steps), np.array(values, np.float64))
    return curves


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat({f"{name}_{key}": own for key, own in value.items()})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


class _Thinned:
    """Some of many lines: of every bin of neighbours the first, and that of the highest loss."""

    def __init__(self) -> None:
        self._bins: list[tuple[bytes, float, bytes]] = []
        self._width, self._count = 1, 0

    def add(self, line: bytes, loss: float) -> None:
        if self._count % self._width:
            first, highest, _ = self._bins[-1]
            if loss > highest:
                self._bins[-1] = first, loss, line
        else:
            if len(self._bins) == 2 * _BINS:
                pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
                self._bins = [(a[0], *max(a[1:], b[1:])) for a, b in pairs]
                self._width *= 2
            self._bins.append((line, loss, line))
        self._count += 1

    def lines(self) -> Iterator[bytes]:
        for first, _, highest in self._bins:
            yield from dict.fromkeys((first, highest))


def _thinned_lines(path: Path, newest_bytes: int | None) -> Iterator[bytes]:
    """Steps, steps that measure where time goes, and validations, each thinned by themselves."""
    plain, measured, others = _Thinned(), _Thinned(), _Thinned()
    tail = deque[bytes](maxlen=_TAIL)
    with path.open("rb") as file:
        if newest_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - newest_bytes))
        for line in file:
            loss = _loss(line)
            if loss is None:
                others.add(line, 0.0)
            elif b'"seconds_' in line:
                measured.add(line, loss)
            else:
                plain.add(line, loss)
            tail.append(line)
    for one in (plain, measured, others):
        yield from one.lines()
    yield from tail


def _loss(line: bytes) -> float | None:
    """The loss in a line of a step, found without parsing all of it; infinite if it is none."""
    start = line.find(b'"loss": ')
    if start < 0:
        return None
    try:
        found = float(line[start + 8 : line.find(b",", start)])
    except ValueError:
        return math.inf
    return math.inf if math.isnan(found) else found


BY_HAND = "by hand"
"""The kind of a job that has noted itself."""
_READ_BYTES = 2**16  # of a job's output, from its end


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """Those that SLURM was given, the oldest first: time, job_id, kind and script.

    Whoever submits a job notes it, and the job itself does, in case that a person submitted it:
    perhaps both. What `mimo launch` says of its kind counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in json_lines(folder / LAUNCH / "jobs.jsonl"):
        number = str(line.get("job_id"))
        if number not in found or found[number].get("kind") == BY_HAND:
            found[number] = line
    return [*found.values()]


def job_folders(folder: Path) -> list[Path]:
    """Where jobs write: in the run folder, or where `cluster.log_dir` says."""
    own = folder / LAUNCH
    try:
        section = read_yaml(own / "recipe.yaml").data.get("cluster")
    except (RecipeError, InputError):  # no job was launched, or one is just being
        return [own]
    given = section.get("log_dir") if isinstance(section, dict) else None
    if not isinstance(given, str):
        return [own]
    # Jobs begin in the folder that relative paths, that of the run among them, begin in.
    # Each run has a folder of its own there.
    places = (above / given / folder.name for above in folder.resolve().parents)
    return [own, *(place for place in places if place.is_dir())]


def last_words(folder: Path, num_lines: int) -> tuple[Path, Sequence[str]] | None:
    """The output of the newest job, and its last lines, but for empty ones; None without any."""
    found: list[tuple[float, Path]] = []
    for path in (path for where in job_folders(folder) for path in where.glob("job_*.out")):
        with suppress(FileNotFoundError):  # somebody is tidying up
            found.append((path.stat().st_mtime, path))
    for _, newest in sorted(found, reverse=True):
        with suppress(FileNotFoundError), newest.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return newest, deque((line for line in lines if line.strip()), num_lines)
    return None
