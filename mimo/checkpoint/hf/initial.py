"""The checkpoint that a recipe starts from, checked against the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo.checkpoint.hf.checkpoint import HFCheckpoint
from mimo.checkpoint.hf.recipes import DEFAULT_ENCODER, architecture_of_folder, tower_settings
from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError, StartError
from mimo.families.hf_config import read_config
from mimo.families.keymap import Weight
from mimo.families.registry import language_settings


@dataclass(frozen=True)
class InitialWeights:
    """A checkpoint to start from, and by module what its parameters consist of.

    weights: of the language model and the tower that are in the checkpoint. Further encoders of a
    recipe are drawn freshly.
    """

    checkpoint: HFCheckpoint
    weights: Mapping[str, Sequence[Weight]]


def original_tower(recipe: Recipe) -> InitialWeights | None:
    """The tower of a checkpoint whose language model was trained alone; None where there is none.

    Raises InputError where the folder is gone, and RecipeError where it does not fit.
    """
    if recipe.encoders or recipe.init_from is None:
        return None
    folder = Path(recipe.init_from)
    if not folder.is_dir():
        raise InputError(
            f"init_from is {folder}, and no folder is there; the recipe has no encoders, so the "
            f"weights of the tower are still to be read from it: put it back"
        )
    architecture, config = architecture_of_folder(folder), read_config(folder)
    settings = tower_settings(architecture, config, folder)
    if settings is None:
        return None
    tower = architecture.encoder_family().Settings(**settings)
    weights = architecture.weights(language_settings(recipe), {DEFAULT_ENCODER: tower})
    own = {DEFAULT_ENCODER: weights[DEFAULT_ENCODER]}
    return InitialWeights(HFCheckpoint(folder, architecture, weights), own)


def initial_weights(recipe: Recipe) -> InitialWeights | None:
    """The weights in the folder that a recipe starts from; None where it names none.

    Reads configuration and headers. Raises RecipeError for a folder that does not fit.
    """
    if recipe.init_from is None:
        return None
    folder = Path(recipe.init_from)
    try:
        architecture = architecture_of_folder(folder)
        weights = architecture.weights_of(recipe)
        return InitialWeights(HFCheckpoint(folder, architecture, weights), weights)
    except StartError as error:
        raise StartError(recipe.problem(("init_from",), str(error))) from error
    except InputError as error:
        first, *others = error.args
        raise RecipeError(recipe.problem(("init_from",), first), *others) from error
