"""A training step on ranks is that of a plain loop with diffusers and transformers alone.

The tiny folder in Qwen-Image's layout, one batch with texts and images of several sizes. Times and
noise of the reference are ours; everything else is its own: tokens of the conditions, pixels,
losses and gradients.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mimo.check.compare import gradient_floor, join_shards
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from mimo.model.dataset import open_tokenizer
from mimo.model.outputs import output_planner
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.train.batches import STEP
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.generators import reference
from tests.mimo import drawings, tiny

TOLERANCE = 1e-5
SKIPPED = 3
IMAGE_WEIGHT = 2.5
RECIPE = f"""
name: draws
init_from: {{folder}}/model
language: {{{{grid: {{{{tp: 1, dp: 1}}}}}}}}
encoders: {{{{}}}}
generators: {{{{image: {{{{skipped_tokens: {SKIPPED}, loss_weight: {IMAGE_WEIGHT}}}}}}}}}
data: {{{{sources: [{{{{path: "{{folder}}/train-*.tar"}}}}], sequence_length: 256, workers: 0}}}}
train: {{{{steps: 3, global_batch_size: 8, micro_batch_size: 4, optimizer: sgd,
  clip_grad_norm: null, learning_rate: 0.1, warmup_steps: 0, run_dir: "{{folder}}/runs",
  threads_per_rank: 1}}}}
"""
# Of each sample the images it answers with: none, one or two, of several sizes.
SIZES = [[(32, 32)], [(32, 48), (16, 32)], [], [(32, 32)], [(48, 32)], [(32, 32)] * 2, [], []]
LAYOUTS = {
    "megatron, tp2 with sp, 2 lanes": ["language.grid={tp: 2, sp: true, dp: 1}"],
    "megatron, 2 lanes to 2": ["language.grid.dp=2", "train.micro_batch_size=2"],
    "megatron, pp2, 2 lanes": ["language.grid.pp=2"],
    "fsdp, 2 lanes to 2": [
        "language.engine=fsdp",
        "language.grid.dp=2",
        "train.micro_batch_size=2",
    ],
}
TWO_LANES = "generators.image.grid.dp=2"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draws")
    write_tiny(TinyCheckpoint("qwen_image"), folder / "model")
    drawings.write_samples(folder, SIZES, readings=False)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


def example_of(recipe: Recipe, dataset: Any, sample: int) -> reference.Example:
    """The tokens of a sample, and its images with the times and noise that training draws."""
    (reader,), planner = dataset.readers, output_planner(recipe, "image", STEP)
    chat, encoded = reader.chat, reader.sample(sample)
    ids = encoded.input_ids.tolist()
    start, end = chat.output_ids["output.image"]
    starts = [at for at, token in enumerate(ids) if token == start]
    assert [ids[at + 1] for at in starts] == [end] * len(SIZES[sample])
    pictures, first = [], SKIPPED
    for number, (at, size) in enumerate(zip(starts, SIZES[sample], strict=True)):
        image = Image.open(io.BytesIO(drawings.png(*size, seed=10 * sample + number)))
        pixels = torch.from_numpy(np.asarray(image).astype(np.float32)).permute(2, 0, 1)
        plan = reader.plan(reader.index.parts_of_sample(sample)[number])
        random = planner.numbers((0, 0, sample, number), plan)
        pictures.append(reference.Picture(pixels / 127.5 - 1, random.time, random.noise, first, at))
        first = at + 2
    counted = torch.zeros(len(ids), dtype=torch.bool)
    counted[1:] = torch.from_numpy(encoded.loss_mask[:-1] > 0)  # ours lies where they are foretold
    assert counted[starts].all(), "the model learns when to draw"
    return reference.Example(torch.tensor(ids), pictures, counted)


@pytest.fixture(scope="module")
def expected(path: Path) -> reference.Step:
    recipe = load_recipe(path)
    dataset = tiny.open_sources(recipe)
    examples = [example_of(recipe, dataset, sample) for sample in range(len(SIZES))]
    assert len({picture.time for e in examples for picture in e.pictures}) == 7
    return reference.train_step(reference.load(path.parent / "model"), examples, IMAGE_WEIGHT)


def packed(recipe: Recipe, gradients: dict[str, dict[str, Tensor]]) -> dict[str, np.ndarray]:
    """Gradients under our names and in our shapes, without rows that pad the vocabulary."""
    initial, theirs = initial_weights(recipe), {**gradients, "image": gradients["transformer"]}
    assert initial is not None
    theirs["language"] = theirs["text_encoder"]
    return {
        f"{module}.{weight.name}": weight.pack(theirs[module]).numpy()
        for module, weights in initial.weights.items()
        for weight in weights
    }


@pytest.mark.slow
def test_the_tokenizer_of_the_folder_gets_the_tokens_of_images(path: Path) -> None:
    assert len(open_tokenizer(load_recipe(path)).added_tokens) == 2


@pytest.mark.parametrize("overrides", quick_values(LAYOUTS, "megatron, tp2 with sp, 2 lanes"))
def test_losses_and_every_gradient_are_those_of_diffusers(
    run_ranks: RunRanks, path: Path, expected: reference.Step, overrides: list[str]
) -> None:
    recipe = load_recipe(path, [*overrides, TWO_LANES])
    layout = check_recipe(recipe, None)
    results = run_ranks(steps_of, layout.world_size, recipe, layout, timeout_seconds=240)
    for metrics, _ in results:
        total = expected.text + IMAGE_WEIGHT * expected.image
        assert metrics["loss_language"] == pytest.approx(expected.text, rel=TOLERANCE)
        assert metrics["loss_image"] == pytest.approx(expected.image, rel=TOLERANCE)
        assert metrics["loss"] == pytest.approx(total, rel=TOLERANCE)
    shards: dict[str, list[Any]] = {}
    for _, of_rank in results:
        for shard in of_rank:
            shards.setdefault(shard.name, []).append(shard)
    wanted = packed(recipe, expected.gradients)
    # The last pipeline stage has a copy of the tied embedding.
    assert shards.keys() - {"language.output_layer.weight"} == wanted.keys()
    floor = gradient_floor(wanted.values())
    for name, theirs in wanted.items():
        (ours,) = join_shards(shards[name], "gradients")
        scale = max(float(np.abs(theirs).max()), floor)
        error = float(np.abs(ours[: len(theirs)] - theirs).max()) / scale
        assert error < TOLERANCE, f"{name}: {error:.1e}"
    assert np.abs(wanted["language.decoder.layers.0.mlp.linear_fc1.weight"]).max() > 10 * floor


def steps_of(rank: int, recipe: Recipe, layout: Layout) -> tuple[dict[str, Any], list[Any]]:
    from mimo.check.steps import layout_steps

    steps = layout_steps(recipe, layout, 1)
    return steps.metrics[0], steps.shards
