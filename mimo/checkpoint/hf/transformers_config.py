"""The configuration of a folder as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mimo.config.schema import Recipe
from mimo.errors import RecipeError, kind_of
from mimo.families.hf_config import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def transformers_config(recipe: Recipe) -> PretrainedConfig:
    """Of the whole model in the folder of `init_from`. No code of the folder is run.

    Raises RecipeError for a folder whose model is code in it, or that transformers does not know.
    """
    from transformers import AutoConfig  # late: it takes seconds to import

    assert recipe.init_from is not None, "checked with the layout"
    folder = Path(recipe.init_from)
    if "auto_map" in read_json(folder / "config.json"):
        raise RecipeError(
            recipe.problem(
                ("init_from",),
                f"{folder}: config.json has auto_map: the model is code of its own, which is not "
                f"run; give a model that transformers itself has, or set engine: megatron",
            )
        )
    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise kind_of(error, RecipeError)(
            recipe.problem(("init_from",), f"{folder}: {error}")
        ) from error
