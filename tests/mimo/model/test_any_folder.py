"""A folder of any class trains in two halves, and is exported, as plain transformers does.

From chat and pixels to the exported folder. Only what the loss counts is taken from our encoding:
tokens and pixels must be the processor's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mimo.check.compare import (
    RankSteps,
    Reference,
    ReferenceParameter,
    compare,
    join_shards,
    reference_of,
)
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.recipes import architecture_of_folder, load_recipe
from mimo.checkpoint.resume import Resume
from mimo.config.schema import Recipe
from mimo.model.recipe_checks import check_data, check_recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.checkpoint.hf.test_tiny_class import SUPPORTED, UNTRAINED
from tests.mimo.model import any_folder
from tests.mimo.model.any_folder import SAMPLES, in_our_names, make, open_model, take_steps
from tests.mimo.model.test_fsdp_runs import FSDP, read, trained
from tests.mimo.model.test_videos import write_samples

TOLERANCE = 1e-5
QUICK = "internvl"
# Both sides compute in fp64, where rounding hides nothing.
FP64 = (
    *("aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge", "deepseek_vl"),
    *("deepseek_vl_hybrid", "exaone4_5", "gemma3", "gemma4_unified", "glm_ocr", "hunyuan_vl"),
    *("hyperclovax_vision_v2", "idefics3", "internvl", "janus", "lfm2_vl", "lfm3_vl"),
    *("lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr"),
    *("minicpmv4_6", "minicpmv4_7", "mistral3", "muse_glimmer", "paddleocr_vl", "qwen2_5_vl"),
    *("qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm", "step3p7", "video_llama_3"),
    "vipllava",
)
# Their code or kernels take no fp64 on a CPU.
FP32 = (
    *("aria", "deepseek_ocr2", "ernie4_5_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glmga"),
    *("kimi_k25", "minimax_m3_vl", "mistral_large4", "qwen3_omni_moe_thinker", "qwen3_vl_moe"),
)
# Not run: in fp32 their errors are up to 20 times the tolerance. `test_any_class` compares them in
# fp64, except Unlimited-OCR: the gradient of its tower's key biases is zero but for rounding.
ROUNDED = ("gemma4", "qwen3_5_moe", "qwen4_exp", "unlimited_ocr")
FP64_TOLERANCE = 1e-10
# Classes that `mimo tiny` writes, and why they cannot train.
REFUSED = {
    "got_ocr2": "its processor takes no images of a chat",
    "glm5_next": "differs in two halves: its tower has fewer rows than there are placeholders",
    "granite4_vision": "its features have no embeddings",
    "idefics2": "its processor does not tell what stands for an image",
    "muse_spark": "its smallest copy has 101 million weights",
    "ovis2": "the model asks the tower for more than rows",
    "paligemma": "its processor refuses samples without images",
    "qianfan_ocr": "its processor refuses the token that its template writes",
    "qwen2_5_omni_thinker": "differs in two halves",
}
_NOT_EXPORTED = "mimo_tiny.json"


def test_every_class_of_mimo_tiny_is_compared_or_refused() -> None:
    assert {*FP64, *FP32, *ROUNDED} == {*SUPPORTED} - {*REFUSED}
    assert {*ROUNDED, *REFUSED} == {*UNTRAINED}


# DeepSeek-OCR-2 takes a minute, so `test_any_class` alone compares it.
COMPARED = [name for name in (*FP64, *FP32) if name != "deepseek_ocr2"]


@pytest.mark.parametrize("model_type", quick(COMPARED, QUICK))
def test_three_ranks_train_and_export_a_folder_as_plain_transformers_does(
    model_type: str, run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = make(model_type, tmp_path)
    assert check_recipe(load_recipe(path), None).world_size == 3
    check_data(load_recipe(path))
    wide = model_type in FP64
    ranks = run_ranks(take_steps, 3, path, ["train.precision=fp64"] if wide else [])
    (plain,) = run_ranks(any_folder.take_plain_steps, 1, path, "float64" if wide else "float32")
    tolerance = FP64_TOLERANCE if wide else TOLERANCE
    comparison = compare(ranks, in_our_names(plain, ranks), tolerance)
    assert comparison.first is None, str(comparison.first)
    convert_to_hf(tmp_path / "runs", tmp_path / "exported", 10**9)
    assert_exported(tmp_path / "base", tmp_path / "exported", trained_weights(ranks))


def trained_weights(ranks: list[RankSteps]) -> dict[str, Tensor]:
    """Return the weights after the last step, by their names in transformers."""
    shards: dict[str, list] = {}
    for shard in (shard for rank in ranks for shard in rank.shards):
        shards.setdefault(shard.name.partition(".")[2], []).append(shard)
    return {name: torch.from_numpy(join_shards(s, "weights")[-1]) for name, s in shards.items()}


def assert_exported(base: Path, exported: Path, weights: dict[str, Tensor]) -> None:
    """Assert that a folder has exactly these weights, and every file of the one it began with."""
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    loaded = dict(open_model(exported, dtype).named_parameters())
    assert loaded.keys() == weights.keys()
    before = dict(open_model(base, dtype).named_parameters())
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight.reshape(loaded[name].shape)), name
    assert any(not torch.equal(before[name], loaded[name]) for name in before)
    for file in base.iterdir():
        if file.suffix != ".safetensors" and file.name != _NOT_EXPORTED:
            text = (exported / file.name).read_text()
            if file.name == "config.json":  # it names the dtype of the weights
                text = text.replace(f'"{dtype}"', '"float32"')
            assert text == file.read_text(), file.name


@pytest.mark.slow
@pytest.mark.parametrize("with_videos", [False, True])
def test_two_halves_learn_as_the_family_with_code_of_its_own(
    run_ranks: RunRanks, tmp_path: Path, with_videos: bool
) -> None:
    path, overrides = make("qwen3_vl", tmp_path), list[str]()
    if with_videos:
        write_samples(tmp_path, ((0, 5, 0), (), (3, 7), (0,), (4,), (3, 0)))
        overrides += ["encoders.vision.other_media={video: {placeholder: '<|video_pad|>'}}"]
    general = run_ranks(take_steps, 3, path, overrides)
    of_family = ["name=own", "language.family=qwen3", "encoders.vision.family=qwen3_vl"]
    of_family += ["bridge.delivery=sharded", *FSDP]
    expected = reference_of_family(
        load_recipe(path, of_family), run_ranks(take_steps, 3, path, of_family)
    )
    comparison = compare(general, in_our_names(expected, general), TOLERANCE)
    assert comparison.first is None, str(comparison.first)


def reference_of_family(recipe: Recipe, ranks: list[RankSteps]) -> Reference:
    """Return what ranks of a family of ours hold, by names of transformers."""
    reference = Reference([], {})
    assert recipe.init_from is not None
    architecture = architecture_of_folder(Path(recipe.init_from), recipe.language.family)
    for module, weights in architecture.weights_of(recipe).items():
        by_name = {f"{module}.{weight.name}": weight for weight in weights}
        of_module = reference_of(ranks, {name: [] for name in by_name})
        reference.steps[:] = of_module.steps
        for name, parameter in of_module.parameters.items():
            for what in ("gradients", "weights"):
                for values in getattr(parameter, what):
                    rows = torch.from_numpy(values[: by_name[name].num_rows])
                    for key, tensor in by_name[name].unpack(rows).items():
                        entry = reference.parameters.setdefault(key, ReferenceParameter())
                        getattr(entry, what).append(tensor.numpy())
    return reference


# -------------------------------------------------------------------------------- resume


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit_and_with_other_lanes(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = make("qwen3_5", tmp_path)
    settings = ["train.steps=4", "train.save_every=2", "train.keep_checkpoints=9"]
    settings += ["train.optimizer=adam", "train.adam_eps=1e-4", "train.learning_rate=0.003"]
    whole = trained(run_ranks, path, "whole", *settings)
    half = Resume(whole / "checkpoints" / "step_2")
    again = trained(run_ranks, path, "again", *settings, start=half)
    other = ["language.grid.dp=1", "train.micro_batch_size=3"]
    expected = read(find_checkpoint(whole))
    for run, exact in (
        (again, True),
        (trained(run_ranks, path, "other", *settings, *other, start=half), False),
    ):
        tensors = read(find_checkpoint(run))
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            scale = max(float(tensor.abs().max()), 1e-5)
            error = float((tensors[name] - tensor).abs().max()) / scale
            assert error == 0 if exact else error < 1e-3, name


# ------------------------------------------------------------------------------- answers


def test_a_trained_folder_answers_as_the_exported_one_generates(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = make("qwen3_5_moe", tmp_path)
    run_ranks(take_steps, 3, path)
    convert_to_hf(tmp_path / "runs", tmp_path / "exported", 10**9)
    ((ours, theirs),) = run_ranks(answer_both, 1, tmp_path)
    assert ours == theirs
    assert len({*ours}) == 2, "answers depend on the question"


def answer_both(rank: int, directory: Path) -> tuple[list[str], list[str]]:
    """Return greedy answers to two questions about images: ours, and of plain transformers."""
    from mimo.generate.answer import Generator, Request

    chosen = [sample for sample in SAMPLES if sample.items][:2]
    messages = [any_folder.with_pictures(sample)[:1] for sample in chosen]
    requests = [
        Request(sample.messages[:1], [p["image"] for p in chat[0]["content"] if "image" in p])
        for sample, chat in zip(chosen, messages, strict=True)
    ]
    ours = Generator(directory / "runs").answer(requests, 12)
    processor = any_folder.open_processor(directory / "exported")
    model, theirs = open_model(directory / "exported").eval(), []
    for chat in messages:
        inputs = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        answer = made[0, inputs["input_ids"].shape[1] :]
        theirs.append(processor.tokenizer.decode(answer, skip_special_tokens=True).strip())
    return ours, theirs
