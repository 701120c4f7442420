"""The Hugging Face weights that a recipe starts from; `mimo convert from-hf`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint.assets import ASSETS, collect_assets
from mimo.checkpoint.folder import Progress, complete
from mimo.checkpoint.hf.folder import HFCheckpoint, new_folder
from mimo.checkpoint.hf.recipes import (
    DEFAULT_ENCODER,
    architecture_of_folder,
    fill_recipe,
    tower_settings,
)
from mimo.checkpoint.tensors import write
from mimo.config.schema import LANGUAGE, Recipe
from mimo.errors import InputError, RecipeError, StartError
from mimo.families.hf_config import read_config
from mimo.families.keymap import Weight
from mimo.families.registry import language_settings
from mimo.families.wire import DTYPES, precision_of
from mimo.runtime.progress import counter_of

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class InitialWeights:
    """A checkpoint to start from, and by module what its parameters consist of.

    weights: of the language model and the tower that are in the checkpoint. Further encoders of a
    recipe are initialized randomly.
    """

    checkpoint: HFCheckpoint
    weights: Mapping[str, Sequence[Weight]]


def initial_weights(recipe: Recipe) -> InitialWeights | None:
    """Return the weights in the folder that a recipe starts from; None if it names none.

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


def original_tower(recipe: Recipe) -> InitialWeights | None:
    """Return the tower of a checkpoint whose language model was trained alone; None without one.

    Raises InputError if the folder is gone, and RecipeError if it does not fit.
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
    checkpoint = HFCheckpoint(folder, architecture, weights)
    return InitialWeights(checkpoint, {DEFAULT_ENCODER: weights[DEFAULT_ENCODER]})


# ------------------------------------------------------------------------------ from-hf


def convert_from_hf(source: Path, target: Path) -> None:
    """Write the checkpoint folder ``target``: weights, ``recipe.yaml`` and assets.

    It has no optimizer; `mimo generate` answers with it and `mimo convert to-hf` turns it back.
    The folder appears complete or not at all. Raises InputError for a source that does not fit.
    """
    recipe = minimal_recipe(source)
    initial = initial_weights(recipe)
    assert initial is not None, "the recipe starts from the folder"
    checkpoint = initial.checkpoint
    precision = precision_of(checkpoint.dtype)
    train = recipe.train.model_copy(update={"precision": precision})
    recipe = recipe.model_copy(update={"train": train})
    settings = language_settings(recipe)
    tensors: dict[str, tuple[Weight, int]] = {}
    for module, weights in initial.weights.items():
        for weight in weights:
            rows = weight.num_rows
            if module == LANGUAGE and weight.name in _VOCABULARY:
                rows = settings.padded_vocab_size(rows)
            tensors[f"{module}.{weight.name}"] = (weight, rows)
    ordered = sorted(tensors, key=lambda key: checkpoint.order(tensors[key][0]))
    shapes = {key: _shape(*tensors[key]) for key in ordered}

    def tensor_of(key: str) -> Tensor:
        advance()
        return whole_tensor(*tensors[key], checkpoint, DTYPES[precision])

    with new_folder(target) as folder, counter_of("tensors", len(tensors)) as advance:
        sums = write(folder, shapes, DTYPES[precision], tensor_of)
        collect_assets(recipe, folder / ASSETS)
        complete(folder, Progress(step=0, samples=0), recipe.to_yaml(), sums)


def minimal_recipe(source: Path) -> Recipe:
    """Return a recipe with the families and sizes of a folder, and stand-ins for data and steps.

    Raises InputError for a folder that is no checkpoint of a known model.
    """
    if not source.is_dir():
        raise InputError(f"{source}: no such folder; give a checkpoint in Hugging Face format")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.resolve().name)
    data: dict[str, Any] = {
        "name": name.lstrip("._-") or "converted",
        "init_from": str(source),
        "data": {"sources": [{"path": "shards/*.tar"}], "sequence_length": 4096},
        "train": {"steps": 1, "global_batch_size": 1},
    }
    problems = [message for _, message in fill_recipe(data)]
    if problems:
        raise InputError("\n".join(problems))
    return Recipe.model_validate(data)


def whole_tensor(
    weight: Weight, num_rows: int, checkpoint: HFCheckpoint, dtype: torch.dtype
) -> Tensor:
    """Return our parameter (num_rows, ...), with zeros for padding rows."""
    tensor = torch.zeros(_shape(weight, num_rows), dtype=dtype)
    position = 0
    for run in weight.runs:
        tensor[position : position + run.count].copy_(checkpoint.matrix(run))
        position += run.count
    return tensor


def _shape(weight: Weight, num_rows: int) -> tuple[int, ...]:
    first = weight.sources[0]
    if len(first.shape) == 1:
        return (num_rows,)
    elements = torch.Size(first.shape).numel()
    return (num_rows, elements // first.num_rows)
