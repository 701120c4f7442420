"""The tiny checkpoint that stands in for the folder of a recipe with modules of `engine: fsdp`."""

import math
from pathlib import Path
from typing import Any

from mimo.checkpoint.hf.architectures import ARCHITECTURES, Architecture
from mimo.checkpoint.hf.recipes import architecture_of_folder, tower_settings
from mimo.checkpoint.hf.tiny import FAMILIES, TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.families.hf_config import read_config
from mimo.families.registry import language_settings
from mimo.parallel.grids import LANGUAGE, Layout

_TINY_LAYERS, _TINY_LAYER_KINDS, _TINY_KEY_GROUPS = 4, 2, 2  # of a tiny checkpoint
_VOCAB_MULTIPLE = 48  # does not divide the vocabulary, so that its last rows are padding


def tiny_checkpoint(
    recipe: Recipe, layout: Layout, folder: Path
) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """Return a tiny checkpoint in ``folder`` and its modules' settings; None without fsdp modules.

    Raises RecipeError for an architecture without a tiny checkpoint.
    """
    modules = {**layout.encoders, LANGUAGE: layout.language}
    if all(grid.engine != "fsdp" for grid in modules.values()):
        return None, {}  # generators start with random weights
    architecture = _architecture_of(recipe)
    if architecture is None or architecture.model_type not in FAMILIES:
        families = [recipe.language.family, *(e.family for e in recipe.encoders.values())]
        raise RecipeError(
            f"engine: fsdp is compared on a tiny checkpoint of the recipe's architecture, but for "
            f"the families {', '.join(families)} there is none"
        )
    tower = architecture.tower_of(recipe)
    grids = [grid for name, grid in layout.grids.items() if name in (LANGUAGE, tower)]
    # Every stage has a layer of each kind.
    multiple = _TINY_LAYER_KINDS * math.lcm(*(grid.pp * grid.vpp for grid in grids))
    settings = TinyCheckpoint(
        architecture.model_type,
        tied=language_settings(recipe).tie_word_embeddings,
        width=math.lcm(*(grid.tp // math.gcd(grid.tp, _TINY_KEY_GROUPS) for grid in grids)),
        num_layers=-(-_TINY_LAYERS // multiple) * multiple,
    )
    tied = "tied" if settings.tied else "untied"
    checkpoint = folder / f"{settings.family}_{settings.num_layers}_{settings.width}_{tied}"
    if not checkpoint.exists():
        from transformers.utils import logging  # late: it takes seconds to import

        logging.disable_progress_bar()
        write_tiny(settings, checkpoint)
    config = read_config(checkpoint)
    models = {LANGUAGE: architecture.language_family().settings_from_hf(config)}
    models[LANGUAGE] |= {"vocab_multiple": math.lcm(_VOCAB_MULTIPLE, layout.language.tp)}
    if tower is not None:
        models[tower] = tower_settings(architecture, config, checkpoint) or {}
    return checkpoint, models


def _architecture_of(recipe: Recipe) -> Architecture | None:
    """Return the architecture of the recipe's folder, or without one of its families."""
    if recipe.init_from is not None and Path(recipe.init_from).is_dir():
        return architecture_of_folder(Path(recipe.init_from), recipe.language.family)
    towers = {encoder.family for encoder in recipe.encoders.values()} or {None}
    known = (a for a in ARCHITECTURES.values() if a.language == recipe.language.family)
    return next((a for a in known if a.encoder in towers), None)
