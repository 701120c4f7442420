"""The planner of a recipe's steps."""

from __future__ import annotations

from typing import Any

from mimo.config.schema import Recipe
from mimo.model.dataset import Dataset, linear_tokens, token_budget
from mimo.model.step_plan import StepPlanner
from mimo.ops.acceleration import fp8_multiple
from mimo.parallel.grids import Layout, encode_group, num_microbatches


def step_planner(recipe: Recipe, layout: Layout, dataset: Dataset, **given: Any) -> StepPlanner:
    """Plans the steps of a recipe. given: further arguments of `StepPlanner`."""
    return StepPlanner(
        layout,
        {name: tuple(one.media_tokens) for name, one in recipe.encoders.items()},
        dataset.indexes,
        dataset.order,
        recipe.train.micro_batch_size,
        num_microbatches(recipe, layout),
        delivery=recipe.bridge.delivery,
        encode_group=encode_group(recipe),
        packed=recipe.data.packing,
        tokens_on_rank=fp8_multiple(recipe.train.fp8),
        budget=token_budget(recipe),
        linear_tokens=linear_tokens(recipe),
        **given,
    )
