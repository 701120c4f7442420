"""What a rank keeps in memory, by the role that it has: an encoder's rank, or a stage's.

Weights, gradients and optimizer state are counted exactly: what each rank of the role holds of
every parameter, by the family's list of weights and the way the engine cuts them. A distributed
optimizer's state is the mean over the ranks that share it, as are all parts under FSDP2, which adds
the weights that stay gathered.

Activations and buffers are estimates from above, of full microbatches whose tokens are all rows of
items. Between forward and backward a token of a layer keeps the inputs of both norms and of all
linears, and the outputs of the first linears; attention keeps no scores. With ``recompute: full``
it keeps the layer's input alone, and one layer at a time all of this. Modules of transformers also
keep gathered inputs of their linears, copies in fp32 of what their norms get, rotated queries and
keys, and the activated half of the MLP. Source: Korthikanti et al. 2022, arXiv:2205.05198, section
4.

Buffers come and go: gradients of what a layer keeps, a weight's gradient, and FSDP2's messages.
The device's context, memory of libraries such as NCCL, and fragments come on top.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from data.modalities.processor import Part
from mimo.config.schema import Recipe, Train
from mimo.families.keymap import num_elements
from mimo.families.registry import (
    encoder_family,
    encoder_settings,
    language_family,
    language_settings,
)
from mimo.families.wire import DTYPES
from mimo.model.flops import trainable_names
from mimo.ops.cross_entropy import rows_at_once
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches, run_ahead

_CUT_BY_ROWS = (
    *("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias"),
    *("word_embeddings.weight", "output_layer.weight"),
)
CUT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
"""Endings of the weights of which each tensor-parallel rank has the columns of its inputs."""

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


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
    buffers: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers


def memory_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Of every encoder, then of the language model: its first, middle and last stage."""
    found = []
    for one in parameters_by_role(recipe, layout):
        module = _Module(recipe, layout, one.module)
        stage = module.grid.coords(one.ranks[0]).pp
        kept = replace(one, activations=module.activations(stage), buffers=module.buffers())
        if one.module == LANGUAGE and one.ranks.stop == module.grid.ranks.stop:
            kept = replace(kept, logits=module.logits())
        found.append(kept)
    return found


def parameters_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Like `memory_by_role`, but without activations, logits and buffers."""
    found: list[RoleMemory] = []
    for name, grid in layout.grids.items():
        module = _Module(recipe, layout, name)
        if grid.engine == "fsdp":
            found.append(module.of_lanes())
            continue
        stages = sorted({0, min(1, grid.pp - 1), grid.pp - 1})
        found += (module.of_stages(range(*own)) for own in pairwise([*stages, grid.pp]))
    return found


def gradient_bytes(train: Train) -> int:
    """Of a parameter that learns."""
    return max(4, DTYPES[train.precision].itemsize)


def optimizer_bytes(train: Train, replicas: int) -> float:
    """Of a parameter that learns. replicas: ranks that share its state if they can, dp · cp."""
    state = 2 * gradient_bytes(train) * (train.optimizer == "adam")
    state += 4 * (train.precision == "bf16") + gradient_bytes(train) * _has_average(train)
    return state / (replicas if train.distributed_optimizer else 1)


def inputs_per_row(recipe: Recipe, encoder: str) -> float:
    """How many inputs of a tower, such as patches, become one row: of an item of noise."""
    settings = encoder_settings(recipe, encoder)
    media = settings.processor(recipe.encoders[encoder].media)
    file = media.random_file(np.random.default_rng(0))
    plan = media.plan(Part(media.size_of(media.decode(file))))
    return math.prod(plan.grid) / plan.num_rows


def _has_average(train: Train) -> bool:
    return train.ema_decay is not None


class _Module:
    """A module as memory sees it.

    layers: of a stage. size: bytes of a number that is computed with; wide: of a gradient.
    shapes: of the parameters by name, of which those of layers are there once.
    held, learnt: elements of them on a tensor-parallel rank, all and those that learn: of the
    "first" stage, of a "layer", of the "last" stage.
    """

    def __init__(self, recipe: Recipe, layout: Layout, name: str) -> None:
        self.recipe, self.layout, self.name = recipe, layout, name
        self.grid, self.part, self.train = layout.grids[name], recipe.module(name), recipe.train
        self.size, self.wide = DTYPES[self.train.precision].itemsize, gradient_bytes(self.train)
        language = language_settings(recipe)
        self.vocabulary, self.hidden = language.padded_vocab_size(1), language.hidden_size
        last: tuple[str, ...] = (_OUTPUT,)
        if name == LANGUAGE:
            self.layers = language.num_layers // self.grid.pp
            known = language.vocab_size if self.grid.engine == "fsdp" else self.vocabulary
            one = language.model_copy(update={"vocab_size": known, "num_layers": 1})
            weights = language_family(recipe).weights_in_hf(one)
        else:
            family, settings = encoder_family(recipe, name), encoder_settings(recipe, name)
            self.layers, last = settings.num_layers // self.grid.pp, family.PROJECTOR
            one = settings.model_copy(update={"num_layers": 1})
            weights = family.weights_in_hf(one, self.hidden)
        self.shapes = {
            weight.name: (weight.num_rows, num_elements([weight]) // weight.num_rows)
            for weight in weights
        }
        self.held, self.learnt = Counter[str](), Counter[str]()
        learns, lora, tp = trainable_names(recipe, name), self.part.lora, self.grid.tp
        adapted = tuple(f".linear_{target}.weight" for target in lora.targets) if lora else ()
        for weight, (rows, columns) in self.shapes.items():
            is_last = weight.startswith(last) or "final_layernorm" in weight
            where = "layer" if ".layers." in weight else "last" if is_last else "first"
            cut = tp if weight.endswith(_CUT_BY_ROWS + CUT_BY_COLUMNS) else 1
            self._count(where, rows * columns // cut, learns(weight))
            if weight == _EMBEDDING and _OUTPUT not in self.shapes and self.grid.pp > 1:
                self._count("last", rows * columns // cut, learns(weight))  # the head's copy
            if lora is not None and where == "layer" and weight.endswith(adapted):
                by_columns = weight.endswith(CUT_BY_COLUMNS)
                sizes = (rows, columns // tp) if by_columns else (rows // tp, columns)
                self._count(where, lora.rank * sum(sizes), self.part.trains)

    def _count(self, where: str, elements: int, learns: bool) -> None:
        self.held[where] += elements
        self.learnt[where] += elements * learns

    def of_stages(self, stages: range) -> RoleMemory:
        """What each rank of these stages keeps of the parameters."""
        grid, train = self.grid, self.train
        first, last = stages[0] == 0, stages[-1] == grid.pp - 1
        count = {"first": int(first), "layer": self.layers, "last": int(last)}
        held = sum(count[where] * elements for where, elements in self.held.items())
        learnt = sum(count[where] * elements for where, elements in self.learnt.items())
        title = self.name
        if grid.pp > 1:
            title += ", " + ("first" if first else "last" if last else "middle") + " stage"
        return RoleMemory(
            role=title,
            module=self.name,
            ranks=range(grid.rank(pp=stages[0]), grid.rank(pp=stages[-1]) + grid.size // grid.pp),
            weights=held * self.size,
            gradients=learnt * self.wide,
            optimizer=learnt * optimizer_bytes(train, grid.dp * grid.cp),
        )

    def of_lanes(self) -> RoleMemory:
        """What each rank under FSDP2 keeps: a share of weights that are at least fp32.

        For computing it gathers what is outside of layers, but for an embedding of its own, and a
        layer, or everything if it frees nothing after its forward. Unless every backward reduces
        gradients, one that others follow in the same step leaves all layers gathered and whole
        gradients: see `mimo.engines.fsdp.sharding.reduce_gradients`.
        """
        grid, layers, shares = self.grid, self.layers, self._shares
        inside, outside = self.held["layer"], self.held["first"] + self.held["last"]
        learnt = self._all(self.learnt)
        state = 2 * (self.train.optimizer == "adam") + _has_average(self.train)
        gathered = outside + (layers if self._keeps_layers else 1) * inside
        if self.part.reshard_after_forward:
            gathered -= self._embedding
        is_gathered = shares > 1 or self.size < self.wide
        return RoleMemory(
            role=self.name,
            module=self.name,
            ranks=grid.ranks,
            weights=(outside + layers * inside) * self.wide / shares
            + (gathered * self.size if is_gathered else 0),
            gradients=learnt * self.wide / (1 if self._keeps_gradients else shares),
            optimizer=learnt * self.wide * state / shares,
        )

    @property
    def _shares(self) -> int:
        """Into how many FSDP2 cuts each parameter."""
        return self.grid.dp // self.grid.dp_replicate

    def _all(self, elements: Counter[str]) -> int:
        """Size of the whole module on one tensor-parallel rank."""
        return elements["first"] + self.layers * elements["layer"] + elements["last"]

    @property
    def _embedding(self) -> int:
        """Elements of an embedding that FSDP2 gathers on its own: one that is not the head, too."""
        return self.held["first"] if self.name == LANGUAGE and _OUTPUT in self.shapes else 0

    @property
    def _keeps_gradients(self) -> bool:
        """Whether FSDP2 leaves gradients whole between the microbatches of a step."""
        reduces = self.part.reduce_gradients == "microbatch"
        return not reduces and self._num_backwards() > 1 and self._all(self.learnt) > 0

    @property
    def _keeps_layers(self) -> bool:
        return self._keeps_gradients or not self.part.reshard_after_forward

    def buffers(self) -> float:
        """Bytes that come and go, at most.

        The most at one of these moments: the backward of a layer; under FSDP2 also the forward of
        an end, and its backward, when activations that are computed again are not there.
        """
        width, kept = self._widths()
        inside = self._tokens * self.size * kept
        of_layer = 0.0 if self._is_frozen else inside  # as gradients
        if self.grid.engine == "fsdp":
            forward, layer, end = self._messages()
            absent = inside if self.part.recompute == "full" else 0
            return max(of_layer + layer, max(forward, end) - absent)
        if self.grid.sp:  # the gathered input of a linear, and its gradient
            of_layer += 2 * self._tokens * self.size * width * self.grid.tp
        largest = max(rows * columns for rows, columns in self.shapes.values()) // self.grid.tp
        return of_layer + largest * self.size * (self._all(self.learnt) > 0)

    def _messages(self) -> tuple[float, float, float]:
        """Bytes of FSDP2's messages in a forward, and in the backward of a layer and of an end.

        The next unit is gathered, where nothing stays gathered, and is there twice, as it came and
        as it is used. Gradients are reduced while those of the next unit are computed, in the
        dtype of the computation; the message is in fp32, and so is the share that comes of it.
        """
        layer, embedding = self.held["layer"], self._embedding
        outside = self.held["first"] + self.held["last"] - embedding
        following = 0 if self._keeps_layers else layer
        arrived = self._shares > 1  # without other lanes nothing comes as a message
        gathered = (following + 2 * layer * arrived) * self.size
        ends = (self.learnt["first"], self.learnt["last"])
        end = max(ends) if embedding else sum(ends)
        per_element = 2 * self.size + self.wide + 2 * self.wide / self._shares
        forward = (embedding + max(embedding, outside) * arrived + layer * arrived) * self.size
        in_layer = gathered + self.learnt["layer"] * per_element
        return max(forward, gathered), in_layer, gathered + end * per_element

    def _num_backwards(self) -> int:
        """Backward passes of a step, whose gradients are reduced together."""
        count = num_microbatches(self.recipe, self.layout)
        if self.name not in self.layout.colocated:
            return count
        group = self.recipe.encoders[self.name].encode_group
        return 1 if group == "all" else -(-count // group)

    def logits(self) -> float:
        """Bytes of logits at the peak, on a rank of the last stage, if all tokens have a loss.

        A block of them, in at least fp32, and in 16 bits once more in the dtype of the model.
        """
        tokens, columns = self.recipe.longest_microbatch / self.grid.cp, self.vocabulary
        block = tokens * min(columns / self.grid.tp, rows_at_once(int(tokens)))
        return block * (self.wide + (self.size if self.size < self.wide else 0))

    def activations(self, stage: int) -> float:
        """Bytes that a rank of a stage keeps at most."""
        size, (width, kept) = self._tokens * self.size, self._widths()
        # A forward pass of what is frozen keeps nothing for backward, and one layer at a time.
        if self._is_frozen:
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
        lanes = self.layout.language.dp / self.grid.dp
        return tokens * lanes * inputs_per_row(self.recipe, self.name)

    @property
    def _is_frozen(self) -> bool:
        """Whether an encoder runs no backward."""
        freeze = self.part.freeze
        is_frozen = freeze is True or (freeze == "tower" and not self.part.lora)
        return self.name != LANGUAGE and is_frozen

    def _widths(self) -> tuple[float, float]:
        """Elements of a token on a rank: between layers, and kept in a layer for backward."""
        part = self.grid.tp if self.grid.sp else 1
        in_layer = {name: shape for name, shape in self.shapes.items() if ".layers." in name}
        linears = {n.split(".")[-2]: one for n, one in in_layer.items() if n.endswith(".weight")}
        is_fsdp, in_fp32 = self.grid.engine == "fsdp", self.wide // self.size
        # Of transformers' norms: what they get, a copy in fp32 of it, and that normalized.
        norm = 2 + in_fp32 if is_fsdp else 1
        if "linear_qkv" not in linears:  # named as in transformers
            width = self.hidden / part
            outputs = sum(rows for rows, columns in in_layer.values() if columns > 1)
            return width, 2 * norm * width + 2 * self.hidden + norm * outputs / self.grid.tp
        qkv, proj, fc1, fc2 = (linears[f"linear_{one}"] for one in ("qkv", "proj", "fc1", "fc2"))
        width = qkv[1] / part
        # The inputs of two norms, and of the linears that follow them.
        inside = (qkv[0] + proj[1] + fc1[0] + fc2[1]) / self.grid.tp
        if not is_fsdp:
            return width, 4 * width + inside
        # Queries and keys have norms as well, and are rotated; the gate is activated first.
        inside += (norm * qkv[0] + fc2[1]) / self.grid.tp
        return width, 2 * norm * width + 2 * qkv[1] + inside

    def _in_flight(self, stage: int) -> float:
        """Microbatches between forward and backward on a stage, at most."""
        grid = self.grid
        if self.name in self.layout.colocated:
            group = self.recipe.encoders[self.name].encode_group
            return math.inf if group == "all" else group
        if self.name != LANGUAGE:
            return run_ahead(self.recipe, self.layout, self.name) + grid.pp - stage
        if grid.vpp == 1:
            return grid.pp - stage
        # Forward passes of chunks before the first backward; see Megatron's interleaved schedule.
        return (2 * (grid.pp - 1 - stage) + (grid.vpp - 1) * grid.pp + 1) / grid.vpp
