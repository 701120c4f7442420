"""`mimo bench data`: all loaders do the same work, and what is judged. No timings."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mimo.bench import data as bench
from mimo.bench.data_contest import Contestant, Pass, difference, watched
from mimo.bench.data_report import Cell, judge
from mimo.bench.data_theirs import INSTALL, Preparation, is_installed
from mimo.bench.data_workload import BATCH, Workload


def test_a_quick_run_gives_all_loaders_the_same_samples_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, figures = tmp_path / "new" / "bench.png", tmp_path / "bench.json"
    assert bench.main(9, 3, 2, True, figures, picture) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].endswith("bounds_missed=0")
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(figures.read_text())
    for package, name in INSTALL.items():
        assert (f"pip install {name}" in text) != is_installed(package)
    cells = {one["cell"]: one["passes"] for one in found["cells"]}
    assert {passes[0]["samples"] for passes in cells.values()} == {16}
    assert all(len(passes) == 1 and passes[0]["peak_bytes"] > 0 for passes in cells.values())
    assert found["differences"]["webdataset, pil"] == [0.0, 0]
    for workers in (0, 2):
        ours, theirs = (
            next(passes[0]["num_bytes"] for name, passes in cells.items() if name.startswith(own))
            for own in (
                f"ours: 90 × 120, one in 8 200 × 150, {workers}",
                f"webdataset, pil: 90 × 120, one in 8 200 × 150, {workers}",
            )
        )
        assert theirs / ours > 7, "fp32 of two frames against bytes of one, and some text"


def test_other_pixels_or_tokens_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(tmp_path / "data", ((60, 60), (60, 60)), BATCH, 1)
    workload.write()
    encode = Preparation.encode

    def other(self: Preparation, key: str, *given: Any) -> dict[str, Any]:
        sample = encode(self, key, *given)
        if key == "sample000003":
            sample["pixel_values"] = sample["pixel_values"].clone()
            sample["pixel_values"][5, 7] += 0.25
        if key == "sample000005":
            sample["ids"] = sample["ids"].clone()
            sample["ids"][1] += 1
        return sample

    rival = Contestant("webdataset", "pil")
    monkeypatch.setattr(Preparation, "encode", other)
    (pixels, tokens), _ = watched(partial(difference, rival, workload))
    assert pixels == pytest.approx(0.25)
    assert tokens == 1


def test_a_failure_in_a_process_of_the_benchmark_is_raised() -> None:
    with pytest.raises(RuntimeError, match="a process of the benchmark failed"):
        watched(lambda: 1 // 0)


WORKLOAD = Workload(Path(), ((8, 8), (8, 8)), 8, 1)
OURS = Cell(WORKLOAD, 0, Contestant(), [Pass(1, 1, 8, 8), Pass(2, 2, 8, 8), Pass(1, 1, 8, 8)])


def judged(*processor_seconds: float, samples: int = 8, pixels: float = 0.0) -> dict[str, bool]:
    passes = [Pass(9, seconds, 8, samples) for seconds in processor_seconds]
    rival = Cell(WORKLOAD, 0, Contestant("webdataset", "pil"), passes)
    found = judge([OURS, rival], {"webdataset, pil": (pixels, 0)}, [0.5])
    return {bound.name: bound.holds for bound in found}


def test_the_speed_is_the_median_of_ratios_of_cpu_seconds_within_rounds() -> None:
    name = "CPU time of webdataset, pil: 8 × 8, 0 workers, by ours"
    assert judged(1.5, 3, 9)[name]
    assert not judged(1.4, 2.8, 9)[name]


def test_missing_samples_other_pixels_and_a_slow_resume_are_missed_bounds() -> None:
    assert all(judged(2, 4, 2).values())
    assert not judged(2, 4, 2, samples=7)["samples that a pass left out"]
    assert not judged(2, 4, 2, pixels=1e-6)["webdataset, pil: difference of pixel values"]
    slow = judge([replace(OURS)], {}, [0.1, 1.1, 1.2])
    assert [bound.name for bound in slow if not bound.holds] == ["resume at sample 100,000,000, s"]
