"""A tiny recipe with a generator: it starts from a tiny Qwen3-VL, and draws images as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from tests.mimo.check.cells import RECIPES

PATH = RECIPES / "qwen3_vl_tiny.yaml"
GENERATOR = (
    "generators.image={family: qwen_image, grid: {dp: 2}, queries: 3, loss_weight: 0.7, "
    "learning_rate: 5.0e-4, query_learning_rate: 2.0e-3, condition_dropout: 0.2, time_shift: 3.0, "
    "model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, axes_dims_rope: [4, 6, 6], "
    "in_channels: 12, condition_size: 128, max_pixels: 256}}"
)


def draws_recipe(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe; its checkpoint is written into ``folder``."""
    return load_recipe(PATH, [starting_from(folder), GENERATOR, *overrides])


def starting_from(folder: Path) -> str:
    """Write the recipe's checkpoint; return the override that names it."""
    write_tiny(TinyCheckpoint("qwen3_vl"), folder / "qwen3_vl")
    return f"init_from={folder / 'qwen3_vl'}"
