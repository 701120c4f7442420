"""The tiny checkpoint that a stand-in starts from if one of its modules has `engine: fsdp`.

Such a module is that of transformers in a folder. So the stand-in gets one of the recipe's
architecture, with layers of every kind, and the modules of Megatron start from it too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mimo.checkpoint.hf.architectures import ARCHITECTURES, Architecture
from mimo.checkpoint.hf.recipes import architecture_of_folder, tower_settings
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.hf.tiny_configs import FAMILIES
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.families.hf_config import read_config
from mimo.families.registry import language_settings
from mimo.parallel.grids import LANGUAGE, Layout

_LAYERS, _KINDS, _GROUPS = 4, 2, 2  # of a tiny checkpoint: layers, kinds of them, key groups
_VOCAB_MULTIPLE = 48  # does not divide the vocabulary, so that its last rows are padding


def stand_in(
    recipe: Recipe, layout: Layout, folder: Path
) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The checkpoint, and settings of the modules that are in it; None without fsdp modules.

    It is written into a folder inside ``folder`` unless it is there. Raises RecipeError for an
    architecture of which there is no tiny checkpoint.
    """
    if all(grid.engine != "fsdp" for grid in layout.grids.values()):
        return None, {}
    architecture = _architecture_of(recipe)
    if architecture is None or architecture.model_type not in FAMILIES:
        families = [recipe.language.family, *(one.family for one in recipe.encoders.values())]
        raise RecipeError(
            f"engine: fsdp is compared on a tiny checkpoint of the recipe's architecture, and for "
            f"the families {', '.join(families)} there is none"
        )
    tower = architecture.tower_of(recipe)
    grids = [grid for name, grid in layout.grids.items() if name in (LANGUAGE, tower)]
    # Every stage has a layer of each kind.
    multiple = _KINDS * math.lcm(*(grid.pp * grid.vpp for grid in grids))
    settings = TinyCheckpoint(
        architecture.model_type,
        tied=language_settings(recipe).tie_word_embeddings,
        width=math.lcm(*(grid.tp // math.gcd(grid.tp, _GROUPS) for grid in grids)),
        num_layers=-(-_LAYERS // multiple) * multiple,
    )
    tied = "tied" if settings.tied else "untied"
    own = folder / f"{settings.family}_{settings.num_layers}_{settings.width}_{tied}"
    if not own.exists():
        from transformers.utils import logging  # late: it takes seconds to import

        logging.disable_progress_bar()
        write_tiny(settings, own)
    config = read_config(own)
    models = {LANGUAGE: architecture.language_family().settings_from_hf(config)}
    models[LANGUAGE] |= {"vocab_multiple": math.lcm(_VOCAB_MULTIPLE, layout.language.tp)}
    if tower is not None:
        models[tower] = tower_settings(architecture, config, own) or {}
    return own, models


def _architecture_of(recipe: Recipe) -> Architecture | None:
    """That of the recipe's folder, or without one that of its families."""
    if recipe.init_from is not None and Path(recipe.init_from).is_dir():
        return architecture_of_folder(Path(recipe.init_from))
    towers = {encoder.family for encoder in recipe.encoders.values()} or {None}
    known = (one for one in ARCHITECTURES.values() if one.language == recipe.language.family)
    return next((one for one in known if one.encoder in towers), None)
