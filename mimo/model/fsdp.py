"""Build a module for `engine: fsdp`: the module of transformers in the folder of `init_from`.

Its tensors have the names of the checkpoint format, by the family's key map. The checks at the end
run before any rank starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bridge import ItemRows
from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.export import differences
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.checkpoint.hf.recipes import architecture_of_folder, transformers_config
from mimo.config.modules import LoRA
from mimo.config.schema import LANGUAGE, Recipe, key_of
from mimo.device import local_device
from mimo.engines.draw import adapter_numbers, draw
from mimo.engines.fsdp.context import Adapters, FsdpContext, Wrapper
from mimo.engines.fsdp.language import LanguageModel
from mimo.engines.fsdp.models import model_problems
from mimo.engines.fsdp.module import FsdpModule
from mimo.engines.fsdp.plans import adapt, tp_problems
from mimo.engines.fsdp.sharding import Names, Reader, Rows, load, shard
from mimo.engines.fsdp.towers import TOWERS
from mimo.errors import InputError, RecipeError
from mimo.families.keymap import Weight, adapter_names, adapter_shapes, is_adapter, num_elements
from mimo.families.registry import language_settings, trainable_names
from mimo.families.wire import DTYPES
from mimo.parallel.grids import Layout
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
    """Build this rank's part of a module, with weights and optimizer; no collective.

    settings: of the optimizer. num_tokens: of the language model. filled: parameters that the
    caller is about to fill; all others come from ``initial``. A lone rank, without a mesh, gets the
    plain module of transformers. Raises RecipeError for a module that cannot run.
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
    """Map our names to tensors of transformers, with rows that pad the vocabulary, and adapters."""
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
    """Read weights from the folder and draw adapters; return None for what is filled later."""

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
    is_trainable = trainable_names(recipe, name)
    for key, param in wrapper.named_parameters():
        trains = {is_trainable(name) for name in names.users(wrapper.hf_names[key])}
        assert len(trains) == 1, f"only a part of {key} is trainable"
        param.requires_grad_(trains.pop())


# -------------------------------------------------------------------------- checks


def fsdp_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield what modules with `engine: fsdp` cannot compute; the folder of `init_from` decides."""
    names = [name for name, grid in layout.grids.items() if grid.engine == "fsdp"]
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
    for name in names:
        if name == LANGUAGE:
            yield from _language_problems(recipe, config, layout.language.tp)
        else:
            yield from _tower_problems(recipe, name, architecture, layout.encoders[name].tp)
        yield from _adapter_problems(recipe, name, architecture)
    for key in differences(recipe, architecture, folder):
        if key.module in names and not key.is_of_images:
            yield recipe.problem(
                (*key_of(key.module), "model", key.key),
                f"got {key.value}, but engine: fsdp computes what {folder} says, {key.expected}; "
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
        held = "which is none" if tower is None else f"which is encoders.{tower}"
        yield recipe.problem(
            (*key, "engine"),
            f"got fsdp, but it runs the tower in the folder of init_from, {held}; "
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
