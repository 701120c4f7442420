"""Build a generator: its transformer of diffusers under FSDP2, and its frozen autoencoder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mimo.checkpoint.hf.initial import InitialWeights
from mimo.config.schema import Recipe
from mimo.device import local_device
from mimo.engines.draw import adapter_numbers, draw
from mimo.engines.fsdp.context import Adapters, FsdpContext
from mimo.engines.fsdp.generator import Encode, GeneratorModel
from mimo.engines.fsdp.models import module_on_meta
from mimo.engines.fsdp.module import FsdpModule
from mimo.engines.fsdp.plans import adapt
from mimo.engines.fsdp.sharding import Names, Reader, load, shard
from mimo.engines.optimizer import OptimizerSettings
from mimo.errors import RecipeError
from mimo.families.contracts import Autoencoder
from mimo.families.flow import pack, unpack
from mimo.families.keymap import is_adapter
from mimo.families.registry import generator_family, generator_settings
from mimo.families.wire import DTYPES
from mimo.model.fsdp import freeze_names, names_of
from mimo.parallel.groups import Topology


def generator_module(
    recipe: Recipe,
    topology: Topology,
    name: str,
    optimizer: OptimizerSettings | None,
    num_tokens: int,
    initial: InitialWeights | None,
    filled: set[str],
) -> FsdpModule:
    """Build this rank's part of a generator, with weights and optimizer; no collective.

    The arguments are those of `mimo.model.fsdp.fsdp_module`. Raises RecipeError for a generator or
    an autoencoder that cannot be built.
    """
    part, train = recipe.generators[name], recipe.train
    family, settings = generator_family(recipe, name), generator_settings(recipe, name)
    weights = family.weights(settings)
    groups = tuple(
        (weight.name.removesuffix(".weight"),)
        for weight in weights
        if part.lora is not None and part.lora.adapts(weight.name)
    )
    ctx = FsdpContext(
        mesh=topology.meshes.get(name),
        dtype=DTYPES[train.precision],
        recompute=part.recompute,
        reshard_after_forward=part.reshard_after_forward,
        reduce_gradients=part.reduce_gradients,
        adapters=part.lora and Adapters(part.lora.rank, part.lora.scale, groups),
    )
    try:
        transformer = module_on_meta(lambda: family.build(settings), ctx.stored_dtype)
        encode = _encoder(open_autoencoder(recipe, name), settings.token_pixels)
    except (ValueError, OSError, ImportError) as error:
        raise RecipeError(recipe.problem((*recipe.key_of(name), "model"), str(error))) from error
    model = GeneratorModel(transformer, family.units(transformer), family.predict, encode, ctx)
    adapt(model, ctx)
    names = names_of(recipe, name, weights, num_tokens)
    freeze_names(recipe, name, model, names)
    shard(model, ctx)
    load(model, ctx, local_device(), _reader(recipe, name, names, initial, filled))
    rate = part.learning_rate or train.learning_rate
    return FsdpModule(name, topology.modules[name], model, ctx, names, optimizer, rate)


def open_autoencoder(recipe: Recipe, name: str) -> Autoencoder | None:
    """Open a generator's autoencoder on the device; None for pixels. Raises ValueError, OSError."""
    settings, dtype = generator_settings(recipe, name), DTYPES[recipe.train.precision]
    if settings.autoencoder is None:
        return None
    family = generator_family(recipe, name)
    return family.autoencoder(Path(settings.autoencoder), local_device(), dtype)


def _encoder(autoencoder: Autoencoder | None, side: int) -> Encode:
    """Return what makes tokens of squares of ``side`` pixels."""

    def encode(squares: Tensor, grid: tuple[int, int]) -> Tensor:
        if autoencoder is None:
            return squares
        return pack(autoencoder.encode(unpack(squares, grid, side)))

    return encode


def _reader(
    recipe: Recipe, name: str, names: Names, initial: InitialWeights | None, filled: set[str]
) -> Reader:
    """Read weights from the folder or draw them, like torch's linears; skip what is filled later.

    Matrices are uniform in ±1/sqrt(inputs), biases 0, and other vectors, the weights of norms, 1.
    """
    is_stored = initial is not None and name in initial.weights

    def read(key: str, rows: slice, columns: slice) -> Tensor | None:
        users = names.users(key)
        if users <= filled:
            return None
        if is_stored and not is_adapter(key):
            assert initial is not None
            return initial.checkpoint_of(name).part(key, rows, columns)
        (parameter,) = users
        shape = names.shapes[parameter]
        if len(shape) == 1 or key.endswith(".lora_b"):
            value = 0.0 if key.endswith((".bias", ".lora_b")) else 1.0
            width = (columns.stop - columns.start,) if len(shape) > 1 else ()
            return torch.full((rows.stop - rows.start, *width), value)
        first, last = columns.indices(shape[1])[:2]
        part = torch.zeros(rows.stop - rows.start, last - first)
        seed = f"{recipe.train.seed}:{name}.{parameter}"
        draw(part, rows.start, first, (shape[0], shape[1]), seed, adapter_numbers(shape[1]))
        return part

    return read
