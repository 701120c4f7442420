"""Whether modules with `engine: fsdp` can run as a recipe says; asked before any rank starts.

Such a module computes what the folder of `init_from` says, so the folder decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.export import differences
from mimo.checkpoint.hf.recipes import architecture_of_folder, transformers_config
from mimo.config.schema import Recipe, key_of
from mimo.engines.fsdp.models import model_problems
from mimo.engines.fsdp.plans import tp_problems
from mimo.engines.fsdp.towers import TOWERS
from mimo.errors import InputError, RecipeError
from mimo.parallel.grids import LANGUAGE, Layout


def fsdp_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Lines for a RecipeError."""
    own = [name for name, grid in layout.grids.items() if grid.engine == "fsdp"]
    assert recipe.init_from is not None, "checked with the layout"
    folder = Path(recipe.init_from)
    if not folder.is_dir():
        yield recipe.problem(
            ("init_from",),
            f"{folder}: no such folder, but engine: fsdp builds the model by its configuration; "
            f"put it back, or name the assets folder of one of the run's checkpoints",
        )
        return
    try:
        config = transformers_config(recipe)
        architecture = architecture_of_folder(folder)
    except RecipeError as error:
        yield from error.problems
        return
    except InputError as error:
        yield recipe.problem(("init_from",), str(error))
        return
    for name in own:
        if name == LANGUAGE:
            yield from _language_problems(recipe, config, layout.language.tp)
        else:
            yield from _tower_problems(recipe, name, architecture, layout.encoders[name].tp)
        yield from _adapter_problems(recipe, name, architecture)
    for one in differences(recipe, architecture, folder):
        if one.module in own and not one.is_of_images:
            yield recipe.problem(
                (*key_of(one.module), "model", one.key),
                f"got {one.value}, but engine: fsdp computes what {folder} says, {one.expected}; "
                f"remove the key, or set engine: megatron",
            )


def _language_problems(recipe: Recipe, config: Any, tp: int) -> Iterator[str]:
    for message in tp_problems(config, tp):
        yield recipe.problem((LANGUAGE, "grid", "tp"), message)
    for message in model_problems(config):
        yield recipe.problem(
            (LANGUAGE, "engine"), f"got fsdp, but {message}; give another model in init_from"
        )


def _adapter_problems(recipe: Recipe, name: str, architecture: Architecture) -> Iterator[str]:
    lora, weights = recipe.module(name).lora, architecture.weights_of(recipe).get(name, ())
    for target in lora.targets if lora else ():
        if not any(weight.name.endswith(f".linear_{target}.weight") for weight in weights):
            yield recipe.problem(
                (*key_of(name), "lora"),
                f"got {target} among its targets, but the linears of a {architecture.model_type} "
                f"are not known by these names; remove lora",
            )


def _tower_problems(
    recipe: Recipe, name: str, architecture: Architecture, tp: int
) -> Iterator[str]:
    key, encoder = key_of(name), recipe.encoders[name]
    if (tower := architecture.tower_of(recipe)) != name:
        held = "that is none" if tower is None else f"that is encoders.{tower}"
        yield recipe.problem(
            (*key, "engine"),
            f"got fsdp, which runs the tower in the folder of init_from, and {held}; "
            f"set it to megatron",
        )
        return
    if tp > 1:
        yield recipe.problem(
            (*key, "grid", "tp"),
            f"got {tp}, but engine: fsdp has no table to cut towers by; raise dp, whose ranks "
            f"share weights too, or set engine: megatron",
        )
    if encoder.recompute == "selective" and not TOWERS[architecture.model_type].packs:
        yield recipe.problem(
            (*key, "recompute"),
            "got selective, but under engine: fsdp the attention of this tower is transformers' "
            "own; set it to full or none",
        )
