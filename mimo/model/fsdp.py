"""A module of a recipe as `engine: fsdp` runs it: the module of transformers in a folder.

Its tensors have the names of the checkpoint format, by the family's key map.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bridge import ItemRows
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.checkpoint.hf.recipes import architecture_of_folder, transformers_config
from mimo.config.modules import LoRA
from mimo.config.schema import LANGUAGE, Recipe, key_of
from mimo.device import local_device
from mimo.engines.draw import adapter_numbers, draw
from mimo.engines.fsdp.context import Adapters, FsdpContext, Wrapper
from mimo.engines.fsdp.language import LanguageModel
from mimo.engines.fsdp.module import FsdpModule
from mimo.engines.fsdp.plans import adapt
from mimo.engines.fsdp.sharding import Names, Reader, Rows, load, shard
from mimo.engines.fsdp.towers import TOWERS
from mimo.errors import RecipeError
from mimo.families.keymap import Weight, adapter_names, adapter_shapes, is_adapter, num_elements
from mimo.families.registry import language_settings
from mimo.families.wire import DTYPES
from mimo.model.flops import trainable_names
from mimo.parallel.groups import Topology

if TYPE_CHECKING:
    from mimo.engines.optimizer import OptimizerSettings

_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def fsdp_module(
    recipe: Recipe,
    topology: Topology,
    name: str,
    settings: OptimizerSettings,
    num_tokens: int,
    initial: InitialWeights | None,
    filled: set[str],
) -> FsdpModule:
    """This rank's part of a module, with weights and optimizer; no collective.

    settings: of the optimizer. num_tokens: of the language model. filled: parameters that the
    caller is about to fill; all others come from ``initial``.
    Without a mesh, on a lone rank, it is the plain module of transformers.
    Raises RecipeError for a module that is not in the folder or cannot run so.
    """
    assert recipe.init_from is not None, "checked with the layout"
    part, train = recipe.module(name), recipe.train
    weights = architecture_of_folder(Path(recipe.init_from)).weights_of(recipe)[name]
    groups = tuple(
        tuple(source.key.removesuffix(".weight") for source in weight.sources)
        for weight in weights
        if _adapts(part.lora, weight)
    )
    ctx = FsdpContext(
        mesh=topology.meshes.get(name),
        dtype=DTYPES[train.precision],
        sequence_parallel=part.grid.sp,
        scatter_embedding=recipe.bridge.delivery == "sharded",
        recompute=part.recompute,
        reshard_after_forward=part.reshard_after_forward,
        reduce_gradients=part.reduce_gradients,
        adapters=part.lora and Adapters(part.lora.rank, part.lora.scale, groups),
    )
    config = transformers_config(recipe)
    try:
        wrapper: Wrapper
        if name == LANGUAGE:
            wrapper = LanguageModel(config, ctx)
        else:
            wrapper = TOWERS[config.model_type](config, ctx, ItemRows)
    except ValueError as error:
        raise RecipeError(recipe.problem((*key_of(name), "engine"), str(error))) from error
    adapt(wrapper, ctx)
    names = _names(recipe, name, weights, num_tokens)
    _freeze(recipe, name, wrapper, names)
    shard(wrapper, ctx)
    load(wrapper, ctx, local_device(), _reader(recipe, names, initial, filled))
    rate = part.learning_rate or train.learning_rate
    return FsdpModule(name, topology.modules[name], wrapper, ctx, names, settings, rate)


def _adapts(lora: LoRA | None, weight: Weight) -> bool:
    endings = tuple(f"linear_{target}.weight" for target in lora.targets) if lora else ()
    return ".layers." in weight.name and weight.name.endswith(endings)


def _names(recipe: Recipe, name: str, weights: Iterable[Weight], num_tokens: int) -> Names:
    """By the key map, and with the rows that pad the vocabulary; adapters beside their linears."""
    tensors, lora = [], recipe.module(name).lora
    for weight in weights:
        rows = weight.num_rows
        columns = num_elements([weight]) // rows
        if lora is not None and _adapts(lora, weight):
            (lora_a, lora_b), (shared, _) = map(
                adapter_names, (weight.name, weight.runs[0].source.key)
            )
            shape_a, shape_b = adapter_shapes((rows, columns), lora.rank)
            outputs = [(adapter_names(r.source.key)[1], r.start, r.count) for r in weight.runs]
            tensors.append((lora_a, shape_a, [Rows(shared, 0, lora.rank)]))
            tensors.append((lora_b, shape_b, [Rows(*run) for run in outputs]))
        if name == LANGUAGE and weight.name.endswith(_OF_VOCABULARY):
            rows = language_settings(recipe).padded_vocab_size(num_tokens)
        runs = [Rows(r.source.key, r.start, r.count, r.source.transposed) for r in weight.runs]
        shape = (rows,) if len(weight.sources[0].shape) == 1 else (rows, columns)
        tensors.append((weight.name, shape, runs))
    return Names.of(tensors)


def _reader(
    recipe: Recipe, names: Names, initial: InitialWeights | None, filled: set[str]
) -> Reader:
    """Weights from the folder, adapters as Megatron draws them; blank what is filled later."""

    def read(key: str, rows: slice, columns: slice) -> Tensor | None:
        users = names.users(key)
        if users <= filled:
            return None
        if not is_adapter(key):
            return None if initial is None else initial.checkpoint.part(key, rows, columns)
        (name,) = users
        part = torch.zeros(rows.stop - rows.start, columns.stop - columns.start)
        if name.endswith(".lora_a"):
            shape = names.shapes[name]
            numbers = adapter_numbers(shape[1])
            draw(part, rows.start, columns.start, shape, f"{recipe.train.seed}:{name}", numbers)  # type: ignore[arg-type]
        return part

    return read


def _freeze(recipe: Recipe, name: str, wrapper: Wrapper, names: Names) -> None:
    learns = trainable_names(recipe, name)
    for own, param in wrapper.named_parameters():
        found = {learns(ours) for ours in names.users(wrapper.hf_names[own])}
        assert len(found) == 1, f"only a part of {own} learns"
        param.requires_grad_(found.pop())
