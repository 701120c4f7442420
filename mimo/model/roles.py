"""What a rank keeps in memory, by the role that it has: an encoder's rank, or a stage's.

Weights, gradients and optimizer state are counted exactly: what each rank of the role holds of
every parameter, by the family's list of weights and the way the engine cuts them. A distributed
optimizer's state is the mean over the ranks that share it, as are all parts under FSDP2, which adds
the weights that are gathered at a time.

Activations are an estimate from above, of full microbatches whose tokens are all rows of items.
Between forward and backward a token of a layer keeps the inputs of both norms and of all linears,
and the outputs of the first linears; attention keeps no scores. With ``recompute: full`` it keeps
the layer's input alone, and one layer at a time all of this. Modules of transformers keep more than
that where they recompute nothing: their linears keep gathered inputs, their norms copies in fp32.
Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4. Buffers of kernels and communication
come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from data.media.processor import Part
from mimo.engines.megatron.layers.cross_entropy import rows_at_once
from mimo.families.dtypes import DTYPES
from mimo.families.keymap import Weight, num_elements
from mimo.families.registry import (
    encoder_family,
    encoder_settings,
    language_family,
    language_settings,
)
from mimo.layout.grids import LANGUAGE, GridSpec, Layout, num_microbatches, run_ahead
from mimo.model.flops import learning_names
from mimo.recipe.schema import Recipe, Train

_CUT_BY_ROWS = (
    *("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias"),
    *("word_embeddings.weight", "output_layer.weight"),
)
CUT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
"""Endings of the weights of which each tensor-parallel rank has the columns of its inputs."""

_LINEARS = {
    "qkv": "self_attention.linear_qkv.weight",
    "proj": "self_attention.linear_proj.weight",
    "fc1": "mlp.linear_fc1.weight",
    "fc2": "mlp.linear_fc2.weight",
}
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
Where = Literal["first", "layer", "last"]


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that a rank of a role needs for its module.

    role: the module, with its stage if it has several. ranks: those that have it.
    """

    role: str
    module: str
    ranks: range
    weights: float
    gradients: float
    optimizer: float
    activations: float = 0
    logits: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.logits)
        return sum(parts)


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a module: where it is, and the elements that a tensor-parallel rank holds."""

    where: Where
    elements: int
    learns: bool


@dataclass(frozen=True)
class _Stack:
    """A module's layers as memory sees them, per token and tensor-parallel rank.

    width: elements of a token between layers. kept: what a layer keeps for backward.
    """

    width: float
    kept: float


def memory_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Of every encoder, then of the language model: its first, middle and last stage."""
    return [
        replace(
            one,
            activations=_activations(recipe, layout, one),
            logits=_logits(recipe, layout.language, one),
        )
        for one in parameters_by_role(recipe, layout)
    ]


def parameters_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Like `memory_by_role`, but without activations and logits."""
    found: list[RoleMemory] = []
    for name, grid in layout.grids.items():
        parameters = list(_parameters(recipe, name, grid))
        if grid.engine == "fsdp":
            found.append(_of_lanes(recipe, grid, parameters, _num_backwards(recipe, layout, name)))
            continue
        stages = sorted({0, min(1, grid.pp - 1), grid.pp - 1})
        for first, end in pairwise([*stages, grid.pp]):
            found.append(_of_stages(recipe, grid, range(first, end), parameters))
    return found


def logits_bytes(recipe: Recipe, tokens: float, columns: float) -> float:
    """What the head needs at its peak for ``tokens``, all with a loss.

    columns: of the vocabulary, on a rank. A block of logits, in at least fp32, and in 16 bits once
    more in the dtype of the model.
    """
    size = DTYPES[recipe.train.precision].itemsize
    wide = max(4, size)
    block = tokens * min(columns, rows_at_once(int(tokens)))
    return block * (wide + (size if size < wide else 0))


def gradient_bytes(train: Train) -> int:
    """Of a parameter that learns."""
    return max(4, DTYPES[train.precision].itemsize)


def optimizer_bytes(train: Train, replicas: int) -> float:
    """Of a parameter that learns. replicas: ranks that share its state if they can, dp · cp."""
    state = 2 * gradient_bytes(train) * (train.optimizer == "adam")
    state += 4 * (train.precision == "bf16") + gradient_bytes(train) * _has_average(train)
    return state / (replicas if train.distributed_optimizer else 1)


def _has_average(train: Train) -> bool:
    return train.ema_decay is not None


def _weights(recipe: Recipe, name: str) -> tuple[list[Weight], tuple[str, ...]]:
    """A module's weights with a single layer, and how the names of its projector begin."""
    language = language_settings(recipe)
    if name == LANGUAGE:
        padded = language.padded_vocab_size(1)
        known = language.vocab_size if recipe.language.engine == "fsdp" else padded
        sizes = {"vocab_size": known, "num_layers": 1}
        family = language_family(recipe)
        return family.weights_in_hf(language.model_copy(update=sizes)), ()
    family = encoder_family(recipe, name)
    settings = encoder_settings(recipe, name).model_copy(update={"num_layers": 1})
    return family.weights_in_hf(settings, language.hidden_size), family.PROJECTOR


def _shape(weight: Weight) -> tuple[int, int]:
    rows = weight.num_rows
    return rows, num_elements([weight]) // rows


def _cut(name: str, grid: GridSpec) -> int:
    """Into how many parts a parameter is cut over tensor parallelism."""
    return grid.tp if name.endswith(_CUT_BY_ROWS + CUT_BY_COLUMNS) else 1


def _parameters(recipe: Recipe, module: str, grid: GridSpec) -> Iterator[_Parameter]:
    """Those of one layer and all others."""
    part, learns = recipe.module(module), learning_names(recipe, module)
    weights, projector = _weights(recipe, module)
    tied = not any(weight.name == _OUTPUT for weight in weights)
    adapted = [_LINEARS[target] for target in part.lora.targets] if part.lora else []
    for weight in weights:
        name, (rows, columns) = weight.name, _shape(weight)
        in_layer = ".layers." in name
        last = name.startswith(projector) if projector else False
        last |= "final_layernorm" in name or name == _OUTPUT
        where: Where = "layer" if in_layer else "last" if last else "first"
        elements = rows * columns // _cut(name, grid)
        yield _Parameter(where, elements, learns(name))
        if module == LANGUAGE and name == _EMBEDDING and tied and grid.pp > 1:
            yield _Parameter("last", elements, learns(name))  # the output head's copy
        if in_layer and part.lora is not None and name.endswith(tuple(adapted)):
            inputs, outputs = columns, rows
            if name.endswith(CUT_BY_COLUMNS):
                inputs //= grid.tp
            else:
                outputs //= grid.tp
            yield _Parameter(where, part.lora.rank * (inputs + outputs), part.trains)


def _of_stages(
    recipe: Recipe, grid: GridSpec, stages: range, parameters: list[_Parameter]
) -> RoleMemory:
    """What each rank of ``stages`` keeps of the module's parameters."""
    train, module = recipe.train, grid.module
    first, last = stages[0] == 0, stages[-1] == grid.pp - 1
    count = {"first": int(first), "layer": _num_layers(recipe, grid), "last": int(last)}
    held = sum(count[one.where] * one.elements for one in parameters)
    learnt = sum(count[one.where] * one.elements for one in parameters if one.learns)
    title = module
    if grid.pp > 1:
        title += ", " + ("first" if first else "last" if last else "middle") + " stage"
    return RoleMemory(
        role=title,
        module=module,
        ranks=range(grid.rank(pp=stages[0]), grid.rank(pp=stages[-1]) + grid.size // grid.pp),
        weights=held * DTYPES[train.precision].itemsize,
        gradients=learnt * gradient_bytes(train),
        optimizer=learnt * optimizer_bytes(train, grid.dp * grid.cp),
    )


def _num_backwards(recipe: Recipe, layout: Layout, module: str) -> int:
    """Backward passes of a step, whose gradients are reduced together."""
    count = num_microbatches(recipe, layout)
    if module not in layout.colocated:
        return count
    group = recipe.encoders[module].encode_group
    return 1 if group == "all" else -(-count // group)


def _of_lanes(
    recipe: Recipe, grid: GridSpec, parameters: list[_Parameter], num_backwards: int
) -> RoleMemory:
    """What each rank of a module under FSDP2 keeps: a share of weights that are at least fp32.

    For computing it gathers the embedding, norms and head, and a layer, or all layers if it frees
    none after its forward. A backward that others follow in the same step leaves all weights
    gathered and whole gradients: see `mimo.engines.fsdp.sharding.reduce_gradients`.
    """
    train, layers = recipe.train, _num_layers(recipe, grid)
    size, wide = DTYPES[train.precision].itemsize, gradient_bytes(train)
    shares = grid.dp // grid.dp_replicate
    inside = sum(one.elements for one in parameters if one.where == "layer")
    outside = sum(one.elements for one in parameters if one.where != "layer")
    learnt = sum(
        one.elements * (layers if one.where == "layer" else 1) for one in parameters if one.learns
    )
    keeps = num_backwards > 1 and learnt > 0
    whole = layers if keeps or not recipe.module(grid.module).reshard_after_forward else 1
    gathered = (outside + whole * inside) * size if shares > 1 or size < wide else 0
    return RoleMemory(
        role=grid.module,
        module=grid.module,
        ranks=grid.ranks,
        weights=(outside + layers * inside) * wide / shares + gathered,
        gradients=learnt * wide / (1 if keeps else shares),
        optimizer=learnt * wide * (2 * (train.optimizer == "adam") + _has_average(train)) / shares,
    )


def _num_layers(recipe: Recipe, grid: GridSpec) -> int:
    """Of a stage."""
    name = grid.module
    settings = language_settings(recipe) if name == LANGUAGE else encoder_settings(recipe, name)
    return settings.num_layers // grid.pp


def _logits(recipe: Recipe, language: GridSpec, role: RoleMemory) -> float:
    """Bytes; only the language model's last stage has any."""
    if role.module != LANGUAGE or role.ranks.stop != language.ranks.stop:
        return 0
    columns = language_settings(recipe).padded_vocab_size(1) / language.tp
    return logits_bytes(recipe, recipe.longest_microbatch / language.cp, columns)


def _stack(recipe: Recipe, grid: GridSpec) -> _Stack:
    weights, _ = _weights(recipe, grid.module)
    shapes = {weight.name: _shape(weight) for weight in weights if ".layers." in weight.name}
    if not any(name.endswith(_LINEARS["qkv"]) for name in shapes):  # named as in transformers
        hidden = language_settings(recipe).hidden_size / (grid.tp if grid.sp else 1)
        outputs = sum(rows for rows, columns in shapes.values() if columns > 1)
        return _Stack(hidden, 2 * hidden + outputs / grid.tp)
    linear = {
        key: next(shape for name, shape in shapes.items() if name.endswith(ending))
        for key, ending in _LINEARS.items()
    }
    hidden = linear["qkv"][1] / (grid.tp if grid.sp else 1)
    inside = linear["qkv"][0] + linear["proj"][1] + linear["fc1"][0] + linear["fc2"][1]
    # The inputs of two norms, and of the linears that follow them.
    return _Stack(hidden, 4 * hidden + inside / grid.tp)


def _activations(recipe: Recipe, layout: Layout, role: RoleMemory) -> float:
    """Bytes that a rank of a role keeps at most."""
    module = role.module
    grid, part = layout.grids[module], recipe.module(module)
    stack, layers = _stack(recipe, grid), _num_layers(recipe, grid)
    tokens = float(recipe.longest_microbatch)
    if module != LANGUAGE:
        tokens *= layout.language.dp / grid.dp * _inputs_per_row(recipe, module)
    size = tokens / grid.cp * DTYPES[recipe.train.precision].itemsize
    # A forward pass of what is frozen keeps nothing for backward, and one layer at a time.
    if module != LANGUAGE and (part.freeze is True or (part.freeze == "tower" and not part.lora)):
        return size * stack.kept
    stage = grid.coords(role.ranks[0]).pp
    waiting = min(_in_flight(recipe, layout, module, stage), num_microbatches(recipe, layout))
    if part.recompute == "full":
        return size * (waiting * layers * stack.width + stack.kept)
    return size * waiting * layers * stack.kept


def _in_flight(recipe: Recipe, layout: Layout, module: str, stage: int) -> float:
    """Microbatches between forward and backward on a stage, at most."""
    grid = layout.grids[module]
    if module != LANGUAGE:
        if module not in layout.colocated:
            return run_ahead(recipe, layout, module) + grid.pp - stage
        group = recipe.encoders[module].encode_group
        return math.inf if group == "all" else group
    if grid.vpp == 1:
        return grid.pp - stage
    # Forward passes of chunks before the first backward; see Megatron's interleaved schedule.
    return (2 * (grid.pp - 1 - stage) + (grid.vpp - 1) * grid.pp + 1) / grid.vpp


def _inputs_per_row(recipe: Recipe, encoder: str) -> float:
    """How many inputs of the tower, such as patches, become one row: of an item of noise."""
    part = recipe.encoders[encoder]
    media = encoder_settings(recipe, encoder).processor(part.media)
    file = media.random_file(np.random.default_rng(0))
    plan = media.plan(Part(media.size_of(media.decode(file))))
    return math.prod(plan.grid) / plan.num_rows
