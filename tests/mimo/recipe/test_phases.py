"""Stages of a recipe: how they are read, and which runs are left to do. No rank is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.folder import Progress, find_checkpoint, publish
from mimo.checkpoint.runs import Run, runs_to_do
from mimo.checkpoint.start import FromScratch, FromWeights, Resume
from mimo.errors import InputError, RecipeError
from mimo.hf.recipes import load_recipe, load_stages
from mimo.recipe.phases import StagedRecipe
from mimo.train.main import check_recipe, make_run_dirs
from tests.mimo import tiny
from tests.mimo.hf import folders

STAGES = """\
stages:
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
    path.write_text(STAGES + path.read_text())
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_stages(path, overrides)
    return [line.replace(f"{path.parent}/", "") for line in str(caught.value).splitlines()]


def dumped(staged: StagedRecipe) -> list[dict]:
    return [stage.recipe.model_dump() for stage in staged.stages]


# ------------------------------------------------------------------------------ reading


def test_a_stage_is_the_recipe_with_its_keys_laid_over(path: Path) -> None:
    first, second = load_stages(path).stages
    assert (first.name, second.name) == ("projector", "everything")
    assert second.title == "stage 2 of 2, everything"
    one, two = first.recipe, second.recipe
    assert one.language.freeze
    assert not two.language.freeze
    assert (one.encoders["vision"].freeze, two.encoders["vision"].freeze) == ("tower", False)
    assert one.encoders["vision"].learning_rate == 0.01
    # Mappings merge: what the stage does not give stays; lists are replaced.
    assert two.language.model == one.language.model
    assert (two.language.grid.tp, two.language.grid.dp) == (2, 1)
    assert [source.path for source in two.data.sources] == ["other.tar"]
    assert (one.train.steps, two.train.steps) == (3, 4)
    assert (one.train.save_every, two.train.save_every) == (2, None)
    assert one.train.global_batch_size == two.train.global_batch_size == 12


def test_every_stage_is_a_run_inside_the_folder_of_the_job(path: Path) -> None:
    staged = load_stages(path)
    assert staged.has_stages
    assert staged.run_dir == path.parent / "runs" / "tiny"
    folders = [stage.recipe.run_dir for stage in staged.stages]
    assert folders == [staged.run_dir / "stage_1_projector", staged.run_dir / "stage_2_everything"]
    written = path.parent / "resolved.yaml"
    written.write_text(staged.stages[1].recipe.to_yaml())
    assert load_recipe(written).model_dump() == staged.stages[1].recipe.model_dump()
    again = path.parent / "staged.yaml"
    again.write_text(staged.to_yaml())
    assert dumped(load_stages(again)) == dumped(staged)


def test_a_recipe_without_stages_is_one_run_in_the_folder_of_its_name(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    staged = load_stages(path, ["train.steps=7"])
    (stage,) = staged.stages
    assert not staged.has_stages
    assert stage.recipe.model_dump() == load_recipe(path, ["train.steps=7"]).model_dump()
    assert (stage.title, staged.run_dir) == ("", stage.recipe.run_dir)
    assert staged.run_dir == tmp_path / "runs" / "tiny"


def test_overrides_reach_one_stage_or_all_that_do_not_give_the_key(path: Path) -> None:
    changes = ["stages.1.train.steps=9", "language.learning_rate=0.5", "train.seed=3", "name=other"]
    staged = load_stages(path, changes)
    assert staged.run_dir.name == "other"
    one, two = (stage.recipe for stage in staged.stages)
    assert (one.train.steps, two.train.steps) == (3, 9)
    assert (one.language.learning_rate, two.language.learning_rate) == (0.5, 0.001)
    assert (one.train.seed, two.train.seed) == (3, 3)


def test_an_override_that_every_stage_shadows_is_refused(path: Path) -> None:
    (line,) = problems(path, "train.steps=20")
    assert line == (
        "override 'train.steps=20': train.steps: changes nothing, as every stage has its own; "
        "override stages.0.train.steps, stages.1.train.steps"
    )


def test_problems_of_all_stages_are_reported_at_once_with_their_lines(path: Path) -> None:
    text = path.read_text()
    text = text.replace("train: {steps: 3, save", "train: {stepss: 3, save")
    text = text.replace("learning_rate: 0.001", "learning_rate: -1")
    text = text.replace("micro_batch_size: 4", "micro_batch_size: none")
    path.write_text(text)
    micro = next(n for n, line in enumerate(text.splitlines(), 1) if "micro_batch" in line)
    assert problems(path, "stages.1.language.grid.tp=two") == [
        f"tiny.yaml:{micro}: train.micro_batch_size: should be a valid integer; got 'none'",
        "tiny.yaml:5: stages.0.train.stepss: unknown key; did you mean 'steps'?",
        "override 'stages.1.language.grid.tp=two': stages.1.language.grid.tp: should be a valid "
        "integer; got 'two'",
        "tiny.yaml:9: stages.1.language.learning_rate: should be greater than 0; got -1",
    ]


def test_a_shared_key_that_is_wrong_for_one_stage_names_the_stage(path: Path) -> None:
    staged = load_stages(path, ["stages.1.language.grid.dp=2", "stages.1.language.grid.tp=1"])
    with pytest.raises(RecipeError) as caught:
        staged.each(lambda recipe: check_recipe(recipe, None))
    (line,) = caught.value.problems
    where = next(n for n, t in enumerate(path.read_text().splitlines(), 1) if "global_batch" in t)
    assert line.startswith(
        f"{path}:{where}: train.global_batch_size: got 12, needs a multiple of 8"
    )
    assert line.endswith("(in stage 'everything')")


def test_every_stage_must_tile_a_world_of_given_size(path: Path) -> None:
    staged = load_stages(path)
    assert [layout.world_size for layout in staged.each(lambda r: check_recipe(r, None))] == [2, 3]
    with pytest.raises(RecipeError) as caught:
        staged.each(lambda recipe: check_recipe(recipe, 3))
    (line,) = caught.value.problems
    assert "language.grid: got 3 ranks, but the grids need 2" in line
    assert line.endswith("(in stage 'projector')")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.0.init_from=x", "all stages start from the same weights; set init_from outside"),
        ("stages.0.data.tokenizer=x", "all stages share one tokenizer; set data.tokenizer outside"),
        ("stages.0.train.run_dir=x", "all stages are in the folder of one run; set train.run_dir"),
        ("stages.0.language.family=gemma3", "same model; set language.family outside of stages"),
        ("stages.0.language.model.num_layers=3", "got 3, but all stages train the same model; set"),
        ("stages.0.encoders.vision.family=x", "same model; set encoders.vision.family outside"),
        ("stages.0.encoders.vision.model.num_layers=3", "encoders.vision.model.num_layers outside"),
        (
            "stages.0.encoders.audio={family: x, media: audio}",
            "stages.0.encoders.audio: all stages have the same encoders; add encoders.audio",
        ),
    ],
)
def test_what_all_stages_share_is_refused_inside_of_one(
    path: Path, override: str, expected: str
) -> None:
    line = problems(path, override)[0]
    assert line.startswith(f"override '{override}': stages.0.")
    assert expected in line


def test_adapters_may_begin_in_a_later_stage_but_not_end_or_change(path: Path) -> None:
    lora = ["stages.0.language.freeze=false", "stages.0.language.lora={rank: 4}"]
    load_stages(path, ["stages.1.language.lora={rank: 4}"])
    load_stages(path, [*lora, "stages.1.language.lora={rank: 4}"])
    for later in ([], ["stages.1.language.lora={rank: 8}"]):
        (line,) = problems(path, *lora, *later)
        assert "language.lora: got " in line
        assert "stage 'projector' has trained other adapters, which would be lost" in line


def test_a_shared_key_with_its_own_value_may_stand_in_a_stage(path: Path) -> None:
    plain, again = load_stages(path), load_stages(path, ["stages.0.language.model.num_layers=2"])
    assert dumped(plain) == dumped(again)


def test_stages_know_the_encoder_and_the_sizes_of_a_folder_to_start_from(tmp_path: Path) -> None:
    folder = folders.make("qwen3_vl", tmp_path / "checkpoint")
    path = folders.write_recipe(folder, tmp_path / "recipe.yaml")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("encoders")))
    frozen = "language: {freeze: true}, encoders: {vision: {freeze: tower}}"
    stages = f"stages=[{{name: projector, {frozen}}}, {{name: everything}}]"
    alone = load_recipe(path)
    first, second = (stage.recipe for stage in load_stages(path, [stages]).stages)
    assert first.encoders["vision"].freeze == "tower"
    assert second.encoders == alone.encoders
    assert first.encoders["vision"].model == alone.encoders["vision"].model
    assert (second.language, second.data) == (alone.language, alone.data)
    (line,) = problems(path, stages, "stages.1.language.model.num_layers=9")
    assert "stages.1.language.model.num_layers: got 9, but all stages train the same model" in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages={}", "stages: needs a list of stages; got {}"),
        ("stages=[]", "stages: needs a list of stages; got []"),
        ("stages.1=5", "stages.1: needs keys of a recipe; got 5"),
        ("stages.1={train: {steps: 1}}", "stages.1.name: this key is required"),
        (
            "stages.1.name=projector",
            "stages.1.name: got 'projector', which another stage is called",
        ),
        (
            "stages.1.name=a/b",
            "stages.1.name: needs up to 64 letters, digits, '_' or '-'; got 'a/b'",
        ),
        ("stages.1.stages=[]", "stages.1.stages: unknown key"),
        ("stages.2.train.steps=1", "stages: has 2 entries, so '2' is not the index of one"),
        ("name=null", "name: should be a valid string"),
    ],
)
def test_stages_of_a_wrong_form_are_refused(path: Path, override: str, expected: str) -> None:
    (line,) = problems(path, override)
    assert line.startswith(f"override '{override}': {expected}")


def test_a_misspelt_stages_is_found(tmp_path: Path) -> None:
    (line,) = problems(tiny.write_recipe(tmp_path), "stage=[]")
    assert line.endswith("unknown key; did you mean 'stages'?")


def test_a_recipe_with_stages_is_not_taken_for_one_run(path: Path) -> None:
    with pytest.raises(RecipeError, match="stages: a recipe without stages is needed here"):
        load_recipe(path)


# ------------------------------------------------------------------- what is left to do


@pytest.fixture
def staged(path: Path) -> StagedRecipe:
    staged = load_stages(path)
    make_run_dirs(staged, left(staged), resumes=False)
    return staged


def left(staged: StagedRecipe, resume: bool = False, resume_from: Path | None = None) -> list[Run]:
    layouts = staged.each(lambda recipe: check_recipe(recipe, None))
    return runs_to_do(staged, layouts, resume, resume_from)


def write_checkpoint(staged: StagedRecipe, stage: int, step: int) -> Path:
    checkpoints = staged.stages[stage].recipe.run_dir / "checkpoints"
    partial = checkpoints / ".partial"
    partial.mkdir(parents=True)
    return publish(partial, Progress(step, step), "", keep=9)


def test_a_new_job_runs_all_stages_each_from_the_last_weights_of_the_one_before(
    staged: StagedRecipe,
) -> None:
    first, second = left(staged)
    assert first.start == FromScratch()
    last = staged.run_dir / "stage_1_projector" / "checkpoints" / "step_3"
    assert second.start == FromWeights(last)
    assert [run.layout.world_size for run in (first, second)] == [2, 3]
    assert str(second).startswith("stage 2 of 2, everything: vision tp 1 · cp 1 · pp 1 · dp 1 = 1 ")
    assert str(second).endswith(f"begins with the weights of {last}")


def test_an_interrupted_stage_is_resumed_and_no_earlier_one_runs_again(
    staged: StagedRecipe,
) -> None:
    inside = write_checkpoint(staged, 0, 2)
    assert left(staged, resume=True)[0].start == Resume(inside)
    assert len(left(staged, resume=True)) == 2
    # Between stages: the second one has nothing of its own yet.
    done = write_checkpoint(staged, 0, 3)
    (only,) = left(staged, resume=True)
    assert (only.stage.name, only.start) == ("everything", FromWeights(done))
    own = write_checkpoint(staged, 1, 1)
    (only,) = left(staged, resume=True)
    assert (only.stage.name, only.start) == ("everything", Resume(own))
    assert find_checkpoint(staged.run_dir) == own


@pytest.mark.parametrize("stages", [True, False])
def test_resuming_before_the_first_checkpoint_begins_anew_in_the_same_folder(
    staged: StagedRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: bool
) -> None:
    if not stages:
        staged = load_stages(tiny.write_recipe(tmp_path), ["name=plain"])
    # At the very first start as well as after one that was ended early.
    for _ in range(2):
        capsys.readouterr()
        runs = left(staged, resume=True)
        make_run_dirs(staged, runs, resumes=True)
        assert runs[0].start == FromScratch()
        assert [run.stage for run in runs] == list(staged.stages)
        folder = staged.run_dir
        assert capsys.readouterr().out == (
            f"no checkpoint in {folder} yet: starting anew\nrun folder: {folder}\n"
        )
    assert not list(folder.parent.glob(f"{folder.name}.*")), "nothing is to be moved aside"
    with pytest.raises(InputError, match="no checkpoint there"):
        left(staged, resume_from=folder)


def test_an_explicit_checkpoint_belongs_to_the_stage_whose_folder_it_is_in(
    staged: StagedRecipe, tmp_path: Path
) -> None:
    early, own = write_checkpoint(staged, 0, 2), write_checkpoint(staged, 1, 1)
    runs = left(staged, resume_from=early)
    assert [run.stage.name for run in runs] == ["projector", "everything"]
    assert runs[0].start == Resume(early)
    (only,) = left(staged, resume_from=own.parent.parent)
    assert only.start == Resume(own)
    elsewhere = publish_elsewhere(tmp_path)
    with pytest.raises(InputError, match="belongs to no stage of this recipe; give a checkpoint"):
        left(staged, resume_from=elsewhere)


def publish_elsewhere(directory: Path) -> Path:
    partial = directory / "elsewhere" / ".partial"
    partial.mkdir(parents=True)
    return publish(partial, Progress(1, 1), "", keep=1)


def test_stages_that_run_anew_leave_their_old_runs_aside(
    staged: StagedRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    early, _ = write_checkpoint(staged, 0, 2), write_checkpoint(staged, 1, 1)
    make_run_dirs(staged, left(staged, resume_from=early), resumes=True)
    assert (staged.run_dir / "stage_2_everything.1" / "checkpoints" / "step_1").is_dir()
    # What stands aside is no stage of the run any more.
    assert find_checkpoint(staged.run_dir) == early
    capsys.readouterr()
    # A stage that was ended before its first checkpoint begins again in its folder.
    make_run_dirs(staged, left(staged, resume=True), resumes=True)
    assert capsys.readouterr().out == f"run folder: {staged.run_dir}\n"


def test_a_stage_that_was_renamed_is_not_resumed(staged: StagedRecipe, path: Path) -> None:
    write_checkpoint(staged, 0, 2)
    renamed = load_stages(path, ["stages.1.name=all"])
    with pytest.raises(InputError, match=r"stage_2_everything: stage 2 of the run to resume has"):
        left(renamed, resume=True)
