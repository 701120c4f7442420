"""Whole runs that draw: phases, adapters and their export, data that only generators read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from data.worker_process import ITEM
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.checkpoint.reading import read
from mimo.families.keymap import is_adapter
from mimo.model.decoding import tasks_of_step
from mimo.model.step_plan import step_planner
from mimo.parallel.build import build_layout
from mimo.train import main as job
from tests.conftest import RunRanks
from tests.mimo import drawings, tiny
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
        if not name.startswith(("optimizer.", "ema."))
        and not torch.equal(before[name], after[name])
    }


def test_a_phase_may_train_the_generator_and_its_queries_alone(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = drawings.write_recipe(tmp_path)
    path.write_text(PHASES + path.read_text())
    assert job.main(path, [*SETTINGS, "train.loggers=[tensorboard]"]) == 0
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
    events = EventAccumulator(str(runs / "phase_1_draw" / "tensorboard"))
    events.Reload()
    for name in ("loss_language", "loss_image"):
        shown = [event.value for event in events.Scalars(f"train/{name}")]
        assert shown == pytest.approx([line[name] for line in lines])
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


PLACED = {
    "disjoint": ["generators.image.grid.dp=3", "language.grid.dp=2", "encoders.vision.grid.dp=2"],
    "colocated": [
        "generators.image.placement=colocated",
        "generators.image.grid.dp=2",
        "language.grid.dp=2",
    ],
}


@pytest.mark.parametrize("placed", PLACED)
def test_pixels_to_draw_are_decoded_by_the_ranks_of_their_generator_alone(
    tmp_path: Path, placed: str
) -> None:
    recipe = load_recipe(drawings.write_recipe(tmp_path), [*SETTINGS, *PLACED[placed]])
    layout, dataset = build_layout(recipe), tiny.open_sources(recipe)
    microbatches = step_planner(recipe, layout, dataset).microbatches(0)
    decoded = dict[str, list[tuple[int, int]]]()
    for rank in range(layout.world_size):
        tasks = tasks_of_step(
            step=0,
            microbatches=microbatches,
            readers=dataset.readers,
            path_of=Path,
            layout=layout,
            rank=rank,
            host_ranks=(rank,),
        )
        for task in (task for task in tasks if task.kind == ITEM):
            kind = microbatches[task.microbatch].samples.item_media[task.number]
            media = microbatches[task.microbatch].samples.media[kind]
            decoded.setdefault(media, []).append((rank, task.address))
    assert len({address for _, address in decoded["output.image"]}) == len(
        decoded["output.image"]
    ), "each once"
    every = np.concatenate([m.samples.items_of_media("output.image") for m in microbatches])
    assert len(decoded["output.image"]) == len(every) == sum(map(len, drawings.DRAWN))
    assert {rank for rank, _ in decoded["output.image"]} <= set(layout.grids["image"].ranks)
    assert len({rank for rank, _ in decoded["output.image"]}) > 1
    assert {rank for rank, _ in decoded["image"]} <= set(layout.grids["vision"].ranks)
