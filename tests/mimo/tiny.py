"""A tiny data set and recipe for multi-rank tests, and what a layout's step is compared by."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.text.digits import write_tokenizer
from mimo.check.compare import Shard, gradient_floor, join_shards, slice_of
from mimo.check.workload import Item, Sample, write_shard
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.model.dataset import Dataset, item_processors, open_dataset, open_tokenizer
from mimo.model.step_plan import StepPlanner
from mimo.parallel.build import build_layout

# Images per sample, four samples to a global microbatch: mixed, text only, mixed.
# The second step starts over, with stale gradients to clear.
NUM_STEPS = 2
IMAGES_PER_SAMPLE = (2, 0, 1, 3, 0, 0, 0, 0, 1, 4, 1, 2)
# Videos (items of a second encoder) in the same samples, where a test asks for them: samples with
# items of both kinds, of either kind and of none.
VIDEOS_PER_SAMPLE = (1, 2, 0, 2, 0, 0, 0, 0, 0, 1, 3, 0)
_SIZES = ((28, 28), (56, 28), (28, 56), (56, 56), (84, 28))

RECIPE = """
name: tiny
language:
  family: qwen3
  grid: {{tp: 1, dp: 1}}
  model:
    num_layers: 2
    hidden_size: 32
    ffn_hidden_size: 48
    num_attention_heads: 4
    num_query_groups: 2
    head_size: 8
    rotary_base: 10000.0
    mrope_section: [2, 1, 1]
    tie_word_embeddings: true
    init_std: 0.2
encoders:
  vision:
    family: qwen_vl
    grid: {{tp: 1, dp: 1}}
    model:
      num_layers: 2
      hidden_size: 16
      ffn_hidden_size: 24
      num_attention_heads: 2
      temporal_patch_size: 1
      min_pixels: 784
      max_pixels: 12544
      init_std: 0.2
data:
  sources: [{{path: "{directory}/train-*.tar"}}]
  tokenizer: {directory}/tokenizer
  sequence_length: 128
  shuffle_block: 1000
  workers: 0
train:
  steps: 3
  global_batch_size: 12
  micro_batch_size: 4
  optimizer: sgd
  learning_rate: 0.1
  clip_grad_norm: null
  run_dir: {directory}/runs
  threads_per_rank: 1
"""


# A second tower of another size, with smaller patches, hence more rows per item.
SECOND_ENCODER = (
    "encoders.glyphs={family: qwen_vl, media: video, placeholder: '<|video_pad|>', grid: {dp: 1}, "
    "model: {num_layers: 1, hidden_size: 24, ffn_hidden_size: 32, num_attention_heads: 2, "
    "patch_size: 7, temporal_patch_size: 1, min_pixels: 784, max_pixels: 3136, init_std: 0.2}}"
)


def write_samples(
    directory: Path,
    images_per_sample: Sequence[int] = IMAGES_PER_SAMPLE,
    name: str = "train",
    videos_per_sample: Sequence[int] | None = None,
) -> None:
    """A shard of noise images of different sizes with questions and answers, and a tokenizer.

    Videos are still images, too; they stand between the images of their sample.
    """
    rng = np.random.default_rng(0)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "tokenizer")
    samples = []
    for number, images in enumerate(images_per_sample):
        media = ["image"] * images
        for video in range(videos_per_sample[number] if videos_per_sample else 0):
            media.insert(2 * video, "video")
        digits = rng.integers(0, 10, max(len(media), 2))
        sizes = [_SIZES[int(rng.integers(len(_SIZES)))] for _ in media]
        samples.append(
            Sample(
                tuple(
                    Item(one, "png", _noise(rng, *size))
                    for one, size in zip(media, sizes, strict=True)
                ),
                question="what is this ?" if number % 3 else "read the digits",
                answer=" ".join(str(digit) for digit in digits),
            )
        )
    write_shard(directory / f"{name}-00000.tar", samples)


def _noise(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A grey PNG of so many pixels."""
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_recipe(directory: Path) -> Path:
    """The tiny recipe over the data in ``directory``."""
    path = directory / "tiny.yaml"
    path.write_text(RECIPE.format(directory=directory))
    return path


def open_sources(recipe: Recipe) -> Dataset:
    """Open the training data of a recipe."""
    dataset = open_dataset(recipe, "sources", open_tokenizer(recipe), item_processors(recipe))
    assert dataset is not None
    return dataset


def planner_of(
    path: Path,
    *overrides: str,
    micro_batch_size: int = 4,
    num_microbatches: int = 3,
    **options: Any,
) -> StepPlanner:
    """Return a planner of the recipe's steps. options: further arguments of `StepPlanner`."""
    recipe = load_recipe(path, overrides)
    dataset, media = open_sources(recipe), {"vision": ("image",)}
    media |= {name: (generator.output,) for name, generator in recipe.generators.items()}
    sizes = micro_batch_size, num_microbatches
    layout = build_layout(recipe)
    return StepPlanner(layout, media, dataset.indexes, dataset.order, *sizes, **options)


# How modules lie on ranks, which does not matter on one rank.
_PLACED = {"grid", "recompute", "placement", "run_ahead", "encode_group"}
_reference_of: dict[str, dict[str, Any]] = {}


def reference_steps(
    run_ranks: Callable[..., list[Any]], path: Path, overrides: list[str]
) -> dict[str, Any]:
    """`run_reference_steps` on a rank, once for all layouts of the same model and batches."""
    recipe = load_recipe(path, overrides)
    data = recipe.model_dump(mode="json", exclude={"bridge": True})
    for section in (data["language"], *data["encoders"].values()):
        for key in _PLACED & section.keys():
            del section[key]
    together = data["train"].pop("micro_batch_size") * build_layout(recipe).language.dp
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        del data["train"][key]
    key = json.dumps([data, together])
    if key not in _reference_of:
        (_reference_of[key],) = run_ranks(run_reference_steps, 1, path, overrides)
    return _reference_of[key]


# ------------------------------------------------------- functions that run inside ranks


def run_layout_steps(rank: int, path: Path, overrides: list[str]) -> dict[str, Any]:
    """One rank: train; its metrics, and its shards with gradients and weights."""
    from mimo.check.steps import layout_steps

    recipe = load_recipe(path, overrides)
    found = layout_steps(recipe, build_layout(recipe), NUM_STEPS)
    return {"metrics": found.metrics, "shards": found.shards}


def run_reference_steps(rank: int, path: Path, overrides: list[str]) -> dict[str, Any]:
    """The same steps on one rank: metrics by step, last gradient and weights by parameter."""
    from mimo.check.steps import reference_steps

    recipe = load_recipe(path, overrides)
    together = recipe.train.micro_batch_size * build_layout(recipe).language.dp
    train = recipe.train.model_copy(update={"micro_batch_size": together})
    found = reference_steps(recipe.model_copy(update={"train": train}), NUM_STEPS)
    parameters = {
        name: {"gradient": one.gradients[-1] if one.gradients else None, "weight": one.weights[-1]}
        for name, one in found.parameters.items()
    }
    return {"steps": found.steps, "parameters": parameters}


# ------------------------------------------------------------------------- comparison


def assemble(results: Sequence[dict[str, Any]], what: str) -> dict[str, np.ndarray | None]:
    """Whole tensors by name, after the last step, from the shards of all ranks.

    what: "gradient" or "weight". Replicas must be equal bit for bit.
    """
    by_name: dict[str, list[Shard]] = {}
    for shard in (shard for result in results for shard in result["shards"]):
        by_name.setdefault(shard.name, []).append(shard)
    whole: dict[str, np.ndarray | None] = {}
    for name, parts in by_name.items():
        joined = join_shards(parts, f"{what}s")
        whole[name] = joined[-1] if joined else None
        for shard in parts if joined else ():
            steps = shard.gradients if what == "gradient" else shard.weights
            message = f"{name} differs by lane"
            np.testing.assert_array_equal(slice_of(joined[-1], shard), steps[-1], err_msg=message)
    return whole


def errors(got: dict[str, Any], reference: dict[str, Any], what: str) -> dict[str, float]:
    """Error of every tensor; see docs/parallelism.md. reference: one, or `gradient`, `weight`."""
    assert got.keys() == reference.keys(), got.keys() ^ reference.keys()
    floor = gradient_floor(p["gradient"] for p in reference.values() if p["gradient"] is not None)
    found = {}
    for name, value in got.items():
        expected = reference[name][what]
        if expected is None:
            assert value is None, f"{name} is frozen and has a gradient"
            continue
        scale = max(float(np.abs(expected).max()), floor)
        found[name] = float(np.abs(value - expected).max(initial=0.0)) / scale
    return found
