"""`mimo tiny CLASS` writes a folder whose processor and model agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from data.modalities.transformers import load_processor
from data.text.chat import ChatTokenizer
from data.text.digits import conversation
from data.text.messages import MediaText
from mimo.checkpoint.hf.examples import count_rows
from mimo.checkpoint.hf.shrink import TABLES
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.hf.tiny_class import classes, encode
from mimo.cli.main import app
from tests.mimo.model.tiny_classes import REFUSALS

QUICK = ("internvl", "gemma4", "ovis2")
SUPPORTED = (
    *("aria", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge", "deepseek_ocr2"),
    *("deepseek_vl", "deepseek_vl_hybrid", "ernie4_5_vl_moe", "exaone4_5", "gemma3", "gemma4"),
    *("gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga"),
    *("got_ocr2", "granite4_vision", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3"),
    *("internvl", "janus", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llava", "llava_next"),
    *("llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
    *("minimax_m3_vl", "mistral3", "mistral_large4", "muse_glimmer", "muse_spark", "ovis2"),
    *("paddleocr_vl", "paligemma", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl"),
    *("qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen4_exp", "smolvlm", "step3p7", "unlimited_ocr", "video_llama_3", "vipllava"),
)
# Classes that `test_any_folder.py` does not train; it has the reasons.
UNTRAINED = (
    *("gemma4", "glm5_next", "got_ocr2", "granite4_vision", "idefics2", "muse_spark", "ovis2"),
    *("paligemma", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen3_5_moe", "qwen4_exp"),
    "unlimited_ocr",
)


def check(model_type: str, folder: Path) -> None:
    """Make a folder; compare placeholders with the rows that the model scatters into them."""
    write_tiny(TinyCheckpoint(model_type), folder)
    loader: Any = AutoModelForImageTextToText
    model, report = loader.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    processor = load_processor(folder)
    names = ("image_token_id", "image_token_index")
    image_id = next(i for name in names if (i := getattr(model.config, name, None)) is not None)
    for num_images in (1, 2):
        inputs = encode(processor, num_images)
        with torch.no_grad():
            loss = model(**{**inputs, "labels": inputs["input_ids"]}).loss
        assert torch.isfinite(loss)
        num_placeholders = int((inputs["input_ids"] == image_id).sum())
        assert count_rows(model, "image", inputs) == num_placeholders > 0
    template_names = ("image_placeholder_token", "image_token")
    written = next(t for name in template_names if (t := getattr(processor, name, None)))
    tokenizer = ChatTokenizer(folder, {"image": MediaText(str(written))})
    sample = tokenizer.encode(conversation(["image"] * 2, "what ?", "7"), [3, 4], "two images")
    learned = sample.labels[sample.loss_mask > 0]
    end = "<end_of_turn>" if model_type == "gemma3" else "<|im_end|>"
    assert tokenizer.text(learned) == f"7{end}"


@pytest.mark.parametrize("model_type", QUICK)
def test_processor_and_model_of_the_folder_agree(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path / "folder")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in UNTRAINED if name not in QUICK])
def test_processor_and_model_agree_for_every_class_that_is_not_trained(
    model_type: str, tmp_path: Path
) -> None:
    check(model_type, tmp_path / "folder")


@pytest.mark.parametrize(
    ("model_type", "cause"),
    [
        ("vision-encoder-decoder", "transformers has no processor for it"),
        ("mllama", "no attribute 'get_image_features'"),
    ],
)
def test_a_class_without_a_whole_folder_is_refused_with_its_cause(
    model_type: str, cause: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["tiny", model_type, str(tmp_path / "x")])
    assert result.exit_code == 2
    assert cause in " ".join(result.output.split())
    assert not any(tmp_path.iterdir())


def test_every_class_that_trains_can_be_made_or_is_refused_with_its_cause() -> None:
    assert {*classes()} - {*REFUSALS} - {*SUPPORTED} == {*TABLES["refused"], "cosmos3_omni"} - {
        *REFUSALS
    }
    assert {*QUICK} <= {*SUPPORTED}
