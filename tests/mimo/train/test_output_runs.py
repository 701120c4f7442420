"""Whole runs that draw: phases, adapters and their export, data that only generators read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.checkpoint.reading import read
from mimo.families.keymap import is_adapter
from mimo.train import main as job
from tests.conftest import RunRanks
from tests.mimo import drawings
from tests.mimo.runs import ADAM, metrics, run

SETTINGS = [
    *ADAM,
    drawings.GENERATOR,
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.save_every=1",
]
PHASES = """
phases:
  - name: draw
    language: {freeze: true}
    encoders: {vision: {freeze: true}}
    train: {steps: 2}
  - name: all
    generators: {image: {grid: {dp: 2}, learning_rate: 0.001, warmup_steps: 0}}
    train: {steps: 2}
"""


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Names of weights that differ."""
    return {
        name
        for name in before.keys() & after.keys()
        if not name.startswith(("optimizer.", "ema.")) and not torch.equal(before[name], after[name])
    }


def test_a_phase_may_train_the_generator_and_its_queries_alone(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = drawings.write_recipe(tmp_path)
    path.write_text(PHASES + path.read_text())
    assert job.main(path, SETTINGS) == 0
    runs = tmp_path / "runs" / "tiny"
    first, last, end = (
        read(runs / phase / "checkpoints" / f"step_{step}")
        for phase, step in (("phase_1_draw", 1), ("phase_1_draw", 2), ("phase_2_all", 2))
    )
    moved = changed(first, last)
    assert {name for name in moved if not name.startswith("image.")} == {"language.queries.image"}
    assert {name.split(".")[0] for name in changed(last, end)} == {"language", "vision", "image"}
    lines = metrics(path, "tiny/phase_1_draw")
    assert all(line["loss_language"] > 0 for line in lines)
    assert lines[1]["update_norm_image"] > 0
    assert metrics(path, "tiny/phase_2_all")[0]["lr_image"] == pytest.approx(0.001)


@pytest.mark.slow
def test_adapters_of_a_generator_learn_alone_and_are_merged_by_an_export(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    write_tiny(TinyCheckpoint("qwen_image"), tmp_path / "model")
    drawings.write_samples(
        tmp_path, [[(32, 32)], [(32, 48), (16, 32)], [], [(32, 32)]], readings=False
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: tiny\ninit_from: {tmp_path}/model\nencoders: {{}}\n"
        f"language: {{freeze: true, grid: {{tp: 1, dp: 1}}}}\n"
        "generators: {image: {skipped_tokens: 3, grid: {dp: 2},"
        " lora: {rank: 2, targets: ['*.to_q', '*.add_q_proj']}}}\n"
        f"data: {{sources: [{{path: '{tmp_path}/train-*.tar'}}], sequence_length: 128}}\n"
        f"train: {{steps: 2, global_batch_size: 4, micro_batch_size: 2, learning_rate: 0.1,"
        f" warmup_steps: 0, save_every: 1, run_dir: {tmp_path}/runs, threads_per_rank: 1}}\n"
    )
    run(run_ranks, path)
    one, two = (read(tmp_path / "runs/tiny/checkpoints" / f"step_{step}") for step in (1, 2))
    moved = changed(one, two)
    assert moved
    assert all(name.startswith("image.") and is_adapter(name) for name in moved)
    convert_to_hf(find_checkpoint(tmp_path / "runs" / "tiny"), tmp_path / "exported")
    name = "transformer_blocks.0.attn.to_q"
    stem = "diffusion_pytorch_model"
    before, after = (
        WeightsFolder(tmp_path / folder / "transformer", stem) for folder in ("model", "exported")
    )
    assert before.shapes == after.shapes
    lora = load_recipe(path).generators["image"].lora
    assert lora is not None
    product = two[f"image.{name}.lora_b"] @ two[f"image.{name}.lora_a"]
    expected = before.read(f"{name}.weight") + lora.scale * product
    torch.testing.assert_close(after.read(f"{name}.weight"), expected)
    equal = {key for key in before.shapes if torch.equal(before.read(key), after.read(key))}
    assert {key.split(".")[-2] for key in before.shapes.keys() - equal} == {"to_q", "add_q_proj"}
