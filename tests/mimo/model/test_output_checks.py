"""Bad recipes of generators: each is refused before any rank starts, by key and with a reason."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.errors import InputError, RecipeError
from mimo.model.memory import parameters_by_role
from mimo.model.recipe_checks import check_data, check_indexed_data, check_recipe
from mimo.model.step_plan import StepFlops, step_planner
from mimo.parallel.build import build_layout
from tests.conftest import RunRanks
from tests.mimo import drawings, tiny
from tests.mimo.drawings import GENERATOR
from tests.mimo.runs import mimo_here


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawings.write_recipe(tmp_path_factory.mktemp("draws"))


BAD = {
    "generators.image.model.condition_size=48": (
        "generators.image.model.condition_size: got 48, but the language model's hidden states "
        "have 32 numbers",
    ),
    "generators.image.placement=colocated language.grid.pp=2": (
        "generators.image.placement: got colocated, but language.grid.pp is 2",
    ),
    "generators.image.grid={tp: 2, dp: 1}": ("generators.image.grid.tp: got 2, but generators",),
    "generators.image.grid={pp: 2, dp: 1}": ("generators.image.grid.pp: got 2, which only engine",),
    "generators.image.queries=128": (
        "generators.image.queries: got 128",
        "data.sequence_length is 128",
    ),
    "language.freeze=true encoders.vision.freeze=true generators.image.freeze=true "
    "generators.image.condition=prompt": ("language.freeze: every module is frozen",),
    "language.freeze=['embedding.*','decoder.*'] encoders.vision.freeze=true "
    "generators.image.condition=prompt": ("language.freeze: its patterns leave only the head",),
    "generators.image.freeze=['*']": (
        "generators.image.freeze: its patterns freeze everything; set it to true",
    ),
    "generators.image.freeze=['*.gaet.*']": (
        "generators.image.freeze: got *.gaet.*, but no parameter has such a name",
    ),
    "generators.image.lora={targets: ['*.q_proj']}": (
        "generators.image.lora: got *.q_proj among its targets, but in qwen_image no linear has "
        "such a name; give patterns such as '*.to_q'",
    ),
    "generators.image.lora={}": ("generators.image.lora: got qkv among its targets",),
    "generators.image.lora={targets: ['*.norm_q']}": (
        "generators.image.lora: got *.norm_q among its targets, but in qwen_image",
        "is no linear's",
    ),
    "generators.image.recompute=selective": (
        "generators.image.recompute: got selective",
        "set it to full or none",
    ),
    "generators.image.engine=megatron": ("generators.image.engine: should be 'fsdp'",),
    "generators.image.media=video": ("generators.image.media: got 'video', but generators make",),
    "generators.image.family=qwen_imag": ("did you mean 'qwen_image'?",),
    "generators.vision={family: qwen_image}": ("generators.vision: an encoder has this name",),
    "generators.image.model.max_pixels=3": ("generators.image.model.max_pixels: got 3",),
    "generators.image.model.autoencoder=nowhere": (
        "generators.image.model.autoencoder: nowhere/config.json: no such file",
        "or null for pixels",
    ),
    "generators.image.model.in_channels=16": ("generators.image.model.in_channels: got 16",),
}


@pytest.mark.parametrize("overrides", BAD)
def test_bad_input_ends_with_key_reason_and_exit_code_2(
    run_ranks: RunRanks, path: Path, overrides: str
) -> None:
    parts = overrides.replace(" language", "\nlanguage").replace(" encoders", "\nencoders")
    parts = parts.replace(" generators", "\ngenerators").splitlines()
    done = mimo_here(run_ranks, "check", path, GENERATOR, *parts)
    assert done.exit_code == 2, (done.stderr, done.stdout)
    for text in BAD[overrides]:
        assert text in done.stderr
    assert "Traceback" not in done.stderr


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        check_recipe(load_recipe(path, [GENERATOR, *overrides]), None)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_without_diffusers_the_family_says_what_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == "diffusers" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    text = problem(path)
    assert "generators.image.family: qwen_image runs a module of diffusers" in text
    assert "pip install 'mimo-toolkit[draw]'" in text


def test_a_language_model_of_any_class_has_no_generators(tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint("qwen3_vl"), tmp_path / "base")
    path = drawings.write_recipe(tmp_path)
    recipe = tmp_path / "any.yaml"
    recipe.write_text(
        f"name: any\ninit_from: {tmp_path}/base\nlanguage: {{family: transformers}}\n"
        f"bridge: {{delivery: replicated}}\n"
        f"data: {{sources: [{{path: '{tmp_path}/train-*.tar'}}], sequence_length: 128}}\n"
        f"train: {{steps: 1, global_batch_size: 4}}\n"
    )
    assert path.is_file()
    size = GENERATOR.replace("condition_size: 32", "condition_size: 128")
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(recipe, [size]), None)
    (line,) = caught.value.problems
    assert "language.family: got transformers" in line
    assert "generators.image needs" in line


def test_a_folder_whose_transformer_no_family_knows_is_refused(tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint("qwen_image"), tmp_path / "model")
    config = tmp_path / "model" / "transformer" / "config.json"
    config.write_text(config.read_text().replace("QwenImageTransformer2DModel", "OtherModel"))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: other\ninit_from: {tmp_path}/model\n"
        f"data: {{sources: [{{path: '{tmp_path}/train-*.tar'}}], sequence_length: 128}}\n"
        f"train: {{steps: 1, global_batch_size: 4}}\n"
    )
    with pytest.raises(InputError, match=r"OtherModel") as caught:
        load_recipe(path)
    assert caught.value.exit_code == 2
    assert "init_from" in str(caught.value)


NOTE = "note: tokens added to those of data.tokenizer: <|image_gen_start|>, <|image_gen_end|>"


def test_tokens_that_the_tokenizer_lacks_are_named(
    run_ranks: RunRanks, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for command in (["check"], ["data", "index"]):
        printed = mimo_here(run_ranks, *command, path, GENERATOR).stdout.splitlines()
        assert printed.count(NOTE) == 1
        known = [f"generators.image.{end}_token=<|vision_{end}|>" for end in ("start", "end")]
        printed = mimo_here(run_ranks, *command, path, GENERATOR, *known).stdout
        assert "added" not in printed
    check_data(load_recipe(path, [GENERATOR]))  # before ranks start
    assert capfd.readouterr().out.splitlines().count(NOTE) == 1


def test_check_prints_the_flops_of_the_generator_once_the_data_are_indexed(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = drawings.write_recipe(tmp_path)
    settings = [GENERATOR, "train.global_batch_size=8", "train.micro_batch_size=2"]
    recipe = load_recipe(path, settings)
    assert "FLOPs" not in mimo_here(run_ranks, "check", path, *settings).stdout
    dataset = tiny.open_sources(recipe)  # which builds the index
    planner = step_planner(recipe, build_layout(recipe), dataset)
    plan = planner.finish(planner.microbatches(0))
    expected = StepFlops(recipe, dataset.readers[0].chat.vocab_size, dataset).of(plan)
    printed = mimo_here(run_ranks, "check", path, *settings).stdout
    (line,) = (line for line in printed.splitlines() if "FLOPs" in line)
    assert re.match(r"FLOPs of the first step: language \S+ \(.* %\), vision ", line)
    share = 100 * expected["image"] / sum(expected.values())
    assert f"image {expected['image']:.1e} ({share:.1f} %)" in line
    assert 10 < share < 90


def test_rows_that_arrive_whole_are_no_problem(path: Path) -> None:
    recipe = load_recipe(path, [GENERATOR, "bridge.delivery=replicated"])
    check_recipe(recipe, None)
    check_indexed_data(recipe)


def test_an_image_in_an_answer_without_a_generator_is_read_as_before(path: Path) -> None:
    without, with_one = (tiny.open_sources(load_recipe(path, keys)) for keys in ([], [GENERATOR]))
    (before,), (after,) = without.readers, with_one.readers
    sample = before.sample(0)
    (item,) = before.index.parts_of_sample(0)
    assert before.media(item) is before.processors["image"]
    assert not sample.loss_mask[sample.item_offsets[0]], "rows never count"
    assert after.media(item) is after.processors["output.image"]


def test_the_memory_of_a_generator_holds_its_autoencoder(path: Path, tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint("qwen_image"), tmp_path / "model")
    recipe = load_recipe(path, [f"init_from={tmp_path / 'model'}", "language={}", "encoders={}"])
    plain = recipe.generators["image"].model | {"autoencoder": None, "in_channels": 12}
    without = recipe.generators["image"].model_copy(update={"model": plain})
    roles = {}
    for name, part in {"with": recipe.generators["image"], "without": without}.items():
        changed = recipe.model_copy(update={"generators": {"image": part}})
        (roles[name],) = (
            role
            for role in parameters_by_role(changed, build_layout(changed))
            if role.module == "image"
        )
    (weights,) = (tmp_path / "model" / "vae").glob("*.safetensors")
    held = roles["with"].weights - roles["without"].weights
    assert held == pytest.approx(weights.stat().st_size, rel=0.05)
