"""Builds this rank's model from the recipe: config, chunks, DDP, optimizer, bridge ends."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from bridge import BridgeEnd, BridgeReceiver, BridgeSender
from mimo.device import local_device
from mimo.families import encoder_family, encoder_settings, language_family, language_settings
from mimo.layout import LANGUAGE, run_ahead
from mimo.megatron.config import ModuleContext
from mimo.megatron.groups import ProcessGroupCollection
from mimo.megatron.parallel import (
    OptimizerSettings,
    build_optimizer,
    prepare_engine,
    wrap_data_parallel,
)
from mimo.model import MimoModel, Module
from mimo.recipe import Encoder, Language, Recipe
from mimo.topology import Topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(recipe: Recipe, topology: Topology, num_tokens: int) -> MimoModel:
    """The modules that this rank owns, with freshly drawn weights and optimizers.

    num_tokens: size of the tokenizer. Every rank of the world calls it.
    """
    prepare_engine(recipe.train.seed)
    dtype = DTYPES[recipe.train.precision]
    settings = language_settings(recipe)
    model = MimoModel(modules={}, device=local_device())
    for name, groups in topology.modules.items():
        part = recipe.language if name == LANGUAGE else recipe.encoders[name]
        ctx = ModuleContext(
            groups=groups,
            dtype=dtype,
            sequence_parallel=part.grid.sp,
            recompute=part.recompute,
        )
        if name == LANGUAGE:
            chunk = language_family(recipe).build(
                settings,
                ctx,
                settings.padded_vocab_size(num_tokens),
                recipe.data.sequence_length * recipe.train.micro_batch_size,
                recipe.train.seed,
            )
        else:
            chunk = encoder_family(recipe, name).build(
                encoder_settings(recipe, name), ctx, settings.hidden_size, recipe.train.seed
            )
        chunk.to(model.device)
        model.modules[name] = _module(recipe, name, part, groups, chunk, dtype)
    _add_bridges(model, recipe, topology, settings.hidden_size, dtype)
    return model


def _module(
    recipe: Recipe,
    name: str,
    part: Language | Encoder,
    groups: ProcessGroupCollection,
    chunk: nn.Module,
    dtype: torch.dtype,
) -> Module:
    train = recipe.train
    learning_rate = part.learning_rate or train.learning_rate
    if part.freeze:
        chunk.requires_grad_(False)
        return Module(name, groups, [chunk], [chunk], None, learning_rate)
    wrapped = wrap_data_parallel([chunk], groups, train.overlap_grad_reduce)
    # The schedules switch gradient synchronisation off for all but the last microbatch.
    cast("Any", chunk).config.no_sync_func = wrapped[0].no_sync
    optimizer = build_optimizer(
        wrapped,
        OptimizerSettings(
            name=train.optimizer,
            weight_decay=train.weight_decay,
            beta1=train.adam_beta1,
            beta2=train.adam_beta2,
            eps=train.adam_eps,
        ),
        learning_rate,
        dtype,
        groups,
    )
    return Module(name, groups, [chunk], list(wrapped), optimizer, learning_rate)


def _add_bridges(
    model: MimoModel, recipe: Recipe, topology: Topology, hidden_size: int, dtype: torch.dtype
) -> None:
    wire = dtype if recipe.bridge.wire_dtype == "auto" else DTYPES[recipe.bridge.wire_dtype]
    for name, groups in topology.bridges.items():

        def end(gather, name=name, groups=groups) -> BridgeEnd:
            return BridgeEnd(
                name=name,
                rank=topology.rank,
                forward=groups.forward,
                backward=groups.backward,
                hidden_size=hidden_size,
                dtype=dtype,
                wire_dtype=wire,
                device=model.device,
                trainable=not recipe.encoders[name].freeze,
                gather=gather,
            )

        if topology.owns(name):
            own = topology.modules[name]
            shares = own.tp if own.tp.size() > 1 else None
            lane = topology.layout.encoders[name].coords(topology.rank).dp
            ahead = run_ahead(recipe, topology.layout, name)
            model.senders[name] = BridgeSender(end(shares), lane, ahead)
        if topology.owns(LANGUAGE):
            own = topology.modules[LANGUAGE]
            # With sequence parallelism each rank needs just its slice: nothing to gather.
            gathers = own.tp.size() > 1 and not recipe.language.grid.sp
            model.receivers[name] = BridgeReceiver(end(own.tp if gathers else None))
