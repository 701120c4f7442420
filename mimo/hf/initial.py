"""The checkpoint that a recipe starts from, checked against the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo.errors import InputError, RecipeError
from mimo.families.keymap import Weight
from mimo.hf.checkpoint import HFCheckpoint
from mimo.hf.recipe_keys import architecture_of_folder
from mimo.recipe.schema import Recipe


@dataclass(frozen=True)
class InitialWeights:
    """A checkpoint to start from, and by module what its parameters consist of.

    weights: of the language model and the tower that are in the checkpoint. Further encoders of a
    recipe are drawn freshly.
    """

    checkpoint: HFCheckpoint
    weights: Mapping[str, Sequence[Weight]]


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
    except RecipeError as error:
        first, *others = error.problems
        raise RecipeError(recipe.problem(("init_from",), first), *others) from error
    except InputError as error:
        raise RecipeError(recipe.problem(("init_from",), str(error))) from error
