"""`python -m benchmarks.data`: all loaders do the same work, and what is judged. No timings."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data as bench
from benchmarks.data import Workload
from benchmarks.data_rival import BATCH, OPTIONAL, RIVALS, Preparation, is_installed
from benchmarks.harness import Contest, Run, in_subprocess

# Forks of a process with threads: what runs there does without them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def test_a_quick_run_gives_all_loaders_the_same_samples_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "new" / "bench.json"
    assert bench.main(9, 3, 2, True, figures) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].endswith("bounds_missed=0")
    found = json.loads(figures.read_text())
    for package in OPTIONAL:
        assert (f"pip install {package}" in text) != is_installed(package)
    places = ("0 workers", "2 workers", "2 ranks of a lane")
    assert [*found["runs"]] == [f"90 × 120, one in 8 200 × 150, {place}" for place in places]
    differences = {bound["name"]: bound["value"] for bound in found["bounds"]}
    assert differences["webdataset, pil: difference of pixel values"] == 0
    assert differences["webdataset, pil: samples with other tokens"] == 0
    for where, loaders in found["runs"].items():
        assert {passes[0]["result"]["samples"] for passes in loaders.values()} == {16}
        assert all(len(passes) == 1 for passes in loaders.values())
        sizes = {name: passes[0]["result"]["bytes"] for name, passes in loaders.items()}
        if where.endswith("lane"):
            assert sizes["DataLoader"] == sizes["ours"], "the same batches"
        else:
            fp32 = "fp32 of two frames against bytes of one, and some text"
            assert sizes["webdataset, pil"] / sizes["ours"] > 7, fp32


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

    rival = partial(RIVALS["webdataset"], backend="pil")
    monkeypatch.setattr(Preparation, "encode", other)
    pixels, tokens = in_subprocess(partial(bench.difference, rival, workload))
    assert pixels == pytest.approx(0.25)
    assert tokens == 1


def judged(*processor_seconds: float, samples: int = 8, pixels: float = 0.0) -> dict[str, bool]:
    ours = [Run(own, own, result={"samples": 8}) for own in (1, 2, 1)]
    theirs = [Run(9, own, result={"samples": samples}) for own in processor_seconds]
    contest = Contest("small", {"ours": ours, "webdataset, pil": theirs})
    found = bench.judge([contest], 8, {"webdataset, pil": (pixels, 0)})
    return {bound.name: bound.holds for bound in found}


def test_the_speed_is_the_median_of_ratios_of_cpu_seconds_within_rounds() -> None:
    name = "CPU time of webdataset, pil: small, by ours"
    assert judged(1.5, 3, 9)[name]
    assert not judged(1.4, 2.8, 9)[name]


def test_missing_samples_and_other_pixels_are_missed_bounds() -> None:
    assert all(judged(2, 4, 2).values())
    assert not judged(2, 4, 2, samples=7)["samples that a pass left out"]
    assert not judged(2, 4, 2, pixels=1e-6)["webdataset, pil: difference of pixel values"]
