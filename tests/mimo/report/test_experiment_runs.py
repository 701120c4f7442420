"""Which runs are started, and what is written of them; training itself is made up here."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mimo.config.schema import Recipe
from mimo.config.source import read_yaml
from mimo.errors import EXIT_CONTINUE, InputError, RecipeError, StartError
from mimo.report import experiment_runs as runs
from mimo.report.experiment import main
from mimo.report.experiment_runs import Run
from tests.mimo.tiny import write_recipe, write_samples

STEPS = 20
FILE = """
name: made
recipe: tiny.yaml
layouts:
  - {name: one}
  - {name: two, language.grid: {tp: 2}}
repeats: 2
steps: 20
"""
Trainer = Callable[[Run], int]


def line(step: int, layout: str) -> dict[str, object]:
    speed = 100.0 if layout == "one" else 250.0
    record = {"step": step, "loss": 3.0 - step / 10 + (1e-7 if layout == "two" else 0.0)}
    record |= {
        "grad_norm": 1.0,
        "tokens_per_second": 1.0 if step < 4 else speed,
        "idle_fraction": 0.5,
    }
    if (step + 1) % 10 == 0:
        record |= {"seconds_vision_encode": 0.25, "seconds_vision_encode_max": 0.5}
        record |= {"idle_fraction_vision": 0.125, "memory_gib_vision": step / 10}
        record |= {"bridge_bytes_vision_forward": 2**21, "bridge_least_bytes_vision_forward": 2**20}
    return record


def trains(run: Run, last: int = STEPS) -> None:
    recipe = read_yaml(run.recipe_file).data
    assert Path(recipe["train"]["run_dir"]) / recipe["name"] == run.run_dir
    run.run_dir.mkdir(exist_ok=True)
    (run.run_dir / "recipe.yaml").write_text(run.recipe_file.read_text())
    lines = [json.dumps(line(step, run.layout)) for step in range(last)]
    lines.insert(5, json.dumps({"step": 5, "validation_loss": 7.0}))
    (run.run_dir / "metrics.jsonl").write_text("\n".join(lines))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that were started, each of which trains to its end."""
    names = list[str]()
    use(monkeypatch, names, lambda run: trains(run) or 0)
    return names


@pytest.fixture(autouse=True)
def without_a_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second, so only a test that looks at the page has one."""
    if "page" not in request.node.name:
        monkeypatch.setattr("mimo.report.experiment.write_page", lambda *_: None)


def use(monkeypatch: pytest.MonkeyPatch, names: list[str], trainer: Trainer) -> None:
    def train(run: Run, *_: object) -> int:
        names.append(run.name)
        run.log.parent.mkdir(parents=True, exist_ok=True)
        return trainer(run)

    monkeypatch.setattr(runs, "_train", train)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_samples(tmp_path)
    write_recipe(tmp_path)
    path = tmp_path / "made.yaml"
    path.write_text(FILE)
    return path


def folder_of(file: Path) -> Path:
    return file.parent / "runs" / "made"


def rows(file: Path) -> list[dict[str, str]]:
    with (folder_of(file) / "results.csv").open() as lines:
        return [*csv.DictReader(lines)]


def test_layouts_run_in_alternation_and_finished_runs_do_not_repeat(
    file: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(file, []) == 0
    assert started == ["one.1", "two.1", "one.2", "two.2"]
    assert "2 of 2 layouts follow the losses of one, but for rounding" in capsys.readouterr().out
    started.clear()
    assert main(file, []) == 0
    assert started == []


def test_layouts_are_compared_with_the_reference_that_the_file_names(
    file: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"{FILE}reference: two\n")
    assert main(file, []) == 0
    assert "layouts follow the losses of two" in capsys.readouterr().out
    one, two = (float(row["largest_loss_difference"]) for row in rows(file))
    assert one > two == 0.0


def test_an_interrupted_experiment_continues_with_the_interrupted_run(
    file: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Run) -> int:
        trains(run, 7 if run.name == "two.1" else STEPS)
        if run.name == "two.1":
            raise runs.Interrupted("told to end")
        return 0

    with monkeypatch.context() as patch:
        use(patch, started, interrupted)
        assert main(file, []) == EXIT_CONTINUE
    assert started == ["one.1", "two.1"]
    assert not (folder_of(file) / "results.csv").exists()
    started.clear()
    assert main(file, []) == 0
    assert started == ["two.1", "one.2", "two.2"]


def test_a_run_with_a_changed_recipe_repeats_and_its_old_folder_is_kept(
    file: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(file, []) == 0
    started.clear()
    file.write_text(FILE.replace("{tp: 2}", "{pp: 2}"))
    assert main(file, []) == 0
    assert started == ["two.1", "two.2"]
    assert (folder_of(file) / "two.1.1" / "metrics.jsonl").exists()
    assert re.search("two.1: its recipe has changed; .*two.1.1", capsys.readouterr().out)


def test_a_layout_that_fails_is_a_row_on_the_page_with_its_log_and_the_others_go_on(
    file: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(run: Run) -> int:
        if run.layout == "one":
            trains(run)
            return 0
        run.errors.write_text("Traceback ...\n  line 1\nrank 2 died of <exit code> 9\n")
        return 1

    use(monkeypatch, started, failing)
    file.write_text(FILE.replace("repeats: 2", ""))
    assert main(file, []) == 1
    assert started == ["one.1", "two.1"]
    one, two = rows(file)
    assert (one["state"], one["problem"]) == ("follows", "")
    assert (two["state"], two["problem"]) == ("failed", "rank 2 died of <exit code> 9")
    page = (folder_of(file) / "index.html").read_text()
    assert "rank 2 died of &lt;exit code&gt; 9" in page
    assert str(folder_of(file) / "logs" / "two.1.err") in page


@pytest.mark.parametrize(
    ("code", "text", "error"),
    [
        (2, "x.yaml:3: train: wrong\nx.yaml:4: more\n", "x.yaml:3: train: wrong"),
        (1, "Traceback\nrank 1 failed\n", "rank 1 failed"),
        (1, "Traceback\nValueError: no\n", "ValueError: no"),
        (137, "", "exit code 137"),
    ],
)
def test_the_error_of_a_run_is_a_line_of_its_stderr(
    file: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str, error: str
) -> None:
    use(monkeypatch, [], lambda run: (run.errors.write_text(text) and code) or code)
    assert main(file, ["train.seed=7"]) == 1
    assert rows(file)[0]["problem"] == error


@pytest.mark.parametrize(("code", "steps"), [(0, 7), (EXIT_CONTINUE, 7), (0, 0)])
def test_a_run_that_ends_early_is_a_row_with_its_steps_and_continues_later(
    file: Path, started: list[str], monkeypatch: pytest.MonkeyPatch, code: int, steps: int
) -> None:
    def early(run: Run) -> int:
        trains(run, steps if run.name == "two.2" else STEPS)
        return code if run.name == "two.2" else 0

    with monkeypatch.context() as patch:
        use(patch, started, early)
        assert main(file, []) == 1
    one, two = rows(file)
    assert one["state"] == "follows"
    message = f"it ended with exit code {code} after {steps} of 20 steps"
    assert (two["state"], two["runs"], two["problem"]) == ("failed", "1", message)
    started.clear()
    assert main(file, []) == 0
    assert started == ["two.2"]


def test_without_a_reference_layouts_cannot_be_compared(
    file: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, started, lambda run: 1 if run.layout == "one" else trains(run) or 0)
    assert main(file, []) == 1
    assert [row["state"] for row in rows(file)] == ["failed", "cannot be compared"]


def test_a_layout_with_other_losses_ends_the_experiment_with_1(
    file: Path, started: list[str]
) -> None:
    assert main(file, []) == 0
    path = folder_of(file) / "two.2" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 2.8', '"loss": 2.9'))
    assert main(file, []) == 1
    (two,) = [row for row in rows(file) if row["layout"] == "two"]
    assert two["state"] == "differs"
    assert two["problem"].startswith("loss of step 3 is off by")


def test_csv_and_page_have_medians_without_the_first_steps(file: Path, started: list[str]) -> None:
    assert main(file, []) == 0
    one, two = rows(file)
    speeds = [float(row["tokens_per_second"]) for row in (one, two)]
    assert speeds == [100.0, 250.0]
    assert one["runs"] == "2"
    assert float(two["tokens_per_second_least"]) == 250.0
    assert float(one["idle_fraction_vision"]) == 0.125
    assert float(one["memory_gib_vision"]) == 1.9, "the peak, not the median"
    assert float(two["largest_loss_difference"]) == pytest.approx(1e-7 / 1.1, rel=0.01)
    folder = folder_of(file)
    page = (folder / "index.html").read_text()
    for text in ("2.5", "follows", "two: vision forward", "lower bound"):
        assert text in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert page.count("<script") == 1, "the page's own"
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert "td { white-space: nowrap }" in style, "numbers stay in one piece"
    assert not re.search(r"td[^{]*\{[^}]*overflow-wrap: anywhere", style)
    for name in ("results", "losses", "losses_1", "where_the_time_goes", "bridges"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_layout_whose_files_do_not_answer_is_a_row_with_its_error(
    file: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Run.recipe

    def fail_for_one(run: Run) -> Recipe:
        if run.layout == "two" and started:
            raise StartError("config.json: cannot be read: Stale file handle\nmore")
        return recipe(run)

    monkeypatch.setattr(Run, "recipe", fail_for_one)
    assert main(file, []) == 1
    assert "one" in {row["layout"] for row in rows(file) if row["state"] == "follows"}
    (two,) = (row for row in rows(file) if row["layout"] == "two")
    assert "Stale file handle" in two["problem"]


LAYOUTS = """
  - {name: bad, language.grid: {tp: x}}
  - {name: tall, language.grid: {tp: 3}}
  - {name: short, data.sequence_length: 8}
  - {name: shorter, data.sequence_length: 8, language.grid: {tp: 2}}
repeats: 2"""


def test_all_layouts_that_cannot_run_are_refused_together_before_the_first_run(
    file: Path, started: list[str]
) -> None:
    assert main(file, ["train.seed=5"]) == 0
    started.clear()
    file.write_text(FILE.replace("\nrepeats: 2", LAYOUTS))
    with pytest.raises(RecipeError) as refused:
        main(file, [])
    assert started == []
    assert read_yaml(folder_of(file) / "one.1" / "recipe.yaml").data["train"]["seed"] == 5
    bad, tall, *_, short = refused.value.problems
    assert bad.startswith("bad: ")
    assert "language.grid.tp" in bad
    assert tall.startswith("tall: ")
    assert "tp=3 must divide" in tall
    assert short.startswith("short, shorter: ")
    assert "longer than sequence_length 8" in short


def test_runs_that_are_done_need_no_data_and_are_not_checked_again(
    file: Path, started: list[str]
) -> None:
    assert main(file, []) == 0
    for shard in file.parent.glob("*.tar"):
        shard.unlink()
    assert main(file, []) == 0


def test_a_recipe_that_no_layout_can_use_is_bad_input(file: Path, started: list[str]) -> None:
    file.write_text(f"{FILE}set: {{trian.steps: 3}}\n")
    with pytest.raises(InputError, match="trian"):
        main(file, [])
    assert started == []
