"""Phases of a recipe: how they are read, and which runs are left to do. No rank is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.folder import Progress, find_checkpoint, publish
from mimo.checkpoint.hf.recipes import load_phases, load_recipe
from mimo.checkpoint.resume import FromScratch, FromWeights, Resume, Run, candidates, runs_to_do
from mimo.config.phases import PhasedRecipe
from mimo.errors import InputError, RecipeError
from mimo.model.recipe_checks import check_recipe
from mimo.train.run_folder import make_run_dirs
from tests.mimo import tiny
from tests.mimo.checkpoint.hf import folders

PHASES = """\
phases:
  - name: projector
    language: {freeze: true}
    encoders: {vision: {freeze: tower, learning_rate: 0.01}}
    train: {steps: 3, save_every: 2}
  - name: everything
    language:
      grid: {tp: 2}
      learning_rate: 0.001
    data: {sources: [{path: other.tar}]}
    train: {steps: 4}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tiny.write_recipe(tmp_path)
    # Above, so that lines are easy to count.
    path.write_text(PHASES + path.read_text())
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_phases(path, overrides)
    return [line.replace(f"{path.parent}/", "") for line in str(caught.value).splitlines()]


def dumped(phased: PhasedRecipe) -> list[dict]:
    return [phase.recipe.model_dump() for phase in phased.phases]


# ------------------------------------------------------------------------------ reading


def test_a_phase_is_the_recipe_with_its_keys_laid_over(path: Path) -> None:
    first, second = load_phases(path).phases
    assert (first.name, second.name) == ("projector", "everything")
    assert second.title == "phase 2 of 2, everything"
    one, two = first.recipe, second.recipe
    assert one.language.freeze
    assert not two.language.freeze
    assert (one.encoders["vision"].freeze, two.encoders["vision"].freeze) == ("tower", False)
    assert one.encoders["vision"].learning_rate == 0.01
    # Mappings merge: what the phase does not give stays; lists are replaced.
    assert two.language.model == one.language.model
    assert (two.language.grid.tp, two.language.grid.dp) == (2, 1)
    assert [source.path for source in two.data.sources] == ["other.tar"]
    assert (one.train.steps, two.train.steps) == (3, 4)
    assert (one.train.save_every, two.train.save_every) == (2, "auto")
    assert one.train.global_batch_size == two.train.global_batch_size == 12


def test_a_mapping_over_a_list_changes_entries_by_number_or_path(path: Path) -> None:
    sources = ["{path: a.tar}", "{path: b.tar, weight: 3.0}", "{path: c.tar}"]
    path.write_text(
        path.read_text()
        .replace("{sources: [{path: other.tar}]}", "{sources: {b.tar: {weight: 0.5}}}")
        .replace(f'{{path: "{path.parent}/train-*.tar"}}', ", ".join(sources))
    )
    phased = load_phases(path, ["phases.0.data.sources.2.weight=9.0"])
    weights = [[source.weight for source in phase.recipe.data.sources] for phase in phased.phases]
    assert weights == [[1.0, 3.0, 9.0], [1.0, 0.5, 1.0]]
    for phase in phased.phases:
        assert [source.path for source in phase.recipe.data.sources] == ["a.tar", "b.tar", "c.tar"]
    again = path.parent / "again.yaml"
    again.write_text(phased.to_yaml())
    assert dumped(load_phases(again)) == dumped(phased)


def test_an_entry_of_a_list_that_is_unknown_or_wrong_is_named_with_its_line(path: Path) -> None:
    text = path.read_text()
    entries = "{1: {weight: 2.0}, b.tar: {weight: 2.0}, 0: {weight: 3.0}}"
    path.write_text(text.replace("{sources: [{path: other.tar}]}", f"{{sources: {entries}}}"))
    first, second = problems(path)
    for line, key in ((first, "1"), (second, "b.tar")):
        assert f"tiny.yaml:10: phases.1.data.sources.{key}: got" in line
        assert "an index from 0 to 0, or the entry's path" in line
    path.write_text(text.replace("{sources: [{path: other.tar}]}", "{sources: {0: {weight: -1}}}"))
    override = "phases.0.data.sources.0.weight=0.0"
    first, second = problems(path, override)
    assert first.startswith(f"override '{override}': phases.0.data.sources.0.weight: ")
    assert "tiny.yaml:10: phases.1.data.sources.0.weight: " in second


def test_every_phase_is_a_run_inside_the_folder_of_the_job(path: Path) -> None:
    phased = load_phases(path)
    assert phased.has_phases
    assert phased.run_dir == path.parent / "runs" / "tiny"
    folders = [phase.recipe.run_dir for phase in phased.phases]
    assert folders == [phased.run_dir / "phase_1_projector", phased.run_dir / "phase_2_everything"]
    written = path.parent / "resolved.yaml"
    written.write_text(phased.phases[1].recipe.to_yaml())
    assert load_recipe(written).model_dump() == phased.phases[1].recipe.model_dump()
    again = path.parent / "phased.yaml"
    again.write_text(phased.to_yaml())
    assert dumped(load_phases(again)) == dumped(phased)


def test_a_recipe_without_phases_is_one_run_in_the_folder_of_its_name(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    phased = load_phases(path, ["train.steps=7"])
    (phase,) = phased.phases
    assert not phased.has_phases
    assert phase.recipe.model_dump() == load_recipe(path, ["train.steps=7"]).model_dump()
    assert (phase.title, phased.run_dir) == ("", phase.recipe.run_dir)
    assert phased.run_dir == tmp_path / "runs" / "tiny"


def test_overrides_reach_one_phase_or_all_that_do_not_give_the_key(path: Path) -> None:
    changes = ["phases.1.train.steps=9", "language.learning_rate=0.5", "train.seed=3", "name=other"]
    phased = load_phases(path, changes)
    assert phased.run_dir.name == "other"
    one, two = (phase.recipe for phase in phased.phases)
    assert (one.train.steps, two.train.steps) == (3, 9)
    assert (one.language.learning_rate, two.language.learning_rate) == (0.5, 0.001)
    assert (one.train.seed, two.train.seed) == (3, 3)


def test_an_override_that_every_phase_shadows_is_refused(path: Path) -> None:
    (line,) = problems(path, "train.steps=20")
    assert line == (
        "override 'train.steps=20': train.steps: has no effect, as every phase sets it; "
        "override phases.0.train.steps, phases.1.train.steps"
    )


def test_problems_of_all_phases_are_reported_at_once_with_their_lines(path: Path) -> None:
    text = path.read_text()
    text = text.replace("train: {steps: 3, save", "train: {stepss: 3, save")
    text = text.replace("learning_rate: 0.001", "learning_rate: -1")
    text = text.replace("micro_batch_size: 4", "micro_batch_size: none")
    path.write_text(text)
    micro = next(n for n, line in enumerate(text.splitlines(), 1) if "micro_batch" in line)
    assert problems(path, "phases.1.language.grid.tp=two") == [
        f"tiny.yaml:{micro}: train.micro_batch_size: should be a valid integer; got 'none'",
        "tiny.yaml:5: phases.0.train.stepss: unknown key; did you mean 'steps'?",
        "override 'phases.1.language.grid.tp=two': phases.1.language.grid.tp: should be a valid "
        "integer; got 'two'",
        "tiny.yaml:9: phases.1.language.learning_rate: should be greater than 0; got -1",
    ]


def test_a_shared_key_that_is_wrong_for_one_phase_names_the_phase(path: Path) -> None:
    phased = load_phases(path, ["phases.1.language.grid.dp=2", "phases.1.language.grid.tp=1"])
    with pytest.raises(RecipeError) as caught:
        phased.each(lambda recipe: check_recipe(recipe, None))
    (line,) = caught.value.problems
    where = next(n for n, t in enumerate(path.read_text().splitlines(), 1) if "global_batch" in t)
    assert line.startswith(
        f"{path}:{where}: train.global_batch_size: got 12, needs a multiple of 8"
    )
    assert line.endswith("(in phase 'everything')")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("phases.0.init_from=x", "all phases start from the same weights; set init_from outside"),
        ("phases.0.data.tokenizer=x", "all phases share one tokenizer; set data.tokenizer outside"),
        ("phases.0.train.run_dir=x", "all phases are in the folder of one run; set train.run_dir"),
        ("phases.0.language.family=gemma3", "same model; set language.family outside of phases"),
        ("phases.0.language.model.num_layers=3", "got 3, but all phases train the same model; set"),
        (
            "phases.0.encoders.audio={family: x, media: audio}",
            "phases.0.encoders.audio: all phases have the same encoders; add encoders.audio",
        ),
    ],
)
def test_what_all_phases_share_is_refused_inside_of_one(
    path: Path, override: str, expected: str
) -> None:
    line = problems(path, override)[0]
    assert line.startswith(f"override '{override}': phases.0.")
    assert expected in line


def test_adapters_may_begin_in_a_later_phase_but_not_end_or_change(path: Path) -> None:
    lora = ["phases.0.language.freeze=false", "phases.0.language.lora={rank: 4}"]
    load_phases(path, ["phases.1.language.lora={rank: 4}"])
    load_phases(path, [*lora, "phases.1.language.lora={rank: 4}"])
    for later in ([], ["phases.1.language.lora={rank: 8}"]):
        (line,) = problems(path, *lora, *later)
        assert "language.lora: got " in line
        assert "phase 'projector' has trained other adapters, which would be lost" in line


def test_a_shared_key_with_its_own_value_may_stand_in_a_phase(path: Path) -> None:
    plain, again = load_phases(path), load_phases(path, ["phases.0.language.model.num_layers=2"])
    assert dumped(plain) == dumped(again)


def test_phases_know_the_encoder_and_the_sizes_of_a_folder_to_start_from(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "checkpoint")
    path = folders.write_recipe(folder, tmp_path / "recipe.yaml")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("encoders")))
    frozen = "language: {freeze: true}, encoders: {vision: {freeze: tower}}"
    phases = f"phases=[{{name: projector, {frozen}}}, {{name: everything}}]"
    alone = load_recipe(path)
    first, second = (phase.recipe for phase in load_phases(path, [phases]).phases)
    assert first.encoders["vision"].freeze == "tower"
    assert second.encoders == alone.encoders
    assert first.encoders["vision"].model == alone.encoders["vision"].model
    assert (second.language, second.data) == (alone.language, alone.data)
    (line,) = problems(path, phases, "phases.1.language.model.num_layers=9")
    assert "phases.1.language.model.num_layers: got 9, but all phases train the same model" in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("phases={}", "phases: needs a list of phases; got {}"),
        ("phases.1=5", "phases.1: needs keys of a recipe; got 5"),
        ("phases.1={train: {steps: 1}}", "phases.1.name: this key is required"),
        ("phases.1.name=projector", "phases.1.name: got 'projector', the name of another phase"),
        ("phases.1.phases=[]", "phases.1.phases: unknown key"),
    ],
)
def test_phases_of_a_wrong_form_are_refused(path: Path, override: str, expected: str) -> None:
    (line,) = problems(path, override)
    assert line.startswith(f"override '{override}': {expected}")


def test_a_recipe_with_phases_is_not_taken_for_one_run(path: Path) -> None:
    with pytest.raises(RecipeError, match="phases: a recipe without phases is needed here"):
        load_recipe(path)


# ------------------------------------------------------------------- what is left to do


@pytest.fixture
def phased(path: Path) -> PhasedRecipe:
    phased = load_phases(path)
    make_run_dirs(phased, left(phased), resumes=False)
    return phased


def left(phased: PhasedRecipe, resume: bool = False, resume_from: Path | None = None) -> list[Run]:
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    best = [*candidates(phased, resume, resume_from), None][0]
    return runs_to_do(phased, layouts, best)


def write_checkpoint(phased: PhasedRecipe, phase: int, step: int) -> Path:
    checkpoints = phased.phases[phase].recipe.run_dir / "checkpoints"
    partial = checkpoints / ".partial"
    partial.mkdir(parents=True)
    return publish(partial, Progress(step, step), "", keep=9)


def test_a_new_job_runs_all_phases_each_from_the_last_weights_of_the_one_before(
    phased: PhasedRecipe,
) -> None:
    first, second = left(phased)
    assert first.start == FromScratch()
    last = phased.run_dir / "phase_1_projector" / "checkpoints" / "step_3"
    assert second.start == FromWeights(last)
    assert [run.layout.world_size for run in (first, second)] == [2, 3]
    assert str(second).startswith("phase 2 of 2, everything: vision tp 1 · cp 1 · pp 1 · dp 1 = 1 ")
    assert str(second).endswith(f"begins with the weights of {last} and fresh optimizers")


def test_an_interrupted_phase_is_resumed_and_no_earlier_one_runs_again(
    phased: PhasedRecipe,
) -> None:
    inside = write_checkpoint(phased, 0, 2)
    assert left(phased, resume=True)[0].start == Resume(inside)
    assert len(left(phased, resume=True)) == 2
    # Between phases: the second one has nothing of its own yet.
    done = write_checkpoint(phased, 0, 3)
    (only,) = left(phased, resume=True)
    assert (only.phase.name, only.start) == ("everything", FromWeights(done))
    last = write_checkpoint(phased, 1, 1)
    (only,) = left(phased, resume=True)
    assert (only.phase.name, only.start) == ("everything", Resume(last))
    assert find_checkpoint(phased.run_dir) == last


@pytest.mark.parametrize("phases", [True, False])
def test_resuming_before_the_first_checkpoint_begins_anew_in_the_same_folder(
    phased: PhasedRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], phases: bool
) -> None:
    if not phases:
        phased = load_phases(tiny.write_recipe(tmp_path), ["name=plain"])
    # At the very first start as well as after one that was ended early.
    for _ in range(2):
        capsys.readouterr()
        runs = left(phased, resume=True)
        make_run_dirs(phased, runs, resumes=True)
        assert runs[0].start == FromScratch()
        assert [run.phase for run in runs] == list(phased.phases)
        folder = phased.run_dir
        assert capsys.readouterr().out == (
            f"no checkpoint in {folder} yet: starting anew\nrun folder: {folder}\n"
        )
    assert not list(folder.parent.glob(f"{folder.name}.*")), "nothing is to be moved aside"
    with pytest.raises(InputError, match="no checkpoint there"):
        left(phased, resume_from=folder)


def test_an_explicit_checkpoint_belongs_to_the_phase_whose_folder_it_is_in(
    phased: PhasedRecipe, tmp_path: Path
) -> None:
    early, last = write_checkpoint(phased, 0, 2), write_checkpoint(phased, 1, 1)
    runs = left(phased, resume_from=early)
    assert [run.phase.name for run in runs] == ["projector", "everything"]
    assert runs[0].start == Resume(early)
    (only,) = left(phased, resume_from=last.parent.parent)
    assert only.start == Resume(last)
    partial = tmp_path / "elsewhere" / ".partial"
    partial.mkdir(parents=True)
    elsewhere = publish(partial, Progress(1, 1), "", keep=1)
    with pytest.raises(InputError, match="belongs to no phase of this recipe; give a checkpoint"):
        left(phased, resume_from=elsewhere)


def test_phases_that_run_anew_leave_their_old_runs_aside(
    phased: PhasedRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    early, _ = write_checkpoint(phased, 0, 2), write_checkpoint(phased, 1, 1)
    make_run_dirs(phased, left(phased, resume_from=early), resumes=True)
    assert (phased.run_dir / "phase_2_everything.1" / "checkpoints" / "step_1").is_dir()
    # What stands aside is no phase of the run any more.
    assert find_checkpoint(phased.run_dir) == early
    capsys.readouterr()
    # A phase that was ended before its first checkpoint begins again in its folder.
    make_run_dirs(phased, left(phased, resume=True), resumes=True)
    assert capsys.readouterr().out == f"run folder: {phased.run_dir}\n"


def test_a_phase_that_was_renamed_is_not_resumed(phased: PhasedRecipe, path: Path) -> None:
    write_checkpoint(phased, 0, 2)
    renamed = load_phases(path, ["phases.1.name=all"])
    with pytest.raises(InputError, match=r"phase_2_everything: phase 2 of the run to resume has"):
        left(renamed, resume=True)
