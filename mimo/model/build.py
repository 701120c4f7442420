"""Build this rank's model from the recipe: chunks, DDP, optimizers, bridge ends."""

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from bridge import (
    BridgeEnd,
    BridgeReceiver,
    BridgeSender,
    ColocatedBridge,
    ColocatedOutput,
    Kind,
    LevelReceiver,
    OutputReceiver,
    OutputSender,
    TransferWatch,
    WaitClock,
)
from mimo.checkpoint.hf.initial import HFCheckpoint, InitialWeights
from mimo.config.schema import Recipe
from mimo.device import has_gpu, local_device
from mimo.engines.draw import draw, normal
from mimo.engines.megatron import LanguageModel
from mimo.engines.megatron.config import LoRA, ModuleContext, ProcessGroupCollection
from mimo.engines.megatron.module import MegatronModule
from mimo.engines.megatron.parallel import build_optimizers, prepare_engine, wrap_data_parallel
from mimo.engines.megatron.weights import Cut, global_name, stored_name
from mimo.engines.optimizer import OptimizerSettings
from mimo.errors import RecipeError
from mimo.families.contracts import LanguageSettings, MegatronLanguageFamily
from mimo.families.keymap import Weight, is_adapter
from mimo.families.registry import (
    GENERAL,
    QUERIES,
    encoder_family,
    encoder_settings,
    language_family,
    language_settings,
    trainable_names,
)
from mimo.families.wire import DTYPES
from mimo.model.modules import MimoModel
from mimo.model.recipe_checks import check_device
from mimo.model.step_bridges import stage_ranks
from mimo.parallel.grids import LANGUAGE, encode_group, overlap_of, posted_ahead, run_ahead
from mimo.parallel.groups import Topology
from mimo.parallel.partition import PartitionAdapter
from mimo.spans import SPANS


def build_model(
    recipe: Recipe,
    topology: Topology,
    tokenizer_size: int,
    initial: InitialWeights | None = None,
    provided: Collection[str] = (),
    trains: bool = True,
) -> MimoModel:
    """Build the modules that this rank owns; every rank of the world calls it.

    initial: weights to start from. provided: parameters that the caller is about to fill, as
    ``<module>.<parameter>``; others are drawn. trains: whether to build optimizers. Raises
    RecipeError for a tokenizer with too many tokens, and for a feature that this rank's GPU lacks.
    """
    check_device(recipe)
    prepare_engine(recipe.train.seed)
    settings = language_settings(recipe)
    try:
        num_tokens = settings.num_tokens(tokenizer_size)
    except ValueError as error:
        raise RecipeError(recipe.problem(("data", "tokenizer"), str(error))) from error
    partition = None
    if topology.owns(LANGUAGE):
        groups = topology.modules[LANGUAGE]
        partition = PartitionAdapter(groups.cp, groups.tp, recipe.language.grid.sp)
    model = MimoModel(
        modules={},
        device=local_device(),
        hidden_size=settings.hidden_size,
        partition=partition,
        encode_group=encode_group(recipe),
        # On a GPU waiting does not block the host.
        watch=TransferWatch() if has_gpu() else None,
        passes_gradients=recipe.trains_before_language,
        query_media={n: g.output for n, g in recipe.generators.items() if g.num_queries},
        whole_rows=recipe.bridge.delivery == "replicated",
        takes_rows=recipe.language.family == GENERAL,
        item_rules=settings.item_rules,
        num_tokens=num_tokens,
        router_size=(settings.routers[0], settings.routers[1] + 4),
    )
    optimizer = _optimizer_settings(recipe) if trains else None
    for name in topology.modules:
        filled = {key.removeprefix(f"{name}.") for key in provided if key.startswith(f"{name}.")}
        build_module = _megatron_module
        if recipe.module(name).engine == "fsdp":
            from mimo.model.fsdp import fsdp_module  # late: transformers takes seconds to import

            build_module = fsdp_module
        module = build_module(
            recipe=recipe,
            topology=topology,
            name=name,
            optimizer=optimizer,
            num_tokens=num_tokens,
            initial=initial,
            filled=filled,
        )
        if name == LANGUAGE:
            module.run_ahead = topology.layout.ahead
        elif name in recipe.encoders and name not in topology.layout.colocated:
            module.run_ahead = run_ahead(recipe, topology.layout, name)
        model.modules[name] = module
    _add_bridges(model, recipe, topology)
    return model


def _megatron_module(
    recipe: Recipe,
    topology: Topology,
    name: str,
    optimizer: OptimizerSettings | None,
    num_tokens: int,
    initial: InitialWeights | None,
    filled: set[str],
) -> MegatronModule:
    part, groups, train = recipe.module(name), topology.modules[name], recipe.train
    settings, dtype = language_settings(recipe), DTYPES[train.precision]
    num_chunks = part.grid.vpp
    lora = None
    if part.lora is not None:
        lora = LoRA(part.lora.rank, part.lora.scale, frozenset(part.lora.targets))
    if initial is not None:
        filled = filled | {weight.name for weight in initial.weights.get(name, ())}
    chunks = []
    for number in range(num_chunks):
        ctx = ModuleContext(
            groups=groups,
            dtype=dtype,
            sequence_parallel=part.grid.sp,
            num_chunks=num_chunks,
            chunk=number if num_chunks > 1 else None,
            recompute=part.recompute,
            scatter_embedding=recipe.bridge.delivery == "sharded",
            lora=lora,
            provided=frozenset(filled),
            # Patches of encoders come in any number, which 8-bit kernels do not take.
            fp8=train.fp8 if name == LANGUAGE else "none",
        )
        if name == LANGUAGE:
            family = cast("MegatronLanguageFamily", language_family(recipe))
            chunk = family.build(settings, ctx, num_tokens, recipe.longest_microbatch, train.seed)
            if ctx.is_first_stage:
                _add_queries(recipe, chunk, settings)
        else:
            chunk = encoder_family(recipe, name).build(
                encoder_settings(recipe, name), ctx, settings.hidden_size, train.seed
            )
        chunk = chunk.to(local_device())
        if initial is not None and name in initial.weights:
            # Before the optimizer copies them.
            load_weights(chunk, ctx.chunk, groups, initial.checkpoint, initial.weights[name])
        chunks.append(chunk)
    is_trainable = trainable_names(recipe, name)
    for number, chunk in enumerate(chunks):
        at = groups.pp.rank(), number if num_chunks > 1 else None
        for parameter_name, param in chunk.named_parameters():
            whole_name = stored_name(global_name(parameter_name, chunk.config, *at), chunk)
            param.requires_grad_(is_trainable(whole_name))
    module = MegatronModule(name, groups, chunks, chunks, (), recipe.trains(name))
    trains = any(p.requires_grad for chunk in chunks for p in chunk.parameters())
    if optimizer is None or not trains:
        return module
    reduce, gather = overlap_of(train, has_gpu())
    wrapped = wrap_data_parallel(chunks, groups, reduce, train.distributed_optimizer, gather)
    # The schedules switch gradient synchronisation off for all but the last microbatch.
    switches = [chunk.no_sync for chunk in wrapped]
    for chunk in chunks:
        cast("Any", chunk).config.no_sync_func = switches if len(switches) > 1 else switches[0]
    rate = part.learning_rate or train.learning_rate
    module.optimizers = build_optimizers(wrapped, optimizer, rate, dtype, groups)
    module.chunks, module.ema_decay = list(wrapped), train.ema_decay
    return module


def _add_queries(recipe: Recipe, chunk: LanguageModel, settings: LanguageSettings) -> None:
    """Give the first chunk the query parameters of generators, drawn alike in every layout."""
    grid = recipe.language.grid
    for name, generator in recipe.generators.items():
        if generator.num_queries:
            size = generator.num_queries, settings.hidden_size
            matrix = torch.empty(size, dtype=DTYPES[recipe.train.precision])
            key = f"{recipe.train.seed}:{QUERIES}{name}"
            draw(matrix, 0, 0, size, key, normal(settings.init_std))
            query = nn.Parameter(matrix)
            # Each tensor-parallel rank then has the gradients of its tokens; Megatron adds them up.
            is_cut = grid.sp and recipe.bridge.delivery == "sharded"
            query.sequence_parallel = is_cut  # type: ignore[attr-defined]
            chunk.queries[name] = query


@torch.no_grad()
def load_weights(
    chunk: nn.Module,
    number: int | None,
    groups: ProcessGroupCollection,
    checkpoint: HFCheckpoint,
    weights: Iterable[Weight],
) -> None:
    """Fill this rank's chunk of a module, in place and in the dtype of its parameters.

    number: the chunk's; None without interleaving. Adapters keep their values. No collective.
    """
    by_name = {weight.name: weight for weight in weights}
    pairs: list[tuple[Weight, nn.Parameter]] = []
    for name, param in chunk.named_parameters():
        whole = stored_name(global_name(name, chunk.config, groups.pp.rank(), number), chunk)
        if is_adapter(whole) or whole.startswith(QUERIES):
            continue
        assert whole in by_name, f"the key map has no {whole}"
        pairs.append((by_name[whole], param))
    for weight, param in sorted(pairs, key=lambda pair: checkpoint.order(pair[0])):
        cut = Cut.of(param, groups)
        for row, column, values in cut.rectangles(param.data.view(-1)):
            columns = slice(column, column + values.shape[1]) if cut.dim == 1 else None
            position = 0
            for run in weight.rows(row, row + len(values)):
                rows = values[position : position + run.count]
                rows.copy_(checkpoint.matrix(run, columns).view_as(rows))
                position += run.count
            values[position:].zero_()  # padding


def _optimizer_settings(recipe: Recipe) -> OptimizerSettings:
    train = recipe.train
    rate = recipe.language.learning_rate or train.learning_rate
    return OptimizerSettings(
        name=train.optimizer,
        weight_decay=train.weight_decay,
        beta1=train.adam_beta1,
        beta2=train.adam_beta2,
        eps=train.adam_eps,
        distributed=train.distributed_optimizer,
        ema_decay=train.ema_decay,
        rate_factors={
            f"{QUERIES}{name}": generator.query_learning_rate / rate
            for name, generator in recipe.generators.items()
            if generator.query_learning_rate is not None
        },
    )


def _waiting(encoder: str, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
    direction = "forward" if kind == "rows" else "backward"
    return SPANS.wait("bridge_wait", f"{encoder}_{direction}", microbatch)


def _add_bridges(model: MimoModel, recipe: Recipe, topology: Topology) -> None:
    layout, dtype = topology.layout, DTYPES[recipe.train.precision]
    wire = dtype if recipe.bridge.wire_dtype == "auto" else DTYPES[recipe.bridge.wire_dtype]
    tp = topology.modules[LANGUAGE].tp if topology.owns(LANGUAGE) else None
    for link, groups in topology.bridges.items():
        name, is_output = link.module, link.module in layout.generators
        # Nothing to gather where each rank needs only its slice, or gets all rows anyway.
        is_replicated = recipe.bridge.delivery == "replicated" and not is_output
        needs_gather = tp and tp.size() > 1 and not (recipe.language.grid.sp or is_replicated)
        whole_lane = tp if needs_gather else None
        shares, lane, grid = None, 0, layout.item_grids[name]
        is_disjoint, has_replicas = name not in layout.colocated, grid.tp > 1 and not grid.sp
        # On one host it is faster to send to every replica than to let them exchange shares.
        is_direct = has_replicas and is_disjoint and not is_output
        is_direct = is_direct and topology.ranks_on_host == layout.world_size
        lanes = stage_ranks(grid, grid.pp - 1)[:, 0].tolist() if is_direct else []
        if topology.owns(name):
            shares = topology.modules[name].tp if has_replicas and not is_direct else None
            lane = grid.coords(topology.rank).dp
        is_alone = topology.owns(name) and is_disjoint
        trains = recipe.trains_before_generators if is_output else recipe.module(name).trains
        end = BridgeEnd(
            name=link.name,
            rank=topology.rank,
            forward=groups.forward,
            backward=groups.backward,
            hidden_size=model.hidden_size * len(link.levels),
            dtype=dtype,
            wire_dtype=wire,
            device=model.device,
            trainable=trains,
            gather=shares if is_alone else whole_lane,
            timeout_seconds=recipe.bridge.timeout_seconds,
            watch=model.watch,
            clock=WaitClock(around=partial(_waiting, name)),
            to_language=not is_output,
            replicas=lanes,
        )
        if is_output and is_alone:
            model.outputs.receivers[link] = OutputReceiver(end, lane)
        elif is_output and not is_disjoint:
            model.outputs.colocated[link] = ColocatedOutput(end, lane)
        elif is_output:
            model.outputs.senders[link] = OutputSender(end, layout.ahead)
        elif is_alone:
            model.senders[link] = BridgeSender(end, lane, model.modules[name].run_ahead)
        elif topology.owns(name):
            receives = topology.modules[LANGUAGE].pp.rank() == link.stage
            model.colocated[link] = ColocatedBridge(end, lane, receives, shares)
        else:
            ahead = (run_ahead(recipe, layout, name), posted_ahead(recipe, layout, name))
            model.receivers[link] = LevelReceiver(BridgeReceiver(end, *ahead), link.chunks)
