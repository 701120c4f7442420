"""Build a module for `engine: fsdp`: of transformers in the folder of `init_from`, or of diffusers.

Its tensors have the names of the checkpoint format, by the family's key map. The checks at the end
run before any rank starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bridge import ItemRows
from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.export import differences
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.checkpoint.hf.recipes import architecture_of_folder, config_of_folder
from mimo.config.modules import LoRA
from mimo.config.schema import LANGUAGE, Recipe
from mimo.device import local_device
from mimo.engines.draw import adapter_numbers, draw, normal
from mimo.engines.fsdp.context import Adapters, FsdpContext, Wrapper
from mimo.engines.fsdp.halves import FRAMES, EncoderHalf, Grid, ItemForm, build_whole
from mimo.engines.fsdp.language import LanguageModel
from mimo.engines.fsdp.language_half import LanguageHalf
from mimo.engines.fsdp.models import model_problems
from mimo.engines.fsdp.module import FsdpModule
from mimo.engines.fsdp.plans import adapt, tp_problems
from mimo.engines.fsdp.sharding import Names, Reader, Rows, load, shard
from mimo.engines.fsdp.towers import TOWERS
from mimo.engines.fsdp.tp_plans import plan_problems
from mimo.errors import InputError, RecipeError
from mimo.families.keymap import Weight, adapter_names, adapter_shapes, is_adapter, num_elements
from mimo.families.registry import (
    GENERAL,
    QUERIES,
    encoder_settings,
    generator_family,
    generator_settings,
    language_settings,
    query_weights,
    trainable_names,
)
from mimo.families.wire import DTYPES
from mimo.model.dataset import item_processors
from mimo.model.gate import Verdict, placeholders_of, verdict_of
from mimo.model.generators import generator_on_meta
from mimo.parallel.grids import Layout
from mimo.parallel.groups import Topology

if TYPE_CHECKING:
    from mimo.engines.optimizer import OptimizerSettings

_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def fsdp_module(
    recipe: Recipe,
    topology: Topology,
    name: str,
    optimizer: OptimizerSettings | None,
    num_tokens: int,
    initial: InitialWeights | None,
    filled: set[str],
) -> FsdpModule:
    """Build this rank's part of a module, with weights and optimizer; no collective.

    optimizer: its settings; None for none. num_tokens: of the language model. filled: parameters
    that the caller is about to fill; all others come from ``initial``. A lone rank, without a mesh,
    gets the plain module. Raises RecipeError for a module that cannot run.
    """
    part, train = recipe.module(name), recipe.train
    if name in recipe.generators:
        weights = generator_family(recipe, name).weights(generator_settings(recipe, name))
    else:
        folder = Path(recipe.init_from or "")
        architecture = architecture_of_folder(folder, recipe.language.family)
        weights = [*architecture.weights_of(recipe)[name]]
    if name == LANGUAGE:
        weights += query_weights(recipe)
    groups = tuple(
        tuple(source.key.removesuffix(".weight") for source in weight.sources)
        for weight in weights
        if part.lora is not None and part.lora.adapts(weight.name)
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
    key = "model" if name in recipe.generators else "engine"
    try:
        wrapper = _wrapper(recipe, name, ctx)
    except (ValueError, OSError, ImportError) as error:
        raise RecipeError(recipe.problem((*recipe.key_of(name), key), str(error))) from error
    adapt(wrapper, ctx)
    names = names_of(recipe, name, weights, num_tokens)
    freeze_names(recipe, name, wrapper, names)
    shard(wrapper, ctx)
    load(wrapper, ctx, local_device(), _reader(recipe, name, names, initial, filled))
    rate = part.learning_rate or train.learning_rate
    return FsdpModule(name, topology.modules[name], wrapper, ctx, names, optimizer, rate)


def _wrapper(recipe: Recipe, name: str, ctx: FsdpContext) -> Wrapper:
    """Build a module on meta. Raises ValueError, and OSError or ImportError for a generator."""
    if name in recipe.generators:
        return generator_on_meta(recipe, name, ctx)
    config = config_of_folder(Path(recipe.init_from or ""))
    if recipe.language.family == GENERAL:
        return half_of(recipe, name, config, ctx)
    if name == LANGUAGE:
        queries = {n: g.num_queries for n, g in recipe.generators.items() if g.num_queries}
        return LanguageModel(config, ctx, queries.items())
    return TOWERS[config.model_type](config, ctx, ItemRows)


_BLANK = (56, 56)  # height and width of the item that a lane without items encodes


def half_of(recipe: Recipe, name: str, config: Any, ctx: FsdpContext) -> Wrapper:
    """Build a half of any vision-language model, on meta. Raises ValueError if it may not train."""
    verdict = verdict_of(config)
    if verdict.problem:
        raise ValueError(f"got fsdp, but {differs(config, verdict)}")
    processors: Any = item_processors(recipe)
    tower = next(iter(recipe.encoders))
    levels = encoder_settings(recipe, tower).num_levels
    # The tiny copy may have fewer levels than the model.
    outputs = {
        modality: replace(form, num_levels=levels if form.num_levels else 0)
        for modality, form in verdict.outputs.items()
    }

    def form_of(modality: str, grid: Grid) -> ItemForm:
        return processors[modality].form(grid)

    if name != LANGUAGE:
        modality = recipe.encoders[name].media
        blank = modality, (FRAMES[modality], *_BLANK)
        return EncoderHalf(config, ctx, form_of, blank, levels, ItemRows, verdict.shares_calls)
    text = config.get_text_config()
    return LanguageHalf(
        config,
        ctx,
        verdict.packing,
        encoders={m: n for n, encoder in recipe.encoders.items() for m in encoder.media_tokens},
        outputs=outputs,
        form_of=form_of,
        placeholders=placeholders_of(config),
        router_loss=text.router_aux_loss_coef if getattr(text, "output_router_logits", 0) else 0.0,
    )


def differs(config: Any, verdict: Verdict) -> str:
    """Describe why a class cannot train in two halves."""
    return f"{type(config).__name__} cannot train in two halves: {verdict.problem}"


def names_of(recipe: Recipe, name: str, weights: Iterable[Weight], num_tokens: int) -> Names:
    """Map our names to tensors of transformers, with rows that pad the vocabulary, and adapters."""
    tensors, lora = [], recipe.module(name).lora
    for weight in weights:
        rows = weight.num_rows
        columns = num_elements([weight]) // rows
        if lora is not None and lora.adapts(weight.name):
            (lora_a, lora_b), (shared, _) = map(
                adapter_names, (weight.name, weight.runs[0].source.key)
            )
            shape_a, shape_b = adapter_shapes((rows, columns), lora.rank)
            outputs = [(adapter_names(r.source.key)[1], r.start, r.count) for r in weight.runs]
            tensors.append((lora_a, shape_a, [Rows(shared, 0, lora.rank)]))
            tensors.append((lora_b, shape_b, [Rows(*run) for run in outputs]))
        if name == LANGUAGE and weight.name.endswith(_OF_VOCABULARY):
            rows = language_settings(recipe).padded_vocab_size(num_tokens)
        pairs = [(run, run.source) for run in weight.runs]
        runs = [Rows(s.key, r.start, r.count, s.transposed, s.rows_each) for r, s in pairs]
        shape = (rows,) if len(weight.sources[0].shape) == 1 else (rows, columns)
        tensors.append((weight.name, shape, runs))
    return Names.of(tensors)


def _reader(
    recipe: Recipe, name: str, names: Names, initial: InitialWeights | None, filled: set[str]
) -> Reader:
    """Read weights from the folder; draw the others; None for what is filled later.

    A generator without a folder begins like torch's linears: matrices are uniform in
    ±1/sqrt(inputs), biases 0, and other vectors, the weights of norms, 1.
    """
    is_generator = name in recipe.generators
    is_drawn = is_generator and (initial is None or name not in initial.weights)
    seed = f"{recipe.train.seed}:" + (f"{name}." if is_generator else "")

    def read(key: str, rows: slice, columns: slice) -> Tensor | None:
        users = names.users(key)
        if users <= filled:
            return None
        is_query = key.startswith(QUERIES)
        if not (is_drawn or is_query or is_adapter(key)):
            return initial and initial.checkpoint_of(name).part(key, rows, columns)
        (parameter,) = users
        shape = names.shapes[parameter]
        if len(shape) == 1:
            return torch.full((rows.stop - rows.start,), 0.0 if key.endswith(".bias") else 1.0)
        first, last, _ = columns.indices(shape[1])
        part = torch.zeros(rows.stop - rows.start, last - first)
        if not key.endswith(".lora_b"):
            std = language_settings(recipe).init_std
            numbers = normal(std) if is_query else adapter_numbers(shape[1])
            draw(part, rows.start, first, (shape[0], shape[1]), f"{seed}{parameter}", numbers)
        return part

    return read


def freeze_names(recipe: Recipe, name: str, wrapper: Wrapper, names: Names) -> None:
    """Set which parameters of a module require gradients."""
    is_trainable = trainable_names(recipe, name)
    for key, param in wrapper.named_parameters():
        trains = {is_trainable(name) for name in names.users(wrapper.hf_names[key])}
        assert len(trains) == 1, f"only a part of {key} is trainable"
        param.requires_grad_(trains.pop())


# -------------------------------------------------------------------------- checks


def fsdp_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield what modules with `engine: fsdp` cannot compute; the folder of `init_from` decides."""
    names = [
        name
        for name, grid in layout.grids.items()
        if grid.engine == "fsdp" and name not in layout.generators
    ]
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
        config = config_of_folder(folder)
        architecture = architecture_of_folder(folder, recipe.language.family)
    except InputError as error:
        yield recipe.problem(("init_from",), str(error))
        return
    if architecture.language == GENERAL:
        yield from _half_problems(recipe, layout, config)
        for name in names:
            yield from _adapter_problems(recipe, name, architecture)
        return
    for name in names:
        if name == LANGUAGE:
            for message in tp_problems(config, layout.language.tp):
                yield recipe.problem((LANGUAGE, "grid", "tp"), message)
            for message in model_problems(config):
                message = f"got fsdp, but {message}; give another model in init_from"
                yield recipe.problem((LANGUAGE, "engine"), message)
        else:
            yield from _tower_problems(recipe, name, architecture, layout.encoders[name].tp)
        yield from _adapter_problems(recipe, name, architecture)
    for key in differences(recipe, architecture, folder):
        if key.module in names and not key.is_of_images:
            yield recipe.problem(
                (*recipe.key_of(key.module), "model", key.key),
                f"got {key.value}, but engine: fsdp computes what {folder} says, {key.expected}; "
                f"remove the key, or set engine: megatron",
            )


def _half_problems(recipe: Recipe, layout: Layout, config: Any) -> Iterator[str]:
    """Yield why a vision-language model cannot train in two halves on a layout."""
    if not recipe.encoders:
        yield recipe.problem(
            ("encoders",), "got none, but family transformers trains with its tower; remove the key"
        )
        return
    if recipe.bridge.delivery != "replicated":
        yield recipe.problem(
            ("bridge", "delivery"),
            "got sharded, but family transformers places embeddings itself, so every rank of a "
            "lane needs all of them; set it to replicated",
        )
    for name, grid in layout.grids.items():
        key = recipe.key_of(name)
        if grid.engine != "fsdp":
            yield recipe.problem(
                (*key, "engine"),
                "got megatron, which cannot run family transformers; set it to fsdp",
            )
        if grid.sp:
            yield recipe.problem(
                (*key, "grid", "sp"),
                "got true, but family transformers has no sequence parallelism; set it to false",
            )
        if grid.tp > 1 and name != LANGUAGE:
            yield recipe.problem(
                (*key, "grid", "tp"),
                f"got {grid.tp}, but towers of family transformers cannot be split; raise dp, "
                f"which shards weights too",
            )
        part = recipe.module(name)
        if part.freeze == "tower":
            yield recipe.problem(
                (*key, "freeze"),
                "got tower, but family transformers does not know which part is the projector; "
                "give patterns of the frozen parameters' names",
            )
    try:
        cut = [*plan_problems(config, layout.language.tp)]
    except Exception as error:  # whatever a class's own code raises
        cut = [f"got {layout.language.tp}, but its plan fails with {error!r}; use dp alone"]
    for message in cut:
        yield recipe.problem((LANGUAGE, "grid", "tp"), message)
    if (verdict := verdict_of(config)).problem:
        yield recipe.problem(("init_from",), differs(config, verdict))
        return
    tower = next(iter(recipe.encoders), None)
    for name, encoder in recipe.encoders.items():
        if name != tower:
            yield recipe.problem(
                recipe.key_of(name),
                f"family transformers has one encoder, encoders.{tower}; name further media in "
                f"encoders.{tower}.other_media",
            )
        for modality in encoder.media_tokens:
            if modality not in verdict.outputs:
                is_main = modality == encoder.media
                yield recipe.problem(
                    (*recipe.key_of(name), *(("media",) if is_main else ("other_media", modality))),
                    f"got {modality}, but in two halves {type(config).__name__} takes only "
                    f"{', '.join(verdict.outputs)}; leave it out",
                )
    packs = {name: name == LANGUAGE and verdict.packing is not None for name in layout.grids}
    for name, is_packed in packs.items():
        if recipe.module(name).recompute == "selective" and not is_packed:
            yield recipe.problem(
                (*recipe.key_of(name), "recompute"),
                "got selective, but its attention is transformers' own; set it to full or none",
            )


def _adapter_problems(recipe: Recipe, name: str, architecture: Architecture) -> Iterator[str]:
    lora, weights = recipe.module(name).lora, architecture.weights_of(recipe).get(name, ())
    is_half = architecture.language == GENERAL
    linears = {weight.name for weight in weights if ".experts." not in weight.name}
    if lora and is_half:
        config = config_of_folder(Path(recipe.init_from or ""))
        modules = build_whole(config, torch.float32).named_modules()
        linears = {f"{path}.weight" for path, module in modules if type(module) is nn.Linear}
    for target in lora.targets if lora else ():
        single = LoRA(targets=(target,))
        adapted = [weight.name for weight in weights if single.adapts(weight.name)]
        others = [key for key in adapted if key not in linears]
        if not adapted or others:
            fault = f"{others[0]} is no linear's" if others else "no linear has such a name"
            yield recipe.problem(
                (*recipe.key_of(name), "lora"),
                f"got {target} among its targets, but in a {architecture.model_type} {fault}; "
                + ("give patterns such as '*.q_proj'" if is_half else "remove lora"),
            )


def _tower_problems(
    recipe: Recipe, name: str, architecture: Architecture, tp: int
) -> Iterator[str]:
    key, encoder = recipe.key_of(name), recipe.encoders[name]
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
