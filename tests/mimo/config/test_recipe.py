import pickle
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import KEY_OF, Recipe
from mimo.errors import RecipeError
from tests.recipe_keys import recipe_keys

RECIPE = """\
name: tiny
language:
  grid: {tp: 2, sp: true}
  model: {hidden_size: 64}
encoders:
  vision:
    family: qwen_vl
    grid:
      dp: 1
data:
  sources:
    - {path: "a/*.tar", weight: 2}
    - path: b.tar
  tokenizer: tok
  sequence_length: 32
train: {steps: 3, global_batch_size: 4}
"""
BUDGET, SHARED = "data.tokens_per_microbatch=128", "train.distributed_optimizer=true"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return [line.replace(f"{path.parent}/", "") for line in str(caught.value).splitlines()]


def test_a_recipe_is_read_with_its_defaults(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.language.family == "qwen3"
    assert recipe.language.grid.dp is None
    assert recipe.data.sources[0].weight == 2.0
    assert recipe.encoders["vision"].run_ahead == "auto"
    assert recipe.train.adam_beta2 == 0.95
    assert [*recipe.modules] == ["language", "vision"]
    assert all(recipe.module(name) is part for name, part in recipe.modules.items())
    assert load_recipe(path, [BUDGET]).longest_microbatch == 128
    assert load_recipe(path, [SHARED]).train.distributed_optimizer


def test_a_run_saves_a_tenth_of_its_steps_apart_unless_told_otherwise(path: Path) -> None:
    for steps, every in ((5, 100), (1001, 100), (2500, 250), (10**6, 500)):
        assert load_recipe(path, [f"train.steps={steps}"]).train.save_interval == every
    assert load_recipe(path, ["train.save_every=7"]).train.save_interval == 7
    assert load_recipe(path, ["train.save_every=null"]).train.save_interval is None
    (problem,) = problems(path, "train.save_every=often")
    assert "train.save_every: needs 'auto', null or a number of steps" in problem


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "1.0E-03"])
def test_every_way_of_writing_a_float_is_a_float(path: Path, text: str) -> None:
    path.write_text(RECIPE.replace("steps: 3,", f"steps: 3, learning_rate: {text},"))
    assert load_recipe(path).train.learning_rate == 0.001
    assert load_recipe(path, [f"language.learning_rate={text}"]).language.learning_rate == 0.001


def test_a_date_is_text(path: Path) -> None:
    assert load_recipe(path, ["name=2001-12-14"]).name == "2001-12-14"


def test_overrides_are_applied_in_order_to_mappings_lists_and_missing_sections(path: Path) -> None:
    recipe = load_recipe(
        path,
        [
            "train.steps=5",
            "train.steps=7",
            "data.sources.1.path=c.tar",
            "encoders.audio={family: whisper, grid: {dp: 2}}",
            "bridge.wire_dtype=bf16",
            "train.clip_grad_norm=null",
            "language.model.layers=2",
        ],
    )
    assert recipe.train.steps == 7
    assert [source.path for source in recipe.data.sources] == ["a/*.tar", "c.tar"]
    assert recipe.encoders["audio"].grid.dp == 2
    assert recipe.bridge.wire_dtype == "bf16"
    assert recipe.train.clip_grad_norm is None
    assert recipe.language.model == {"hidden_size": 64, "layers": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=1e-4", "did you mean 'learning_rate'? (Peak learning rate of every module"),
        ("lr=1e-4", "did you mean 'train.learning_rate'? (Peak"),
        ("language.lr=1e-4", "did you mean 'learning_rate'? ("),
        ("data.max_length=10", "did you mean 'sequence_length'? (Length of the longest sample"),
        ("train.gradient_accumulation_steps=2", "did you mean 'global_batch_size'? (Samples"),
        ("train.precision=bfloat16", "'bf16'; got 'bfloat16'; did you mean 'bf16'?"),
        ("train.optimizer=adamw", "got 'adamw'; did you mean 'adam'?"),
    ],
)
def test_names_of_other_trainers_are_answered_with_ours(
    path: Path, override: str, message: str
) -> None:
    (line,) = problems(path, override)
    assert message in line


def test_every_name_of_another_trainer_leads_to_a_key_and_is_none() -> None:
    page = recipe_keys()
    for name, key in KEY_OF.items():
        assert f"| `{key.split('.')[-1]}` |" in page, key
        assert f"| `{name}` |" not in page, name


def test_all_errors_are_reported_at_once(path: Path) -> None:
    path.write_text(RECIPE.replace("steps: 3", "stepps: 3").replace("weight: 2", "weight: heavy"))
    assert problems(path, "language.grid.tp=x", "bad", "language.grid.sp=1") == [
        "override 'bad': needs the form dotted.key=value",
        "override 'language.grid.tp=x': language.grid.tp: should be a valid integer; got 'x'",
        "override 'language.grid.sp=1': language.grid.sp: should be a valid boolean; got 1",
        "tiny.yaml:12: data.sources.0.weight: should be a valid number; got 'heavy'",
        "tiny.yaml:16: train.steps: this key is required",
        "tiny.yaml:16: train.stepps: unknown key; did you mean 'steps'?",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps.x=1", "train.steps: is the value 3, so 'x' cannot be set inside it"),
        ("data.sources.2.path=x", "data.sources: has 2 entries, so '2' is not the index of one"),
        ("train.seed=[", "the value is not YAML"),
        ("train.steps=0", "train.steps: should be greater than or equal to 1; got 0"),
        ("data.sources.0.zzz=2", "data.sources.0.zzz: unknown key; choose from path, weight"),
        ("encoders.vision.grid.dpp=1", "encoders.vision.grid.dpp: unknown key; did you mean 'dp'?"),
        ("data.sources=[]", "data.sources: needs at least one entry with a path"),
        ("language.grid.tp=1", "language.grid: sp: true shards the sequence over the tp ranks"),
        ("encoders.vision.item_text=<image>", "encoders.vision.item_text: needs {placeholder} ex"),
        ("encoders.vision.item_text='{placeholder}{placeholder}'", "{placeholder} exactly once"),
        ("encoders.language={family: x}", "encoders.language: this name is reserved; choose"),
        ("data.tokens_per_microbatch=31", "31 is below sequence_length 32, so the longest"),
        ("data.rows_per_microbatch=64", "but tokens_per_microbatch is not set; set it, or remove"),
        (f"{BUDGET} & data.packing=false", "but packing is false; set packing: true, or remove"),
        (f"{BUDGET} & train.micro_batch_size=2", "set train.micro_batch_size: 1, or remove data."),
        (f"{SHARED} & train.optimizer=sgd", "needs optimizer: adam, but it is sgd"),
        (f"{SHARED} & train.precision=fp64", "set precision: fp32 or bf16, or remove distribu"),
        ("stages=[{name: a}]", "stages: this key was removed; it is now called 'phases'"),
        ("data.worker_timeout_seconds=9", "removed; it is a quarter of bridge.timeout_seconds"),
    ],
)
def test_a_wrong_override_says_what_is_wrong(path: Path, override: str, message: str) -> None:
    (line,) = problems(path, *override.split(" & "))
    assert message in line


def test_a_missing_file_suggests_the_nearest_one(path: Path) -> None:
    (line,) = problems(path.with_name("tinny.yaml"))
    assert line == "tinny.yaml: no such file; did you mean 'tiny.yaml'?"


def test_the_resolved_recipe_reads_back_equal(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, ["train.learning_rate=1e-05"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(recipe.to_yaml())
    assert load_recipe(resolved).model_dump() == recipe.model_dump()
    assert Recipe.model_validate(recipe.model_dump()).model_dump() == recipe.model_dump()


def test_recipes_and_their_errors_travel_between_processes(path: Path) -> None:
    recipe = load_recipe(path)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    error = pickle.loads(pickle.dumps(RecipeError("one", "two")))
    assert error.problems == ("one", "two")
    assert str(error) == "one\ntwo"
