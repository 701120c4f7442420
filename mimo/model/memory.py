"""Estimates of the memory that a rank needs, by its role.

Weights, gradients and optimizer state are counted exactly; what is sharded over ranks counts as the
mean over these ranks.

Activations and buffers are upper estimates, for full microbatches whose tokens all stand for items.
Between forward and backward a layer keeps, of each token, the inputs of both norms and of all
linears, and the outputs of the first linears; attention keeps no scores. With ``recompute: full``
it keeps the layer's input alone, and one layer at a time all of this. Modules of transformers also
keep gathered inputs of their linears, fp32 copies of norm inputs, rotated queries and keys, and
the activated half of the MLP. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.

Buffers are temporary: gradients of what a layer keeps, a weight's gradient, and FSDP2's messages.
The device's context, memory of libraries such as NCCL, and fragmentation come on top.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from data.modalities.processor import Part
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
from mimo.ops.cross_entropy import rows_at_once
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches, run_ahead

_CUT_BY_ROWS = (
    *("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias"),
    *("word_embeddings.weight", "output_layer.weight", "conv_weight", "a_log", "dt_bias"),
)
CUT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
"""Endings of the weights that tensor parallelism cuts by columns, the inputs of a linear."""

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that each rank of a role needs. role: the module, and its stage if it has several."""

    role: str
    module: str
    ranks: range
    weights: float
    gradients: float
    optimizer: float
    activations: float = 0
    logits: float = 0
    buffers: float = 0

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers


def memory_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Return the memory of every encoder, then of the language model's different stages."""
    roles = []
    for role in parameters_by_role(recipe, layout):
        module = _Module(recipe, layout, role.module)
        stage = module.grid.coords(role.ranks[0]).pp
        has_logits = role.module == LANGUAGE and role.ranks.stop == module.grid.ranks.stop
        roles.append(
            replace(
                role,
                activations=module.activations(stage),
                buffers=module.buffers(),
                logits=module.logits() if has_logits else 0,
            )
        )
    return roles


def parameters_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Like `memory_by_role`, but without activations, logits and buffers."""
    roles: list[RoleMemory] = []
    for name, grid in layout.grids.items():
        module = _Module(recipe, layout, name)
        if grid.engine == "fsdp":
            roles.append(module.sharded_parameters())
            continue
        starts = sorted({0, min(1, grid.pp - 1), grid.pp - 1})
        roles += (module.stage_parameters(range(*ends)) for ends in pairwise([*starts, grid.pp]))
    return roles


def inputs_per_embedding(recipe: Recipe, encoder: str) -> float:
    """Return the inputs of a tower, such as patches, per embedding of an item of noise."""
    settings = encoder_settings(recipe, encoder)
    modality = settings.processor(recipe.encoders[encoder].media)
    file = modality.random_file(np.random.default_rng(0))
    plan = modality.plan(Part(modality.size_of(modality.decode(file))))
    return settings.num_inputs(plan.grid) / plan.num_rows


_IN_LAYER = re.compile(r"(^|\.)(layers|transformer_blocks|\w+_refiner)\.").search


class _Module:
    """Sizes of a module that its memory depends on.

    layers: of a stage. size: bytes of a number in computations; wide: of a gradient.
    shapes: of the parameters by name, for one period of layers; models of transformers list all.
    held, trained: elements on a tensor-parallel rank, of all and of trainable parameters: of the
    "first" stage, of a "layer" and its "experts", of the "last" stage. autoencoder: its bytes.
    listed: layers in ``shapes``. is_one_unit: whether FSDP2 gathers all layers at once.
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
        last: tuple[str, ...] = (_OUTPUT,) if name == LANGUAGE else ()
        if name in recipe.encoders:
            last = encoder_family(recipe, name).PROJECTOR
        elif name in recipe.generators:
            settings = generator_settings(recipe, name)
            self.hidden, self.autoencoder = settings.hidden_size, settings.autoencoder_bytes
        known = language.vocab_size if self.grid.engine == "fsdp" else self.vocabulary
        self.shapes = {
            weight.name: (weight.num_rows, num_elements([weight]) // weight.num_rows)
            for weight in weights_of(recipe, name, known, num_layers=period)
        }
        self.held, self.trained = defaultdict[str, float](float), defaultdict[str, float](float)
        is_trainable, lora, tp = trainable_names(recipe, name), self.part.lora, self.grid.tp
        # Models of transformers list all layers, because these may differ; their mean counts.
        is_general = self.part.family == GENERAL
        self.listed = self.layers if is_general else period
        self.is_one_unit = is_general and name != LANGUAGE
        for weight, (rows, columns) in self.shapes.items():
            is_last = weight.startswith(last) or "final_layernorm" in weight
            place = "layer" if _IN_LAYER(weight) else "last" if is_last else "first"
            if self.is_one_unit:
                place = "first"
            cut = tp if weight.endswith(_CUT_BY_ROWS + CUT_BY_COLUMNS) else 1
            if _EXPERTS in weight and self.grid.engine == "megatron":
                place, cut = "experts", self.grid.ep * self.grid.etp
            self._count(place, rows * columns // cut, is_trainable(weight))
            if weight == _EMBEDDING and _OUTPUT not in self.shapes and self.grid.pp > 1:
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
        trained, shares = self._all(self.trained), self._shares
        state = 2 * (self.train.optimizer == "adam") + (self.train.ema_decay is not None)
        gathered = outside + (self.layers if self._keeps_layers else 1) * inside
        if self.part.reshard_after_forward:
            gathered -= self._embedding
        return RoleMemory(
            role=self.name,
            module=self.name,
            ranks=self.grid.ranks,
            weights=self._all(self.held) * self.wide / shares
            + (gathered * self.size if shares > 1 or self.size < self.wide else 0)
            + self.autoencoder,
            gradients=trained * self.wide / (1 if self._keeps_gradients else shares),
            optimizer=trained * self.wide * state / shares,
        )

    @property
    def _shares(self) -> int:
        """Parts into which FSDP2 cuts each parameter."""
        return self.grid.dp // self.grid.dp_replicate

    def _all(self, elements: Mapping[str, float]) -> float:
        in_layers = elements["layer"] + elements["experts"]
        return elements["first"] + self.layers * in_layers + elements["last"]

    @property
    def _embedding(self) -> float:
        """Elements of an embedding that FSDP2 gathers separately, because it is not the head."""
        return self.held["first"] if self.name == LANGUAGE and _OUTPUT in self.shapes else 0

    @property
    def _keeps_gradients(self) -> bool:
        """Whether FSDP2 leaves gradients whole between the microbatches of a step."""
        reduces = self.part.reduce_gradients == "microbatch"
        return not reduces and self._num_backwards() > 1 and self._all(self.trained) > 0

    @property
    def _keeps_layers(self) -> bool:
        return self._keeps_gradients or not self.part.reshard_after_forward

    def buffers(self) -> float:
        """Return the bytes of temporary buffers at the peak.

        That is the backward of a layer or, under FSDP2, also the forward or backward of what is
        outside of layers, while recomputed activations do not exist.
        """
        width, kept = self._widths()
        inside = self._tokens * self.size * kept
        layer_gradients = 0.0 if self._is_frozen else inside
        if self.grid.engine == "fsdp":
            forward, layer, end = self._messages()
            absent = inside if self.part.recompute == "full" else 0
            return max(layer_gradients + layer, max(forward, end) - absent)
        if self.grid.sp:  # the gathered input of a linear, and its gradient
            layer_gradients += 2 * self._tokens * self.size * width * self.grid.tp
        dense = max(math.prod(size) for name, size in self.shapes.items() if _EXPERTS not in name)
        largest = max(dense // self.grid.tp, self.held["experts"] * 2 // 3)
        return layer_gradients + largest * self.size * (self._all(self.trained) > 0)

    def _messages(self) -> tuple[float, float, float]:
        """Bytes of FSDP2's messages: in a forward, in the backward of a layer and of an end.

        The next unit is gathered, where nothing stays gathered, and exists twice, as received and
        as used. Gradients are reduced while those of the next unit are computed, in the dtype of
        the computation; the message is in fp32, and so is the share that results.
        """
        layer, embedding = self.held["layer"], self._embedding
        outside = self.held["first"] + self.held["last"] - embedding
        following = 0 if self._keeps_layers else layer
        received = self._shares > 1  # without other lanes there are no messages
        gathered = (following + 2 * layer * received) * self.size
        ends = (self.trained["first"], self.trained["last"])
        end = max(ends) if embedding else sum(ends)
        per_element = 2 * self.size + self.wide + 2 * self.wide / self._shares
        forward = (embedding + max(embedding, outside) * received + layer * received) * self.size
        in_layer = gathered + self.trained["layer"] * per_element
        return max(forward, gathered), in_layer, gathered + end * per_element

    def _num_backwards(self) -> int:
        """Backward passes of a step, whose gradients are reduced together."""
        count = num_microbatches(self.recipe, self.layout)
        if self.name not in self.layout.colocated & self.layout.encoders.keys():
            return count
        group = self.recipe.encoders[self.name].encode_group
        return 1 if group == "all" else -(-count // group)

    def logits(self) -> float:
        """Return the bytes of logits at the peak, on the last stage, if all tokens have a loss.

        A block of them, in at least fp32, and in 16 bits once more in the dtype of the model.
        """
        tokens, columns = self.recipe.longest_microbatch / self.grid.cp, self.vocabulary
        block = tokens * min(columns / self.grid.tp, rows_at_once(int(tokens)))
        return block * (self.wide + (self.size if self.size < self.wide else 0))

    def activations(self, stage: int) -> float:
        size, (width, kept) = self._tokens * self.size, self._widths()
        if self._is_frozen:  # nothing is kept for a backward
            return size * kept
        waiting = min(self._in_flight(stage), num_microbatches(self.recipe, self.layout))
        if self.part.recompute == "full":
            return size * (waiting * self.layers * width + kept)
        return size * waiting * self.layers * kept

    @property
    def _tokens(self) -> float:
        """Tokens of a full microbatch on a context-parallel rank; for a tower, its inputs."""
        tokens = self.recipe.longest_microbatch / self.grid.cp
        if self.name == LANGUAGE:
            return tokens
        if self.name in self.layout.generators:
            return self._tokens_of_generator()
        lanes = self.layout.language.dp / self.grid.dp
        return tokens * lanes * inputs_per_embedding(self.recipe, self.name)

    def _tokens_of_generator(self) -> float:
        """Tokens and condition rows of a lane, with one of the largest items for each sample."""
        settings, data = generator_settings(self.recipe, self.name), self.recipe.data
        samples = max(1.0, self.recipe.longest_microbatch / data.sequence_length)
        rows = self.recipe.generators[self.name].num_queries or data.sequence_length
        of_item = settings.max_pixels / settings.token_pixels**2 + rows
        return samples * of_item * max(1.0, self.layout.language.dp / self.grid.dp)

    @property
    def _is_frozen(self) -> bool:
        """Whether an encoder runs no backward."""
        is_frozen = self.part.freeze is True or (self.part.freeze == "tower" and not self.part.lora)
        return self.name in self.layout.encoders and is_frozen

    def _widths(self) -> tuple[float, float]:
        """Elements of a token on a rank: between layers, and kept in a layer for backward."""
        part = self.grid.tp if self.grid.sp else 1
        layer = {n: s for n, s in self.shapes.items() if _IN_LAYER(n) or self.is_one_unit}
        linears = {n.split(".")[-2]: shape for n, shape in layer.items() if n.endswith(".weight")}
        is_fsdp, in_fp32 = self.grid.engine == "fsdp", self.wide // self.size
        # Norms of transformers keep their input, its fp32 copy, and the normalized copy.
        norm = 2 + in_fp32 if is_fsdp else 1
        if "linear_qkv" not in linears:  # named as in transformers
            width = self.hidden / part
            outputs = sum(rows for rows, columns in layer.values() if columns > 1) / self.listed
            return width, 2 * norm * width + 2 * self.hidden + norm * outputs / self.grid.tp
        fc1, fc2 = (linears[f"linear_{name}"] for name in ("fc1", "fc2"))
        qkv, proj = (self._mean(f"self_attention.linear_{name}.weight") for name in ("qkv", "proj"))
        width = qkv[1] / part
        # The inputs of two norms, and of the linears that follow them.
        inside = (qkv[0] + proj[1] + fc1[0] + fc2[1]) / self.grid.tp
        if chosen := self.routers[2] * (self.name == LANGUAGE):
            # Per chosen expert: input, output, both halves of FC1, the activated half and their
            # product. The shared expert keeps all but its input.
            each, shared = (self._mean(f"{n}.linear_fc2.weight")[1] for n in ("experts", "_expert"))
            inside = (qkv[0] + proj[1] + 4 * shared) / self.grid.tp + width * (shared > 0)
            inside += chosen * (2 * qkv[1] * self.grid.etp + 4 * each) / self.grid.tp
        if not is_fsdp:
            # Linear attention: around its convolution, and about 6 values in its gated norm.
            inside += 6 * self._mean("conv_weight")[0] / self.grid.tp
            return width, 4 * width + inside
        # Queries and keys have norms as well, and are rotated; the gate is activated first.
        inside += (norm * qkv[0] + fc2[1]) / self.grid.tp
        return width, 2 * norm * width + 2 * qkv[1] + inside

    def _mean(self, ending: str) -> tuple[float, ...]:
        """Rows and columns of the parameters of this ending in a layer: the mean over layers."""
        shapes = [shape for name, shape in self.shapes.items() if name.endswith(ending)]
        return tuple(sum(sizes) / self.listed for sizes in zip((0, 0), *shapes, strict=True))

    def _in_flight(self, stage: int) -> float:
        """Largest number of microbatches between forward and backward on a stage."""
        grid = self.grid
        if self.name in self.layout.generators:
            return 1
        if self.name in self.layout.colocated:
            group = self.recipe.encoders[self.name].encode_group
            return math.inf if group == "all" else group
        if self.name != LANGUAGE:
            return run_ahead(self.recipe, self.layout, self.name) + grid.pp - stage
        if grid.vpp == 1:
            return grid.pp - stage + self.layout.ahead
        # Forward passes of chunks before the first backward; see Megatron's interleaved schedule.
        return (2 * (grid.pp - 1 - stage) + (grid.vpp - 1) * grid.pp + 1) / grid.vpp
