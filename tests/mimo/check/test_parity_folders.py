"""Folders whose files say something unusual compute what transformers computes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mimo.check.parity import ParityRunner
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from tests.cases import quick

pytestmark = pytest.mark.usefixtures("run_ranks")  # which starts the fork server

CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.3,
}
ROTARY = {"rope_type": "default", "factor": 8.0}


def rope(parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"config.json": {"text_config": {"rope_parameters": parameters}}}


# family, and by file what it says instead (None: nothing any more).
FOLDERS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "rotary keys that their kind does not read": (
        "gemma3",
        rope(
            {
                "full_attention": {
                    **(ROTARY | {"rope_theta": 2e4}),
                    **{"partial_rotary_factor": 0.5, "attention_factor": 2.0},
                },
                "sliding_attention": ROTARY | {"rope_theta": 3e3},
            }
        ),
    ),
    "rotary sections that are not said to be interleaved": (
        "qwen3_vl",
        rope({**ROTARY, "rope_theta": 2e4, "mrope_section": [8, 4, 4], "mrope_interleaved": False}),
    ),
    "crops that the processor's own default switches off": (
        "gemma3",
        {"preprocessor_config.json": CROPS},
    ),
    "crops that the tokenizer's file switches on": ("gemma3", {"tokenizer_config.json": CROPS}),
    "one number for all channels": (
        "gemma3",
        {"preprocessor_config.json": {"image_mean": 0.4, "image_std": 0.3}},
    ),
    "sizes and normalisation left to the processor's class": (
        "qwen2_5_vl",
        {
            "preprocessor_config.json": dict.fromkeys(
                ("min_pixels", "max_pixels", "image_mean", "image_std")
            )
        },
    ),
}


@pytest.mark.parametrize("what", quick(FOLDERS, "one number for all channels"))
def test_unusual_files_mean_the_same_as_in_transformers(what: str, tmp_path: Path) -> None:
    family, changes = FOLDERS[what]
    folder = tmp_path / "checkpoint"
    write_tiny(TinyCheckpoint(family), folder)
    for name, change in changes.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(overlaid(content, change)))
    comparison = ParityRunner(folder, tmp_path, timeout_seconds=120).run([])
    assert comparison.first is None, str(comparison.first)


def overlaid(content: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Change `text_config`, replace other values, and take out keys that become None."""
    if "text_config" in change:
        change = {"text_config": content["text_config"] | change["text_config"]}
    return {key: value for key, value in (content | change).items() if value is not None}
