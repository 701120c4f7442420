"""`mimo report` and `mimo compare`: pages of a real run, and of runs made by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mimo.errors import InputError
from mimo.generate.evaluate import draw
from mimo.generate.scores import Answered
from mimo.report.run import compare, differences, figures, part_of, report
from mimo.report.runs import read_runs
from mimo.runtime.run_files import record, starts_of
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.report.folders import RECIPE, make_run
from tests.mimo.runs import LAYOUT, metrics, run

SECTIONS = [
    *("Loss", "Throughput", "Where the time goes", "Balance", "Memory", "Data"),
    *("Incidents", "Configuration", "Environment"),
]
SCORED = {"split": "test", "metrics": ["exact_match"], "left_out": {}}
HOSTILE = "<script>alert(1)</script> $\\frac{ \" ' {{ 7007 * 7 }}"


def sections(page: str) -> list[str]:
    return re.findall(r"<h3>(.*)</h3>", page)


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run of three ranks; the second step of rank 1 is traced."""
    directory = tmp_path_factory.mktemp("trained")
    tiny.write_samples(directory)
    recipe = tiny.write_recipe(directory)
    settings = ["train.steps=3", "train.log_every=2", "train.profile={steps: [1, 1], ranks: [1]}"]
    run(run_ranks, recipe, *LAYOUT, *settings)
    return recipe


def test_logged_steps_say_where_the_time_of_every_module_went(trained: Path) -> None:
    first, second, last = metrics(trained)
    assert not [name for name in first if name.startswith(("seconds_", "idle_", "memory_"))]
    common = {"data", "sync", "other", "backward", "bridge_wait", "gradients", "update"}
    for line in (second, last):
        for module, work in (("vision", "encode"), ("language", "forward")):
            phases = {
                name.removeprefix(f"seconds_{module}_"): value
                for name, value in line.items()
                if name.startswith(f"seconds_{module}_")
            }
            means = {name for name in phases if not name.endswith("_max")}
            assert means == {*common, work}
            assert all(0 < phases[name] <= phases[f"{name}_max"] for name in means)
            assert 0 < line[f"idle_fraction_{module}"] < 1
            assert line[f"memory_gib_{module}"] > 0
        waits = [line[f"bridge_wait_seconds_vision_{way}"] for way in ("forward", "backward")]
        assert min(waits) > 0
        for way in ("forward", "backward"):  # each row goes to the one rank of its lane
            sent = line[f"bridge_bytes_vision_{way}"]
            assert sent == line[f"bridge_least_bytes_vision_{way}"] > 0


def test_the_trace_of_the_chosen_rank_and_step_has_the_phases_by_name(trained: Path) -> None:
    (path,) = (trained.parent / "runs" / "tiny" / "profile").iterdir()
    assert path.name == "rank_1_steps_1_to_1.json"
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    expected = ["data", "language forward 0", "language forward 1", "language backward"]
    expected += ["language gradients", "language update", "sync"]
    expected += ["language bridge_wait vision_forward 0"]
    assert set(expected) <= set(names)
    assert names.count("language forward 0") == 1


def test_the_page_of_a_real_run_is_complete_and_needs_no_network(trained: Path) -> None:
    folder = trained.parent / "runs" / "tiny"
    assert report(folder, None) == 0
    page = (folder / "report.html").read_text()
    assert sections(page) == SECTIONS
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert page.count("<script") == 1, "the page's own"
    assert re.findall("<dt>(.*?)</dt>", page) == [
        *("model vision", "model language", "layout", "data.sources.0"),
        *("step", "run", "precision"),
    ]
    assert "<figcaption>Gradient norm" in page
    assert "Steps skipped so far" not in page
    (start,) = starts_of(folder)
    assert (start["step"], start["ranks"], start["device"]) == (0, 3, "CPU")
    assert start["packages"]["torch"] in page


def test_figures_are_those_of_the_metrics(tmp_path: Path) -> None:
    recipe = RECIPE.replace("]}", "], validation: [{path: held_out.tar}, {path: documents.tar}]}")
    sources = {"validation_loss_0": 6.5, "validation_loss_1": 7.5}
    extra = {"something_else": 2, "grad_norm_vision": 0.5, **sources}
    folder = make_run(tmp_path / "made", recipe, metrics=extra)
    (tmp_path / "made" / "environment.json").write_text('[{"host": "n1"}, {"host": "n2"}, {}]')
    record(folder, "signal", "SIGTERM came", 12, rank=3)
    record(folder, "restart", "restart 1 of 2", 20)
    (run,) = read_runs(folder)
    part = part_of(run, with_title=False)
    assert part.tiles == {
        "state": "ended",
        "steps": "100 of 100",
        "loss, last 20 steps": "110.5",
        "validation loss": "7",
        "tokens/s, median": "1,001",
        "of ranks' time idle, median": "50.0 %",
        "restarts": "1",
        "incidents": "2",
    }
    sections = {section.title: section for section in part.sections}
    assert [picture.title for picture in sections["Other figures"].pictures] == ["something_else"]
    assert "Gradient norm" in [picture.title for picture in sections["Loss"].pictures]
    (times,) = sections["Where the time goes"].tables
    assert sorted(map(tuple, times.rows)) == [
        ("vision", "bridge wait", "2", "–", "50.0 %"),
        ("vision", "encode", "2", "3", "50.0 %"),
    ]
    assert sections["Data"].tables[0].rows == [
        ("0", "a.tar", "75.0 %", "0.99"),
        ("1", "b.tar", "25.0 %", "0.5"),
    ]
    assert sections["Validation by source"].tables[0].rows == [
        ("0", "held_out.tar", "6.5"),
        ("1", "documents.tar", "7.5"),
    ]
    signal, restart = sections["Incidents"].tables[0].rows
    assert signal[1:] == ("signal", "12", "SIGTERM came", "rank 3")
    assert restart[1:] == ("restart", "20", "restart 1 of 2", "")


def test_what_was_drawn_and_the_losses_of_modules_are_shown(tmp_path: Path) -> None:
    losses = {f"{kind}loss_{name}": 1.5 for kind in ("", "validation_") for name in ("image", "b")}
    folder = make_run(tmp_path / "made", metrics={**losses, "validation_loss_0": 2.5})
    picture = np.full((4, 4, 3), 128, np.uint8)
    answer = Answered([], "draw", "", "", truth=[picture], drawn=[picture])
    draw([answer], folder / "drawn_test.png")
    (folder / "drawn_test").mkdir()
    (run,) = read_runs(folder)
    sections = {section.title: section for section in part_of(run, with_title=False).sections}
    assert [picture.title for picture in sections["Predictions"].pictures] == ["drawn_test"]
    pictures = {picture.title: picture.curves for picture in sections["Loss"].pictures}
    curves = json.loads(pictures["Loss of each module, per token or item"])["curves"]
    assert {curve["name"] for curve in curves} == losses.keys()
    (of_sources,) = sections["Validation by source"].pictures
    assert [c["name"] for c in json.loads(of_sources.curves)["curves"]] == ["validation_loss_0"]


def test_hostile_texts_are_shown_escaped(tmp_path: Path) -> None:
    quoted = json.dumps(HOSTILE)
    recipe = RECIPE.replace("a.tar", quoted)
    folder = make_run(tmp_path / "made", recipe, metrics={HOSTILE: 1.0, "grad_norm_$\\x$": 2.0})
    record(folder, "crash", HOSTILE, 3, fact=HOSTILE)
    start = {"host": HOSTILE, "packages": {HOSTILE: HOSTILE}, "summary": {HOSTILE: HOSTILE}}
    (folder / "environment.json").write_text(json.dumps([start]))
    answer = Answered([np.zeros((4, 4, 3), np.uint8)], HOSTILE, HOSTILE, "b")
    draw([answer], folder / "held_out_test.png")
    sample = {"question": HOSTILE, "given": "a", "expected": HOSTILE, "exact": False}
    (folder / "held_out_test.json").write_text(
        json.dumps({**SCORED, "exact_match": 0.5, "samples": [sample]})
    )
    (folder / "held_out_half.json").write_text('{"split": "va')
    assert report(folder, tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == 1, "the page's own"
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 9
    assert "49049" not in re.sub(r'(src="data:|data-curves=")[^"]*"', "", page)
    assert "data:image/png;base64" in page
    assert "0.500" in page
    assert sections(page)[0] == "Predictions"


def test_curves_that_are_zero_throughout_are_not_drawn(tmp_path: Path) -> None:
    zeros = {"skipped_samples": 0, "grad_norm": 1.0, "grad_norm_vision": 0.0, "zero": 0}
    (run,) = read_runs(make_run(tmp_path, metrics=zeros))
    pictures = [picture for section in part_of(run, False).sections for picture in section.pictures]
    drawn = {picture.title: picture.curves for picture in pictures}
    assert not {"Samples left out", "zero"} & drawn.keys()
    assert [curve["name"] for curve in json.loads(drawn["Gradient norm"])["curves"]] == [
        "grad_norm"
    ]


def test_tokens_of_experts_are_one_picture_with_a_row_for_each(tmp_path: Path) -> None:
    tokens = {f"expert_tokens_{n}": float(value) for n, value in enumerate([3, 0, 5])}
    (run,) = read_runs(make_run(tmp_path, metrics=tokens))
    pictures = [picture for section in part_of(run, False).sections for picture in section.pictures]
    (picture,) = [picture for picture in pictures if "expert" in picture.title]
    assert picture.figure is not None
    (image,) = picture.figure.axes[0].images
    rows = np.asarray(image.get_array())
    assert rows.shape == (3, 100)
    assert rows.mean(axis=1).tolist() == [3, 0, 5]


def test_a_run_that_has_not_done_a_step_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: [broken")
    assert report(tmp_path, None) == 0
    page = (tmp_path / "report.html").read_text()
    assert sections(page) == ["Incidents", "Configuration"]
    assert "stopped after step 0" in page


@pytest.mark.parametrize("log_dir", ["launch", "logs"])
def test_the_page_of_a_run_without_ranks_shows_why_its_job_ended(
    tmp_path: Path, log_dir: str
) -> None:
    launch = tmp_path / "run" / "launch"
    launch.mkdir(parents=True)
    (launch / "jobs.jsonl").write_text('{"time": "noon", "job_id": "7", "kind": "job"}\n')
    logs = launch
    if log_dir == "logs":
        (launch / "recipe.yaml").write_text("cluster: {log_dir: logs}\n")
        logs = tmp_path / "logs" / "run"
        logs.mkdir(parents=True)
    (logs / "job_7.out").write_text(f"x.yaml:3: {HOSTILE}\nexit code 2 at noon\n")
    assert report(tmp_path / "run", None) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert sections(page) == ["Jobs"]
    for text in ("no rank has started", "<td>7</td>", "job_7.out", "exit code 2 at noon"):
        assert text in page
    assert "x.yaml:3: &lt;script&gt;" in page
    make_run(tmp_path / "run")
    assert report(tmp_path / "run", None) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert sections(page)[-1] == "Jobs"
    assert "no rank has started" not in page


def test_a_job_of_phases_has_one_page(tmp_path: Path) -> None:
    for name in ("phase_1_projector", "phase_2_all"):
        make_run(tmp_path / "job" / name)
    assert report(tmp_path / "job", None) == 0
    page = (tmp_path / "job" / "report.html").read_text()
    phases = ["job/phase_1_projector", "job/phase_2_all"]
    assert re.findall(r"<h2>(.*)</h2>", page) == phases
    sample = {"question": "what?", "given": "a", "expected": "a", "exact": True}
    (tmp_path / "job" / "held_out_test.json").write_text(
        json.dumps({**SCORED, "exact_match": 1.0, "samples": [sample]})
    )
    assert report(tmp_path / "job", None) == 0
    page = (tmp_path / "job" / "report.html").read_text()
    assert re.findall(r"<h2>(.*)</h2>", page) == ["The whole job", *phases]


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
    rows = figures(runs).rows
    assert rows[0][:7] == ("one", "ended", "100", "110.5", "7", "7", "1,001")
    assert rows[1][:4] == ("two", "stopped after step 50", "50", "160.5")
    assert compare(folders, tmp_path / "page.html") == 0
    printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for text in (printed, page):
        assert "train.learning_rate" in text
        assert "110.5" in text
        assert "train.steps" not in text
    captions = re.findall(r"<figcaption>(\w+)", page)
    assert captions == ["loss", "validation_loss", "lr", "tokens_per_second", "idle_fraction"]


def test_runs_with_equal_names_are_distinguished_and_a_lone_run_is_refused(
    tmp_path: Path,
) -> None:
    folders = [make_run(tmp_path / name / "same") for name in ("a", "b")]
    assert compare(folders, tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert all(str(folder) in page for folder in folders)
    assert "The recipes are the same" in page
    with pytest.raises(InputError, match="two runs or more"):
        compare(folders[:1], tmp_path / "page.html")


def test_shards_that_changed_under_one_path_are_a_difference(tmp_path: Path) -> None:
    texts = {"one": "a.tar: 9 samples, written as 12", "two": "a.tar: 9 samples, written as 34"}
    for name, text in texts.items():
        facts = {"precision": "fp32", "data.sources.0": text, "data.sources.1": "b.tar: same"}
        starts = [{"summary": {"data.sources.0": "an earlier start"}}, {"summary": facts}]
        folder = make_run(tmp_path / name)
        (folder / "environment.json").write_text(json.dumps(starts))
    runs = [run for name in texts for run in read_runs(tmp_path / name)]
    assert differences(runs).rows == [("data.sources.0 (shards)", *texts.values())]
