"""`mimo compare`: in what runs differ, and how they went."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mimo.errors import InputError
from mimo.report.compare import differences, figures, main
from mimo.report.runs import read_runs
from tests.mimo.report.folders import RECIPE, make_run


def test_runs_are_beside_each_other_with_the_keys_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RECIPE.replace("0.1", "0.3").replace("{path: b.tar}", "{path: b.tar, weight: 2}")
    folders = [make_run(tmp_path / "one"), make_run(tmp_path / "two", other, num_steps=50)]
    runs = [run for folder in folders for run in read_runs(folder)]
    assert differences(runs).rows == [
        ("data.sources.1.weight", "–", "2"),
        ("train.learning_rate", "0.1", "0.3"),
    ]
    best = figures(runs).rows
    assert best[0][:7] == ("one", "ended", "100", "110.5", "7", "7", "1,001")
    assert best[1][:4] == ("two", "stopped after step 50", "50", "160.5")
    assert main(folders, tmp_path / "page.html") == 0
    said, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for text in (said, page):
        assert "train.learning_rate" in text
        assert "110.5" in text
        assert "train.steps" not in text
    captions = re.findall(r"<figcaption>(\w+)", page)
    assert captions == ["loss", "validation_loss", "lr", "tokens_per_second", "idle_fraction"]


def test_runs_of_one_name_are_told_apart_and_one_alone_is_no_comparison(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name / "same") for name in ("a", "b")]
    assert main(folders, tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert all(str(folder) in page for folder in folders)
    assert "The recipes are the same" in page
    with pytest.raises(InputError, match="two runs or more"):
        main(folders[:1], tmp_path / "page.html")


def test_shards_that_changed_under_one_path_are_a_difference(tmp_path: Path) -> None:
    texts = {"one": "a.tar: 9 samples, written as 12", "two": "a.tar: 9 samples, written as 34"}
    for name, text in texts.items():
        facts = {"precision": "fp32", "data.sources.0": text, "data.sources.1": "b.tar: same"}
        starts = [{"summary": {"data.sources.0": "an earlier start"}}, {"summary": facts}]
        folder = make_run(tmp_path / name)
        (folder / "environment.json").write_text(json.dumps(starts))
    runs = [run for name in texts for run in read_runs(tmp_path / name)]
    assert differences(runs).rows == [("data.sources.0 (shards)", *texts.values())]
    assert main([tmp_path / "one", tmp_path / "one"], tmp_path / "page.html") == 0
    assert "So are the shards" in (tmp_path / "page.html").read_text()
