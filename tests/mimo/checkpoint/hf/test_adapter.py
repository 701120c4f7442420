"""Export of a run with LoRA in Hugging Face format: merged, and as adapters for peft.

Each family is trained for two steps at TP2 from a tiny checkpoint with random weights. What our
model computes then is the reference for both kinds of export.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from data.modalities.transformers import load_processor
from mimo.checkpoint import reading
from mimo.checkpoint import tensors as checkpoint_tensors
from mimo.checkpoint.hf.adapter import convert_adapter
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import convert_from_hf
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.cli.main import app
from mimo.errors import InputError
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.checkpoint.manifests import write_manifest
from tests.mimo.runs import run as train_recipe

TOLERANCE = 1e-5
RECIPE = """
name: run
init_from: {directory}/base
language:
  grid: {{tp: 2, sp: true}}
  {language}
encoders:
  vision:
    placement: colocated
    grid: {{tp: 2}}
    {vision}
data:
  sources: [{{path: "{directory}/train-*.tar"}}]
  sequence_length: 256
train:
  steps: 2
  global_batch_size: 4
  micro_batch_size: 2
  optimizer: adam
  learning_rate: 0.02
  warmup_steps: 0
  run_dir: {directory}/runs
  threads_per_rank: 1
"""
LANGUAGE_LORA = "lora: {rank: 4, alpha: 8}"
VISION_LORA = "lora: {rank: 2, alpha: 5}"
_QWEN3_MERGERS = [
    f"model.visual.{merger}.{name}"
    for merger in ("deepstack_merger_list.0", "deepstack_merger_list.1", "merger")
    for name in ("linear_fc1", "linear_fc2", "norm")
]


@dataclass(frozen=True)
class Case:
    """A family and what is trained. saved: modules beside the adapters; adapted: linears."""

    family: str
    language: str
    vision: str
    saved: list[str] | None
    adapted: int


# A layer of the language model has 7 linears in transformers; four layers everywhere.
_QWEN2_MERGERS = [f"model.visual.merger.{name}" for name in ("ln_q", "mlp.0", "mlp.2")]
_PROJECTOR = ["model.multi_modal_projector"]
_PARTIAL_LORA = "lora: {rank: 4, alpha: 8, targets: [qkv, fc2]}"
CASES = {
    "qwen2_5_vl": Case("qwen2_5_vl", LANGUAGE_LORA, VISION_LORA, _QWEN2_MERGERS, 4 * 7 + 4 * 5),
    "qwen3_vl": Case("qwen3_vl", LANGUAGE_LORA, VISION_LORA, _QWEN3_MERGERS, 4 * 7 + 4 * 4),
    # A layer with linear attention has 8.
    "qwen3_5": Case("qwen3_5", LANGUAGE_LORA, VISION_LORA, _QWEN3_MERGERS[6:], 2 * 15 + 4 * 4),
    "gemma3": Case("gemma3", LANGUAGE_LORA, VISION_LORA, _PROJECTOR, 4 * 7 + 4 * 6),
    "frozen tower": Case("gemma3", _PARTIAL_LORA, "freeze: tower", _PROJECTOR, 4 * 4),
}


@dataclass(frozen=True)
class Trained:
    """A run in ``directory``, and its exports.

    logits, merged: by prompt, (L, V), of our own model and of the merged one in transformers.
    """

    case: Case
    directory: Path
    logits: list[Tensor]
    merged: list[Tensor]

    @property
    def checkpoint(self) -> Path:
        return self.directory / "runs" / "run" / "checkpoints" / "step_2"


# --------------------------------------------------------------------------- what is computed


def prompts() -> list[tuple[list[dict[str, Any]], list[Image.Image]]]:
    """Return chats with two images, none and one, and the images."""
    rng = np.random.default_rng(1)
    sizes = [((61, 37), (140, 90)), (), ((45, 131),)]
    chats = []
    for images in sizes:
        content: list[dict[str, str]] = [{"type": "image"} for _ in images]
        content.append({"type": "text", "text": "what is this ?"})
        arrays = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for w, h in images]
        chats.append(([{"role": "user", "content": content}], [*map(Image.fromarray, arrays)]))
    return chats


def our_logits(rank: int, checkpoint: Path) -> np.ndarray:
    """Return the logits of all prompts packed, (T, V)."""
    from mimo.generate.answer import Generator, Request

    generator = Generator(checkpoint)
    forward, kept = generator.model.forward, []

    def keep(*args: Any, at: np.ndarray, **options: Any) -> Tensor:
        kept.append(forward(*args, **options))  # of all positions
        return kept[-1][:, at]

    generator.model.forward = keep  # type: ignore[method-assign]
    generator.answer([Request(*prompt) for prompt in prompts()], max_new_tokens=1)
    return kept[0][0].numpy()


@torch.no_grad()
def their_logits(model: Any, base: Path) -> list[Tensor]:
    """Return the logits of transformers by prompt, (L, V)."""
    processor = load_processor(base)
    logits = []
    for messages, images in prompts():
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        options = {"images": [images]} if images else {}
        inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **options)
        logits.append(model(**inputs, use_cache=False).logits[0])
    return logits


def largest_difference(got: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(got, expected, strict=True)
    return max(float((actual - wanted).abs().max()) for actual, wanted in pairs)


def load(folder: Path) -> Any:
    """Load a model of transformers; the folder must have exactly its tensors."""
    loader: Any = AutoModelForImageTextToText
    model, report = loader.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@pytest.fixture(scope="module", params=quick(CASES, "qwen3_vl"))
def trained(
    request: pytest.FixtureRequest, run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp(case.family)
    write_tiny(TinyCheckpoint(case.family), directory / "base")
    tiny.write_samples(directory)
    recipe = directory / "run.yaml"
    recipe.write_text(
        RECIPE.format(directory=directory, language=case.language, vision=case.vision)
    )
    train_recipe(run_ranks, recipe)
    (packed,) = run_ranks(our_logits, 1, directory / "runs" / "run")
    base = their_logits(load(directory / "base"), directory / "base")
    vocabulary = base[0].shape[1]
    logits = torch.from_numpy(packed)[:, :vocabulary].split([*map(len, base)])
    assert largest_difference(list(logits), base) > 0.01, "training has changed nothing"
    convert_to_hf(directory / "runs" / "run", directory / "merged", shard_bytes=300_000)
    convert_adapter(directory / "runs" / "run", directory / "adapter")
    merged = their_logits(load(directory / "merged"), directory / "base")
    return Trained(case, directory, list(logits), merged)


def test_the_merged_model_computes_what_ours_computes(trained: Trained) -> None:
    assert largest_difference(trained.merged, trained.logits) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # asked by peft
def test_peft_loads_the_adapters_and_computes_the_same(trained: Trained) -> None:
    from peft import PeftModel

    folder = trained.directory / "adapter"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as one of missing keys
        model = PeftModel.from_pretrained(load(trained.directory / "base"), str(folder))
        result = model.load_adapter(str(folder), adapter_name="again")
    assert not result.missing_keys
    assert not result.unexpected_keys
    logits = their_logits(model, trained.directory / "base")
    assert largest_difference(logits, trained.logits) <= TOLERANCE
    assert largest_difference(logits, trained.merged) <= TOLERANCE


def test_the_configuration_names_every_linear_and_the_trained_modules_beside_them(
    trained: Trained,
) -> None:
    config = json.loads((trained.directory / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(trained.directory / "base")
    assert len(config["target_modules"]) == trained.case.adapted
    assert config["modules_to_save"] == trained.case.saved
    exported = load_file(trained.directory / "adapter" / "adapter_model.safetensors")
    for module in config["target_modules"]:
        rank = config["rank_pattern"].get(module, config["r"])
        assert len(exported[f"base_model.model.{module}.lora_A.weight"]) == rank
    saved = {key for key in exported if ".lora_" not in key}
    base = load_file(trained.directory / "base" / "model.safetensors")
    assert saved
    assert len(saved) < len(base) / 4, "frozen weights are not written"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # asked by peft
def test_peft_loads_adapters_of_any_class_and_computes_what_the_merged_model_does(
    tmp_path: Path,
) -> None:
    from peft import PeftModel

    write_tiny(TinyCheckpoint("internvl"), tmp_path / "base")
    convert_from_hf(tmp_path / "base", tmp_path / "checkpoint")
    weights = reading.read(tmp_path / "checkpoint")
    shapes: dict[str, tuple[int, ...]] = {}
    for module, target in (("language", ".q_proj.weight"), ("vision", ".fc1.weight")):
        for key in [k for k in weights if k.startswith(module) and k.endswith(target)]:
            (rows, columns), linear = weights[key].shape, key.removesuffix(".weight")
            shapes |= {f"{linear}.lora_a": (2, columns), f"{linear}.lora_b": (rows, 2)}
    loras = {"language": "*.q_proj", "encoders.vision": "*.fc1"}
    lora = [f"{k}.lora={{rank: 2, alpha: 1, targets: ['{t}']}}" for k, t in loras.items()]
    change(tmp_path / "checkpoint", shapes, lora=lora)
    convert_to_hf(tmp_path / "checkpoint", tmp_path / "merged", shard_bytes=10**9)
    convert_adapter(tmp_path / "checkpoint", tmp_path / "adapter")
    base, merged = load(tmp_path / "base"), load(tmp_path / "merged")
    expected = their_logits(merged, tmp_path / "base")
    assert largest_difference(their_logits(base, tmp_path / "base"), expected) > 0.01
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    result = model.load_adapter(str(tmp_path / "adapter"), adapter_name="again")
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert largest_difference(their_logits(model, tmp_path / "base"), expected) <= TOLERANCE


# -------------------------------------------------------------------------------- bad input


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """An imported checkpoint without training, beside the folder `base` that it is from."""
    write_tiny(TinyCheckpoint("qwen3_vl"), tmp_path / "base")
    convert_from_hf(tmp_path / "base", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change(
    checkpoint: Path,
    shapes: Mapping[str, tuple[int, ...]],
    lora: Sequence[str] = ("language.lora={rank: 4, alpha: 8, targets: [qkv]}",),
) -> None:
    """Add tensors, and ``lora`` to the recipe."""
    tensors = reading.read(checkpoint)
    tensors |= {
        key: torch.full(shape, 2.0 if key.startswith("ema.") else 1.0)
        for key, shape in shapes.items()
    }
    forms = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for path in checkpoint.glob("tensors*"):
        path.unlink()
    checkpoint_tensors.write(checkpoint, forms, torch.float32, tensors.__getitem__)
    path = checkpoint / "recipe.yaml"
    path.write_text(load_recipe(path, lora).to_yaml())
    write_manifest(checkpoint)


QKV = "language.decoder.layers.1.self_attention.linear_qkv"
ADAPTER = {f"{QKV}.lora_a": (4, 128), f"{QKV}.lora_b": (256, 4)}


def test_a_checkpoint_without_adapters_is_refused(converted: Path) -> None:
    out = converted.with_name("out")
    done = CliRunner().invoke(app, ["convert", "to-hf", str(converted), str(out), "--adapter"])
    assert done.exit_code == 2
    assert "has no lora, so there is no adapter to write; leave --adapter out" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(("options", "value"), [([], 1.0), (["--ema"], 2.0)])
def test_option_ema_exports_the_average_of_adapters(
    converted: Path, options: list[str], value: float
) -> None:
    change(converted, ADAPTER | {f"ema.{key}": shape for key, shape in ADAPTER.items()})
    out = converted.with_name("out")
    command = ["convert", "to-hf", str(converted), str(out), "--adapter", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    exported = load_file(out / "adapter_model.safetensors")
    assert len(exported) == 6, "two matrices of each of q, k and v"
    assert all(bool((tensor == value).all()) for tensor in exported.values())


def test_adapters_without_their_base_model_are_refused(converted: Path) -> None:
    change(converted, ADAPTER)
    converted.with_name("base").rename(converted.with_name("elsewhere"))
    with pytest.raises(InputError, match="init_from: .*config.json"):
        convert_adapter(converted, converted.with_name("out"))


def test_other_trained_weights_than_adapters_are_refused(converted: Path) -> None:
    norm = "language.decoder.final_layernorm.weight"
    change(converted, {**ADAPTER, norm: (128,), "vision.merger.linear_fc2.bias": (128,)})
    message = f"1 other weights than adapters and projectors were trained, such as {norm}, and"
    with pytest.raises(InputError, match=message):
        convert_adapter(converted, converted.with_name("out"))
    assert not converted.with_name("out").exists()
