"""Folders of diffusers: recipes start from them, and exports are like them bit for bit."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mimo.checkpoint.assets import ASSETS, portable_recipe
from mimo.checkpoint.folder import Progress, complete
from mimo.checkpoint.hf.adapter import convert_adapter
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import convert_from_hf, initial_weights
from mimo.checkpoint.hf.pipelines import folders_generator, schedule_of
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.reading import read
from mimo.checkpoint.tensors import write
from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError
from mimo.families.flow import pack
from mimo.families.registry import generator_family, generator_settings, language_settings
from tests.generators import reference
from tests.mimo.checkpoint.hf import folders

diffusers: Any = importlib.import_module("diffusers")

RECIPE = """
name: draws
init_from: {folder}
data: {{sources: [{{path: "{folder}/train-*.tar"}}], sequence_length: 256}}
train: {{steps: 1, global_batch_size: 4}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(TinyCheckpoint("qwen_image"), folder)
    return folder


@pytest.fixture(scope="module")
def ours(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours with the folder's weights."""
    target = tmp_path_factory.mktemp("ours") / "ours"
    convert_from_hf(model, target)
    return target


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def recipe_of(folder: Path, tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return load_recipe(path, overrides)


def rewrite_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def changed_checkpoint(
    source: Path, target: Path, overrides: list[str], **more: dict[str, Tensor]
) -> Path:
    """A checkpoint with other recipe keys, and with more tensors by module and name."""
    tensors = read(source)
    for module, of_module in more.items():
        tensors |= {f"{module}.{name}": tensor for name, tensor in of_module.items()}
    shutil.copytree(source / ASSETS, target / ASSETS)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    sums = write(target, shapes, torch.float32, tensors.__getitem__)
    recipe = load_recipe(source / "recipe.yaml", overrides)
    complete(target, Progress(step=0, samples=0), recipe.to_yaml(), sums)
    return target


def test_a_recipe_is_filled_in_from_every_part_of_the_folder(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, tmp_path)
    assert recipe.init_from == str(model / "text_encoder")
    assert recipe.data.tokenizer == str(model / "tokenizer")
    assert (recipe.language.family, recipe.encoders["vision"].family) == ("qwen2_5", "qwen_vl")
    part = recipe.generators["image"]
    assert (part.family, part.condition, part.skipped_tokens) == ("qwen_image", "prompt", 34)
    settings = generator_settings(recipe, "image")
    assert settings.condition_size == language_settings(recipe).hidden_size
    assert settings.token_pixels == 16
    assert settings.autoencoder == str(model / "vae")
    again = recipe_of(model / "text_encoder", tmp_path, "generators={image: {}}")
    assert again.generators == recipe.generators
    assert recipe_of(model, tmp_path, "generators={}", "encoders={}").generators == {}


def test_values_in_the_recipe_win(model: Path, tmp_path: Path) -> None:
    overrides = ("generators={pictures: {condition: queries, model: {max_pixels: 4096}}}",)
    recipe = recipe_of(model, tmp_path, *overrides)
    part = recipe.generators["pictures"]
    assert (part.condition, part.skipped_tokens) == ("queries", 0)
    assert generator_settings(recipe, "pictures").max_pixels == 4096


def test_a_constant_shift_of_the_scheduler_becomes_the_recipes(
    copied: Path, tmp_path: Path
) -> None:
    assert recipe_of(copied, tmp_path).generators["image"].time_shift == 1
    rewrite_json(
        copied / "scheduler" / "scheduler_config.json", use_dynamic_shifting=False, shift=3.0
    )
    recipe = recipe_of(copied, tmp_path)
    assert recipe.generators["image"].time_shift == 3
    assert schedule_of(recipe, "image").shift_of(16) == 3
    other = recipe_of(copied, tmp_path, "generators.image.time_shift=2.0")
    assert schedule_of(other, "image").shift_of(16) == 2


def test_sampling_has_the_folders_times(model: Path, tmp_path: Path) -> None:
    schedule = schedule_of(recipe_of(model, tmp_path), "image")
    assert schedule.use_dynamic_shifting
    assert (schedule.base_shift, schedule.shift_terminal) == (0.4, 0.03)
    assert schedule.shift_of(4) != schedule.shift_of(64)


def test_a_transformer_that_no_family_knows_is_refused(copied: Path, tmp_path: Path) -> None:
    rewrite_json(copied / "transformer" / "config.json", _class_name="FluxTransformer2DModel")
    with pytest.raises(
        RecipeError, match=r"init_from: .*_class_name is 'FluxTransformer2DModel'.*qwen_image"
    ):
        recipe_of(copied, tmp_path)
    assert recipe_of(copied, tmp_path, "generators={}").generators == {}


def test_a_variant_that_the_family_does_not_compute_is_refused(
    copied: Path, tmp_path: Path
) -> None:
    rewrite_json(copied / "transformer" / "config.json", guidance_embeds=True)
    with pytest.raises(RecipeError, match=r"init_from: .*guidance_embeds is True"):
        recipe_of(copied, tmp_path)


def test_a_condition_of_another_size_than_the_language_models_is_refused(
    model: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(model, tmp_path, "generators.image.model.condition_size=64")
    with pytest.raises(RecipeError, match=r"generators\.image\.model\.condition_size: got 64.*128"):
        generator_settings(recipe, "image")


def test_without_diffusers_a_generator_is_refused_with_the_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(model, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RecipeError, match=r"generators\.image\.family: .*pip install 'mimo-toolkit\[draw\]'"
    ):
        generator_family(recipe, "image")


def test_a_second_generator_needs_a_family(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"generators\.b\.family: .*holds generators\.a"):
        recipe_of(model, tmp_path, "generators={a: {}, b: {}}")


def test_every_weight_is_read_under_its_name(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, tmp_path)
    initial = initial_weights(recipe)
    assert initial is not None
    checkpoint = initial.checkpoint_of("image")
    stored = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {weight.name for weight in initial.weights["image"]} == stored.keys()
    for weight in initial.weights["image"]:
        (run,) = weight.runs
        assert torch.equal(checkpoint.matrix(run), stored[weight.name])
        if stored[weight.name].ndim == 2:
            part = checkpoint.part(weight.name, slice(1, 3), slice(2, 5))
            assert torch.equal(part, stored[weight.name][1:3, 2:5])
    assert initial.checkpoint_of("vision") is initial.checkpoint_of("language")


def test_a_generator_of_another_family_is_drawn_afresh(model: Path, tmp_path: Path) -> None:
    sizes = "{num_layers: 1, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 2, "
    sizes += "num_query_groups: 1, axes_dims_rope: [4, 6, 6], in_channels: 12, condition_size: 128}"
    overrides = [f"generators={{image: {{family: lumina2, model: {sizes}}}}}"]
    recipe = recipe_of(model, tmp_path, *overrides)
    assert folders_generator(recipe) is None
    initial = initial_weights(recipe)
    assert initial is not None
    assert "image" not in initial.weights


def test_a_damaged_transformer_is_refused_with_every_tensor(copied: Path, tmp_path: Path) -> None:
    file = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["img_in.weight"]
    tensors["proj_out.bias"] = torch.zeros(3)
    file.unlink()
    from safetensors.torch import save_file

    save_file({**tensors, "extra": torch.zeros(1)}, file)
    with pytest.raises(RecipeError) as caught:
        initial_weights(recipe_of(copied, tmp_path))
    for message in ("img_in.weight is missing", "proj_out.bias is [3]", "extra is unknown"):
        assert message in str(caught.value)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_an_export_equals_the_folder_bit_for_bit(model: Path, ours: Path, tmp_path: Path) -> None:
    convert_to_hf(ours, tmp_path / "exported")
    exported, original = files_of(tmp_path / "exported"), files_of(model)
    del original["mimo_tiny.json"]
    assert exported == original


def test_an_export_in_several_files_starts_a_recipe(
    model: Path, ours: Path, tmp_path: Path
) -> None:
    convert_to_hf(ours, tmp_path / "exported", shard_bytes=50_000)
    names = {path.name for path in (tmp_path / "exported" / "transformer").iterdir()}
    assert "diffusion_pytorch_model.safetensors.index.json" in names
    assert len(names) > 3
    theirs = diffusers.QwenImageTransformer2DModel.from_pretrained(
        tmp_path / "exported" / "transformer", low_cpu_mem_usage=False
    )
    stored = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    state = theirs.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    convert_from_hf(tmp_path / "exported", tmp_path / "again")
    again, first = read(tmp_path / "again"), read(ours)
    assert again.keys() == first.keys()
    assert all(torch.equal(again[key], first[key]) for key in first)


def test_diffusers_draws_with_an_export(ours: Path, tmp_path: Path) -> None:
    convert_to_hf(ours, tmp_path / "exported")
    pipeline = diffusers.QwenImagePipeline.from_pretrained(tmp_path / "exported")
    pipeline.set_progress_bar_config(disable=True)
    prompt = "user draw " * 30
    image = pipeline(prompt, height=32, width=32, num_inference_steps=2, output_type="pt").images
    assert image.shape == (1, 3, 32, 32)


def test_a_changed_setting_of_sampling_is_exported(ours: Path, tmp_path: Path) -> None:
    changed = changed_checkpoint(ours, tmp_path / "run", ["generators.image.time_shift=2.5"])
    convert_to_hf(changed, tmp_path / "exported")
    config = json.loads((tmp_path / "exported/scheduler/scheduler_config.json").read_text())
    assert (config["shift"], config["base_shift"]) == (2.5, 0.4)


def test_queries_lie_beside_the_parts(ours: Path, tmp_path: Path) -> None:
    keys = ["generators.image.condition=queries", "generators.image.queries=3"]
    queries = torch.randn(3, 128)
    changed = changed_checkpoint(ours, tmp_path / "run", keys, language={"queries.image": queries})
    convert_to_hf(changed, tmp_path / "exported")
    with safe_open(tmp_path / "exported" / "queries.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("image"), queries)
    without = changed_checkpoint(ours, tmp_path / "without", keys)
    with pytest.raises(InputError, match=r"lacks language\.queries\.image"):
        convert_to_hf(without, tmp_path / "other")


def test_a_fresh_generator_beside_a_plain_model_is_exported_too(tmp_path: Path) -> None:
    folders.make("qwen2_5_vl", tmp_path / "model")
    convert_from_hf(tmp_path / "model", tmp_path / "ours")
    sizes = "{num_layers: 1, hidden_size: 32, num_attention_heads: 2, in_channels: 12, "
    sizes += "condition_size: 128, axes_dims_rope: [4, 6, 6]}"
    keys = [
        f"generators={{image: {{family: qwen_image, condition: prompt, time_shift: 3.0, "
        f"model: {sizes}}}}}"
    ]
    recipe = load_recipe(tmp_path / "ours" / "recipe.yaml", keys)
    family: Any = generator_family(recipe, "image")
    state = family.build(generator_settings(recipe, "image")).state_dict()
    changed = changed_checkpoint(tmp_path / "ours", tmp_path / "run", keys, image=state)
    exported = tmp_path / "exported"
    convert_to_hf(changed, exported)
    theirs = diffusers.QwenImageTransformer2DModel.from_pretrained(
        exported / "transformer", low_cpu_mem_usage=False
    ).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in state.items())
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(exported / "scheduler")
    assert scheduler.config.shift == 3
    assert not (exported / "vae").exists()
    AutoModelForImageTextToText.from_pretrained(exported / "text_encoder")
    AutoTokenizer.from_pretrained(exported / "tokenizer")
    index = json.loads((exported / "model_index.json").read_text())
    assert index["_class_name"] == "QwenImagePipeline"
    again = recipe_of(exported, tmp_path)
    assert again.generators["image"].time_shift == 3


def test_without_the_original_folder_the_autoencoder_is_missed_by_its_key(
    copied: Path, tmp_path: Path
) -> None:
    convert_from_hf(copied, tmp_path / "ours")
    shutil.rmtree(copied)
    recipe = portable_recipe(tmp_path / "ours")
    assert folders_generator(recipe) == "image"
    assert schedule_of(recipe, "image").shift_terminal == 0.03
    with pytest.raises(RecipeError, match=r"generators\.image\.model\.autoencoder: .*no such file"):
        convert_to_hf(tmp_path / "ours", tmp_path / "exported")


def test_an_adapter_has_no_place_for_a_generator(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has a generator"):
        convert_adapter(ours, tmp_path / "adapter")


def test_equal_settings_give_an_equal_tiny_folder(model: Path, tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint("qwen_image"), tmp_path / "same")
    assert files_of(tmp_path / "same") == files_of(model)
    write_tiny(TinyCheckpoint("qwen_image", seed=1, dtype="bfloat16"), tmp_path / "other")
    other = load_file(tmp_path / "other/transformer/diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in other.values()} == {torch.bfloat16}


def test_the_reference_step_trains_text_encoder_and_transformer(model: Path) -> None:
    """And its loss is ours: latents, order of tokens, signs and the condition's rows."""
    models = reference.load(model)
    generator = torch.Generator().manual_seed(0)
    examples = [
        reference.Example(
            torch.randint(20, 300, (length,), generator=generator),
            [
                reference.Picture(
                    pixels=torch.rand(3, height, 32, generator=generator) * 2 - 1,
                    time=time,
                    noise=torch.randn(height // 16 * 2, 20, generator=generator),
                    first=2,
                    last=length,
                )
            ],
        )
        for length, height, time in ((9, 32, 0.3), (7, 48, 0.8))
    ]
    step = reference.train_step(models, examples)
    family: Any = importlib.import_module("generators.qwen_image")
    autoencoder = family.autoencoder(model / "vae", torch.device("cpu"), torch.float32)
    losses = []
    for example in examples:
        (picture,) = example.pictures
        latents = autoencoder.encode(picture.pixels[None])
        tokens, noise = pack(latents), picture.noise[None]
        states = models.text_encoder.model(input_ids=example.ids[None]).last_hidden_state
        velocity = family.predict(
            models.transformer,
            (1 - picture.time) * tokens + picture.time * noise,
            torch.tensor([picture.time]),
            states[:, 2:],
            torch.tensor([len(example.ids) - 2]),
            (latents.shape[2] // 2, latents.shape[3] // 2),
        )
        losses.append((velocity - (noise - tokens)).square().mean())
    assert torch.stack(losses).mean().item() == pytest.approx(step.image, rel=1e-5)
    assert step.gradients["transformer"]["img_in.weight"].any()
    text = step.gradients["text_encoder"]
    assert text["model.language_model.layers.0.mlp.up_proj.weight"].any()
    assert not any(grad.any() for name, grad in text.items() if "visual" in name)
