"""Sizes of a module on a rank: parameters, and the items and microbatches that it has at once.

Weights, gradients and optimizer state are counted exactly; what is sharded over ranks counts as the
mean over these ranks.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from data.modalities.processor import Part, PartPlan
from mimo.config.schema import Recipe
from mimo.families.keymap import num_elements
from mimo.families.registry import (
    GENERAL,
    encoder_family,
    encoder_settings,
    generator_settings,
    language_settings,
    module_settings,
    trainable_names,
    weights_of,
)
from mimo.families.wire import DTYPES
from mimo.parallel.grids import LANGUAGE, Layout, encode_group, num_microbatches, run_ahead

_CUT_BY_ROWS = (
    *("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias"),
    *("word_embeddings.weight", "output_layer.weight", "conv_weight", "a_log", "dt_bias"),
)
CUT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
"""Endings of the weights that tensor parallelism cuts by columns, the inputs of a linear."""

EMBEDDING = "embedding.word_embeddings.weight"
HEADS = ("output_layer.weight", "lm_head.weight")
"""Endings of the name of a head that is not the embedding; the second is transformers'."""
EXPERTS = ".mlp.experts."
_LARGE_IMAGE = 1024, 1024


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that each rank of a role needs. role: the module, and its stage if it has several."""

    role: str
    module: str
    ranks: range
    weights: float
    gradients: float
    optimizer: float
    inputs: float = 0
    activations: float = 0
    logits: float = 0
    buffers: float = 0

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.inputs + self.activations + self.logits + self.buffers


def microbatches_at_once(recipe: Recipe, layout: Layout, module: str) -> int:
    """Return the microbatches of one forward: of a colocated encoder, those of a group."""
    if module not in layout.colocated & layout.encoders.keys():
        return 1
    count = num_microbatches(recipe, layout)
    return min(encode_group(recipe) or count, count)


def item_plan(recipe: Recipe, encoder: str) -> PartPlan:
    """Return the plan of an item; here full microbatches consist of such items.

    It is one of noise, but a large image for family transformers: small ones take many calls.
    """
    part = recipe.encoders[encoder]
    modality = encoder_settings(recipe, encoder).processor(part.media)
    if part.family == GENERAL and part.media in ("image", "video"):
        return modality.plan(Part(_LARGE_IMAGE, frames=2 if part.media == "video" else 1))
    file = modality.random_file(np.random.default_rng(0))
    return modality.plan(Part(modality.size_of(modality.decode(file))))


def items_at_once(recipe: Recipe, layout: Layout, encoder: str) -> int:
    """Return the items of one forward of an encoder's lane."""
    of_lane = recipe.longest_microbatch // item_plan(recipe, encoder).num_rows
    of_lane *= microbatches_at_once(recipe, layout, encoder)
    return max(1, math.ceil(of_lane * layout.language.dp / layout.grids[encoder].dp))


def draw_size(recipe: Recipe, layout: Layout, name: str) -> tuple[int, tuple[int, int], int]:
    """Return a generator lane's items, one large square per sample, their grid, and each's rows."""
    settings, length = generator_settings(recipe, name), recipe.data.sequence_length
    samples = max(1.0, recipe.longest_microbatch / length)
    count = math.ceil(samples * max(1.0, layout.language.dp / layout.grids[name].dp))
    side = math.isqrt(settings.max_pixels) // settings.token_pixels
    rows = recipe.generators[name].num_queries or min(length, settings.most_rows)
    return count, (side, side), rows


def microbatches_in_flight(recipe: Recipe, layout: Layout, module: str, stage: int) -> float:
    """Return the most forwards of a stage whose backward has not begun."""
    grid, count = layout.grids[module], num_microbatches(recipe, layout)
    if module in layout.generators or module in layout.colocated:
        return 1
    if module != LANGUAGE:
        return min(count, run_ahead(recipe, layout, module) + grid.pp - stage)
    if grid.vpp == 1:
        return min(count, grid.pp - stage + layout.ahead)
    # Forward passes of chunks before the first backward; see Megatron's interleaved schedule.
    chunks = 2 * (grid.pp - 1 - stage) + (grid.vpp - 1) * grid.pp + 1
    return min(count, chunks / grid.vpp)


IN_LAYER = re.compile(r"(?:^|\.)(?:layers|transformer_blocks|\w+_refiner)\.(\d+)\.").search


class ModuleSizes:
    """Sizes of a module that its memory depends on.

    layers: of a stage. size: bytes of a number in computations; wide: of a gradient.
    shapes: of the parameters by name, for one period of layers; models of transformers list all.
    held, trained: elements on a tensor-parallel rank, of all and of trainable parameters: of the
    "first" stage, of a "layer" and its "experts", of the "last" stage. autoencoder: its bytes.
    last: beginnings of the names of head or projector. listed: layers in ``shapes``.
    """

    def __init__(self, recipe: Recipe, layout: Layout, name: str) -> None:
        self.recipe, self.layout, self.name = recipe, layout, name
        self.grid, self.part, self.train = layout.grids[name], recipe.module(name), recipe.train
        self.size = DTYPES[self.train.precision].itemsize
        self.wide = max(4, self.size)
        language = language_settings(recipe)
        self.vocabulary, self.hidden = language.padded_vocab_size(1), language.hidden_size
        settings = module_settings(recipe, name)
        self.layers, period = settings.num_layers // self.grid.pp, settings.layer_period
        self.autoencoder, self.routers = 0, language.routers
        self.last: tuple[str, ...] = ()
        if name in recipe.encoders:
            self.last = encoder_family(recipe, name).PROJECTOR
        elif name in recipe.generators:
            self.autoencoder = generator_settings(recipe, name).autoencoder_bytes
            period = self.layers  # refiner layers are listed once
        known = language.vocab_size if self.grid.engine == "fsdp" else self.vocabulary
        self.shapes = {
            weight.name: (weight.num_rows, num_elements([weight]) // weight.num_rows)
            for weight in weights_of(recipe, name, known, num_layers=period)
        }
        self.has_head = any(weight.endswith(HEADS) for weight in self.shapes)
        self.held, self.trained = defaultdict[str, float](float), defaultdict[str, float](float)
        is_trainable, lora, tp = trainable_names(recipe, name), self.part.lora, self.grid.tp
        # Models of transformers list all layers, because these may differ; their mean counts.
        self.is_general = self.part.family == GENERAL
        self.listed = self.layers if self.is_general else period
        self.is_one_unit = self.is_general and name != LANGUAGE
        for weight, (rows, columns) in self.shapes.items():
            is_last = weight.startswith(self.last) or weight.endswith(HEADS)
            is_last = is_last or "final_layernorm" in weight
            place = "layer" if IN_LAYER(weight) else "last" if is_last else "first"
            if self.is_one_unit:
                place = "first"
            cut = tp if weight.endswith(_CUT_BY_ROWS + CUT_BY_COLUMNS) else 1
            if EXPERTS in weight and self.grid.engine == "megatron":
                place, cut = "experts", self.grid.ep * self.grid.etp
            self._count(place, rows * columns // cut, is_trainable(weight))
            if weight == EMBEDDING and not self.has_head and self.grid.pp > 1:
                # The head's copy.
                self._count("last", rows * columns // cut, is_trainable(weight))
            adapts = place in ("layer", "experts") or self.is_one_unit
            if lora is not None and adapts and lora.adapts(weight):
                by_columns = weight.endswith(CUT_BY_COLUMNS)
                sizes = (rows, columns // tp) if by_columns else (rows // tp, columns)
                if place == "experts":
                    sizes = (rows // self.grid.ep, columns * self.routers[1] // self.grid.ep)
                self._count(place, lora.rank * sum(sizes), self.part.trains)
        for counter in (self.held, self.trained):
            for place in ("layer", "experts"):
                counter[place] /= self.listed

    def _count(self, place: str, elements: int, is_trainable: bool) -> None:
        self.held[place] += elements
        self.trained[place] += elements * is_trainable

    def stage_parameters(self, stages: range) -> RoleMemory:
        """Return what each rank of these stages keeps of the parameters under Megatron."""
        grid, train = self.grid, self.train
        state = 2 * self.wide * (train.optimizer == "adam") + 4 * (train.precision == "bf16")
        state += self.wide * (train.ema_decay is not None)
        first, last = stages[0] == 0, stages[-1] == grid.pp - 1
        count = {"first": int(first), "last": int(last)}
        count |= dict.fromkeys(("layer", "experts"), self.layers)
        shares = dict.fromkeys(count, grid.dp * grid.cp) | {"experts": grid.expert_copies}
        held = sum(count[place] * elements for place, elements in self.held.items())
        trained = {place: count[place] * elements for place, elements in self.trained.items()}
        if not train.distributed_optimizer:
            shares = dict.fromkeys(count, 1)
        title = self.name
        if grid.pp > 1:
            title += ", " + ("first" if first else "last" if last else "middle") + " stage"
        return RoleMemory(
            role=title,
            module=self.name,
            ranks=range(grid.rank(pp=stages[0]), grid.rank(pp=stages[-1]) + grid.size // grid.pp),
            weights=held * self.size,
            gradients=sum(trained.values()) * self.wide,
            optimizer=sum(trained[place] * state / shares[place] for place in trained),
        )

    def sharded_parameters(self) -> RoleMemory:
        """Return what each rank keeps under FSDP2: a share of weights in at least fp32.

        To compute, it gathers what is outside of layers, except for a separate embedding, and a
        layer, or everything if it frees nothing after its forward. Unless every backward reduces
        gradients, a backward that others follow in the same step leaves all layers gathered and
        gradients whole: see `mimo.engines.fsdp.sharding.reduce_gradients`.
        """
        inside, outside = self.held["layer"], self.held["first"] + self.held["last"]
        trained, shares = self.in_all(self.trained), self.shares
        state = 2 * (self.train.optimizer == "adam") + (self.train.ema_decay is not None)
        gathered = outside + (self.layers if self.keeps_layers else 1) * inside
        if self.part.reshard_after_forward:
            gathered -= self.embedding
        gathered *= 1 + self.is_one_unit  # a lone unit stays as received, too
        return RoleMemory(
            role=self.name,
            module=self.name,
            ranks=self.grid.ranks,
            weights=self.in_all(self.held) * self.wide / shares
            + (gathered * self.size if shares > 1 or self.size < self.wide else 0)
            + self.autoencoder,
            gradients=trained * self.wide / (1 if self.keeps_gradients else shares),
            optimizer=trained * self.wide * state / shares,
        )

    @property
    def shares(self) -> int:
        """Parts into which FSDP2 cuts each parameter."""
        return self.grid.dp // self.grid.dp_replicate

    def in_all(self, elements: Mapping[str, float]) -> float:
        in_layers = elements["layer"] + elements["experts"]
        return elements["first"] + self.layers * in_layers + elements["last"]

    @property
    def embedding(self) -> float:
        """Elements of an embedding that FSDP2 gathers separately, because it is not the head."""
        return self.held["first"] if self.name == LANGUAGE and self.has_head else 0

    @property
    def keeps_gradients(self) -> bool:
        """Whether FSDP2 leaves gradients whole between the microbatches of a step."""
        reduces = self.part.reduce_gradients == "microbatch"
        count = num_microbatches(self.recipe, self.layout)
        backwards = count / microbatches_at_once(self.recipe, self.layout, self.name)
        return not reduces and backwards > 1 and self.in_all(self.trained) > 0

    @property
    def keeps_layers(self) -> bool:
        return self.keeps_gradients or not self.part.reshard_after_forward

    def mean(self, ending: str) -> tuple[float, ...]:
        """Rows and columns of the parameters of this ending in a layer: the mean over layers."""
        shapes = [s for name, s in self.shapes.items() if name.endswith(ending) and IN_LAYER(name)]
        return tuple(sum(sizes) / self.listed for sizes in zip((0, 0), *shapes, strict=True))

    def num_norms(self, width: int) -> float:
        """Norms of a layer that are this wide: the mean over layers."""
        norms = (n for n, (rows, _) in self.shapes.items() if IN_LAYER(n) and rows == width)
        return sum(name.endswith("norm.weight") for name in norms) / self.listed

    @property
    def share_of_attention(self) -> float:
        """Share of layers that are not linear attention."""
        return 1 - sum(name.endswith("conv_weight") for name in self.shapes) / self.listed


def parameters_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Return the weights, gradients and optimizer state of each role."""
    roles: list[RoleMemory] = []
    for name, grid in layout.grids.items():
        module = ModuleSizes(recipe, layout, name)
        if grid.engine == "fsdp":
            roles.append(module.sharded_parameters())
            continue
        starts = sorted({0, min(1, grid.pp - 1), grid.pp - 1})
        roles += (module.stage_parameters(range(*ends)) for ends in pairwise([*starts, grid.pp]))
    return roles
