"""The file of an experiment: what it may say, which layouts follow from it, how they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.errors import RecipeError
from mimo.report.experiment.schema import Experiment, read_experiment

HEAD = "name: some\nrecipe: recipe.yaml\nsteps: 5\n"
TWO = "layouts:\n  - {name: a}\n  - {name: b, language.grid.tp: 2}\n"
VARY = """
vary:
  encoders.vision.placement: [disjoint, colocated]
  language.grid: [{tp: 2}, {pp: 2, dp: 3}]
"""


def read(folder: Path, text: str, *overrides: str) -> Experiment:
    (folder / "recipe.yaml").touch()
    path = folder / "experiment.yaml"
    path.write_text(text)
    return read_experiment(path, overrides)


def test_axes_become_all_combinations_with_readable_names(tmp_path: Path) -> None:
    found = read(tmp_path, HEAD + VARY)
    assert [*found.layouts] == [
        *("disjoint-tp2", "disjoint-pp2-dp3"),
        *("colocated-tp2", "colocated-pp2-dp3"),
    ]
    assert found.reference == "disjoint-tp2"
    assert found.layouts["colocated-tp2"].overrides[-2:] == (
        'encoders.vision.placement="colocated"',
        'language.grid={"tp": 2}',
    )


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ("{language.grid: [{tp: 1}, {tp: 2}]}", ["tp1", "tp2"]),
        ("{train.micro_batch_size: [1, 4]}", ["micro_batch_size1", "micro_batch_size4"]),
        ("{language.grid.sp: [true, false]}", ["sptrue", "spfalse"]),
        ("{language.recompute: [full]}", ["full"]),
        (
            "{encoders.vision.grid: [{tp: 2}], language.grid: [{tp: 2}, {pp: 2}]}",
            ["vision-tp2-language-tp2", "vision-tp2-language-pp2"],
        ),
    ],
)
def test_names_say_what_varies_and_of_what_module_where_that_is_not_clear(
    tmp_path: Path, axes: str, names: list[str]
) -> None:
    assert [*read(tmp_path, f"{HEAD}vary: {axes}").layouts] == names


def test_overrides_come_from_all_layouts_then_the_command_line_then_the_layout(
    tmp_path: Path,
) -> None:
    found = read(tmp_path, f"{HEAD}set: {{train.seed: 3}}\n{TWO}", "train.seed=4")
    shared = ("train.save_every=null", "train.seed=3", "train.steps=5", "train.seed=4")
    assert found.shared == shared
    assert found.layouts["b"].overrides == (*shared, "language.grid.tp=2")


def test_the_reference_is_the_layout_that_is_named_or_else_the_first(tmp_path: Path) -> None:
    assert read(tmp_path, f"{HEAD}reference: b\n{TWO}").reference == "b"
    assert read(tmp_path, HEAD + TWO).reference == "a"


def test_repeats_are_in_alternation(tmp_path: Path) -> None:
    found = read(tmp_path, f"{HEAD}repeats: 2\n{TWO}")
    rounds = [(layout.name, repeat) for layout, repeat in found.rounds]
    assert rounds == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_the_recipe_is_looked_for_beside_the_file_then_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(tmp_path, HEAD + TWO).recipe == tmp_path / "recipe.yaml"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own.yaml").touch()
    monkeypatch.chdir(tmp_path / "other")
    assert read(tmp_path, HEAD.replace("recipe.yaml", "own.yaml") + TWO).recipe == Path("own.yaml")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (HEAD, "", "give either `layouts`"),
        (HEAD + TWO + VARY, "", "give either `layouts`"),
        (f"{HEAD}repaets: 2\n{TWO}", ":4", "did you mean 'repeats'?"),
        (f"{HEAD}repeats: two\n{TWO}", ":4", "repeats: "),
        (f"{HEAD}repeats: 600\n{TWO}", ":4", "repeats: "),
        (f"{HEAD}reference: aa\n{TWO}", ":4", "no layout is called 'aa'"),
        (f"{HEAD}layouts: [{{name: a}}, {{name: a}}]", ":4", "several are called a"),
        (f"{HEAD}vary: {{train.steps: [3, 4]}}", ":4", "train.steps, which is the same in all"),
        (f"{HEAD}layouts: [{{name: ../a}}]", ":4", "letters"),
        (f"{HEAD}layouts: [{{language.grid.tp: 2}}]", ":4", "needs a `name`"),
        (f"{HEAD}vary: {{language.grid: []}}", ":4", "vary.language.grid"),
        (f"{HEAD}vary: {{language.grid: [{{tp: 2}}, {{tp: 2}}]}}", ":4", "two layouts"),
        (HEAD.replace("recipe.yaml", "none.yaml") + TWO, ":2", "no recipe is at"),
        (HEAD.replace("some", "'$(reboot)'") + TWO, ":1", "name: "),
        (HEAD.replace("steps: 5", "steps: 0") + TWO, ":3", "steps: "),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    tmp_path: Path, text: str, line: str, said: str
) -> None:
    with pytest.raises(RecipeError) as error:
        read(tmp_path, text)
    assert any(f"experiment.yaml{line}: " in one and said in one for one in error.value.problems)
