"""Every image-text-to-text class of transformers: tiny copies, recipes, and which cannot train."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mimo.checkpoint.hf.examples import example_samples
from mimo.checkpoint.hf.shrink import build, shrink
from mimo.model.gate import UNSAFE, Examples, Verdict, whole_gradients

CLASSES = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
_NO_FEATURES = (
    *("blip", "git", "idefics", "mistral4", "mllama", "pi0", "pix2struct", "pp_formulanet"),
    *("udop", "diffusion_gemma", "kosmos-2", "kosmos-2.5", "t5gemma2", "vision-encoder-decoder"),
    *("evolla", "florence2"),
)
REFUSALS = {
    **dict.fromkeys(_NO_FEATURES, "its class has no features that run apart from the forward"),
    **dict.fromkeys(
        ("blip-2", "instructblip", "instructblipvideo"),
        "its forward asks for pixels although the features are given",
    ),
    **dict.fromkeys(("chameleon", "emu3"), "its default configuration does not build; not judged"),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "needs the package timm; not judged"),
    "granite4_vision": "its tower gives features for several layers, not embeddings and levels",
    "granite_docling": "its forward reads more of the tower's output than features",
    "llama4": "its projector runs in the language model's forward",
    "molmo2": "its features take indices into the pixels of a whole batch",
    "ovis2": "its forward takes features of indicator tokens besides those of items",
    "video_llava": "its images and videos share one call; not judged further",
    "dots3_note": "its audio arguments are not made yet; not judged",
    "nemotron_h_omni": "transformers' own forward fails on the tiny copy; not judged",
    "muse_spark": "its smallest copy has 101 million weights; not judged",
}
"""The classes that cannot train, and why."""
REFUSALS |= UNSAFE
RATE = 0.01


def tiny_config(model_type: str) -> Any:
    """Return a small configuration of a class, with every kind of its layers."""
    return shrink(getattr(transformers, CLASSES[model_type]).config_class())


def widest_precision(config: Any, verdict: Verdict) -> tuple[str, Verdict]:
    """Return fp64 if a class computes in it, and with which modalities; else fp32 with all.

    Some code of a class may ask for fp32, such as the attention of a tower for sound.
    """
    whole = build(config, torch.float64)
    whole.set_experts_implementation("eager")  # others have no fp64
    without_sound = {m: form for m, form in verdict.outputs.items() if m != "audio"}
    for outputs in (verdict.outputs, without_sound):
        with suppress(RuntimeError):
            whole_gradients(whole, Examples(whole, example_samples(build(config)), [*outputs]))
            return "fp64", replace(verdict, outputs=outputs)
    return "fp32", verdict


def write_recipe(config: Any, folder: Path, precision: str, modalities: Iterable[str]) -> Path:
    """Write a configuration and a recipe for a tower on rank 0 and a language model on two."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    placeholders = {m: {"placeholder": f"<{m}>"} for m in modalities}
    recipe = {
        "name": "any",
        "init_from": str(folder),
        "language": {"family": "transformers", "grid": {"dp": 2}},
        "encoders": {
            "vision": {
                "family": "transformers",
                "grid": {"dp": 1},
                **placeholders.pop("image"),
                "other_media": placeholders,
            }
        },
        "data": {"sources": [{"path": "none"}], "sequence_length": 4096},
        "train": {
            **{"steps": 2, "global_batch_size": 4, "micro_batch_size": 1},
            "precision": precision,
            **{"optimizer": "sgd", "weight_decay": 0.0, "learning_rate": RATE},
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path
