"""Estimates of what a rank keeps between forward and backward, and of its temporary tensors.

All are for full microbatches whose tokens all stand for items and have a loss. Of each token a
layer keeps the inputs of norms and linears and the outputs of the first linears, attention its
rotated queries and keys, their cosines and sines, and no scores; frozen linears keep no input.
With ``recompute: full`` a layer keeps its input alone. Source: Korthikanti et al. 2022,
arXiv:2205.05198, section 4. The kernels are those of Transformer Engine or flash-attn.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.modalities.processor import Part, PartPlan
from mimo.config.schema import Recipe
from mimo.families.registry import encoder_settings, generator_settings, module_settings
from mimo.model.module_sizes import IN_LAYER, OUTPUT, ModuleSizes
from mimo.ops.cross_entropy import rows_at_once
from mimo.parallel.grids import LANGUAGE, Layout, encode_group, num_microbatches, run_ahead

_TOKEN_BYTES = 48
"""Of a token's id, three positions, label and place among loss tokens."""
_PLACE_BYTES = 64
"""Of a patch's place and the learned positions around it, about."""


def item_plan(recipe: Recipe, encoder: str) -> PartPlan:
    """Return the plan of an item of noise, of which full microbatches consist here."""
    modality = encoder_settings(recipe, encoder).processor(recipe.encoders[encoder].media)
    file = modality.random_file(np.random.default_rng(0))
    return modality.plan(Part(modality.size_of(modality.decode(file))))


def microbatches_at_once(recipe: Recipe, layout: Layout, module: str) -> int:
    """Return the microbatches of one forward: of a colocated encoder, those of a group."""
    if module not in layout.colocated & layout.encoders.keys():
        return 1
    count = num_microbatches(recipe, layout)
    return min(encode_group(recipe) or count, count)


def items_at_once(recipe: Recipe, layout: Layout, encoder: str) -> int:
    """Return the items of one forward of an encoder's lane."""
    rows = recipe.longest_microbatch * microbatches_at_once(recipe, layout, encoder)
    lanes = layout.language.dp / layout.grids[encoder].dp
    return math.ceil(rows * lanes / item_plan(recipe, encoder).num_rows)


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


@dataclass(frozen=True)
class Estimate:
    """Bytes beside weights, gradients and optimizer; see `mimo.model.module_sizes.RoleMemory`."""

    inputs: float
    activations: float
    logits: float
    buffers: float


class Activations:
    """The estimate for one module.

    tokens: of one forward on a context-parallel rank; for a tower, its inputs.
    """

    def __init__(self, module: ModuleSizes) -> None:
        self.module, self.recipe, self.layout = module, module.recipe, module.layout
        self.name, self.grid, self.size, self.wide = (
            *(module.name, module.grid),
            *(module.size, module.wide),
        )
        self.parts = self.grid.tp if self.grid.sp else 1
        self.recomputes = module.part.recompute == "full"
        self.settings = module_settings(self.recipe, self.name)

    def of_stage(self, stage: int) -> Estimate:
        """Return the estimate for a rank of this pipeline stage."""
        waiting = microbatches_in_flight(self.recipe, self.layout, self.name, stage)
        is_last = stage == self.grid.pp - 1
        unit, layers = self.tokens * self.size, self.module.layers
        in_layer = unit * self._kept_in_layer()
        before = unit * self._kept_before_layers() if stage == 0 else 0.0
        after = unit * self._kept_after_layers() if is_last else 0.0
        passes = 0.0  # nothing is kept for a backward
        temporary = in_layer
        if self._has_backward:
            passes = unit * layers * self._width if self.recomputes else layers * in_layer
            temporary = self._backward_of_layer() + (in_layer if self.recomputes else 0)
        head = self._logits() if is_last and self.name == LANGUAGE else 0.0
        # A layer's backward comes when that of what follows the layers is over.
        buffers = max(temporary - head - after, 0)
        if is_last and self.name != LANGUAGE:
            buffers = max(buffers, self._backward_of_projector())
        if self.name in self.layout.colocated:  # rows and their gradients stay
            buffers += 2 * self._rows / self.parts * self._output_width * self.size
        return Estimate(self.inputs(), waiting * (before + passes + after), head, buffers)

    @cached_property
    def tokens(self) -> float:
        if self.name == LANGUAGE:
            return self.recipe.longest_microbatch / self.grid.cp
        if self.name in self.layout.generators:
            return self._tokens_of_generator()
        settings, grid = encoder_settings(self.recipe, self.name), self._plan.grid
        # Layers of a sound's tower see fewer tokens than there are frames.
        tokens = settings.counts(np.array([grid])).get("token", settings.num_inputs(grid))
        return items_at_once(self.recipe, self.layout, self.name) * tokens

    @cached_property
    def _plan(self) -> PartPlan:
        return item_plan(self.recipe, self.name)

    def _tokens_of_generator(self) -> float:
        """Tokens and condition rows of a lane, with one of the largest items for each sample."""
        settings, data = generator_settings(self.recipe, self.name), self.recipe.data
        samples = max(1.0, self.recipe.longest_microbatch / data.sequence_length)
        rows = self.recipe.generators[self.name].num_queries or data.sequence_length
        of_item = settings.max_pixels / settings.token_pixels**2 + rows
        return samples * of_item * max(1.0, self.layout.language.dp / self.grid.dp)

    def inputs(self) -> float:
        """Bytes of the inputs of this step and the next, which is copied meanwhile."""
        steps = num_microbatches(self.recipe, self.layout)
        steps /= microbatches_at_once(self.recipe, self.layout, self.name)
        if self.name in self.layout.generators:
            return 0.0
        if self.name == LANGUAGE:
            return 2 * steps * self.tokens * (_TOKEN_BYTES + 8 * self._keys_of_items)
        form = encoder_settings(self.recipe, self.name).processor(
            self.recipe.encoders[self.name].media
        )
        patches = items_at_once(self.recipe, self.layout, self.name) * self._plan.num_patches
        return 2 * steps * patches * (form.wire.width * form.wire.dtype.itemsize + _PLACE_BYTES)

    @property
    def is_frozen(self) -> bool:
        """Whether an encoder's layers run no backward."""
        part = self.module.part
        frozen = part.freeze is True or (part.freeze == "tower" and not part.lora)
        return self.name in self.layout.encoders and frozen

    @property
    def _has_backward(self) -> bool:
        trains = self.recipe.module(self.name).trains
        return not self.is_frozen and (trains or self.recipe.trains_before_language)

    # -------------------------------------------------------------------- megatron
    # Numbers of `size` bytes for each token, if no unit is named.

    @property
    def _width(self) -> float:
        """Between layers."""
        return self.settings.hidden_size / self.parts

    def _kept_in_layer(self) -> float:
        module, tp, width = self.module, self.grid.tp, self._width
        trains = self._trains_layers
        norms = module.num_norms(self.settings.hidden_size)
        # Norms keep their inputs. Those after attention and MLP have outputs of linears.
        kept = width * (norms + 2 * trains) + self._kept_by_attention() / tp
        kept += self._rotation_width * 2 * module.share_of_attention
        if self.chosen:
            return kept + self._kept_by_experts() - width * trains
        # Attention keeps its output anyway, but MLPs keep products only for a linear that trains.
        _, fc1, fc2 = self._linears
        return kept + (fc1[0] + fc2[1] * trains) / tp

    @property
    def _trains_layers(self) -> bool:
        return self.module.trained["layer"] + self.module.trained["experts"] > 0

    @cached_property
    def _linears(self) -> tuple[tuple[float, ...], ...]:
        """Rows and columns of proj, fc1 and fc2, the mean over layers."""
        names = ("self_attention.linear_proj", ".mlp.linear_fc1", ".mlp.linear_fc2")
        return tuple(self.module.mean(f"{name}.weight") for name in names)

    @property
    def chosen(self) -> int:
        """Experts of a token."""
        return self.module.routers[2] if self.name == LANGUAGE else 0

    @cached_property
    def _heads(self) -> tuple[int, int, int]:
        """Channels of a token's queries and keys, and the number of key heads."""
        settings = self.settings
        count = settings.num_attention_heads
        groups = getattr(settings, "num_query_groups", count)
        size = getattr(settings, "head_size", settings.hidden_size // count)
        return count * size, groups * size, groups

    def _kept_by_attention(self) -> float:
        """On all tensor-parallel ranks together."""
        module, cp = self.module, self.grid.cp
        queries, keys, groups = self._heads
        recomputed = module.part.recompute == "selective"
        # The linear's output, and that of attention, the next linear's input.
        kept = queries + 2 * keys + queries * (self._trains_layers or not recomputed)
        if self._rotation_width:
            kept += queries + keys
        if module.has("q_layernorm.weight") and groups > self.grid.tp:
            kept += queries  # a copy, because those of several groups are not adjacent
        if module.has("conv_weight"):
            kept += 3 * queries  # their gates, before and after the sigmoid, and the product
        if recomputed:
            pass
        elif self._keys_of_items:  # gathered; and outputs are put into order
            kept += queries - keys + 2 * keys * self._keys_of_items
        elif cp > 1:  # gathered, once for each of two chunks
            kept += 2 * keys * (cp + 0.5) - keys
        # Linear attention: around its convolution, in the kernel, and in its gated norm.
        share, channels = module.share_of_attention, module.mean("conv_weight")[0]
        values = self._linears[0][1] - share * queries
        return share * kept + 3 * channels + (6.5 + 4 / self.size) * values

    @cached_property
    def _keys_of_items(self) -> float:
        """Keys that items whose tokens see each other gather, for each token; 0 without such."""
        rules = getattr(self.settings, "item_rules", None)
        if rules is None or not rules.bidirectional or not self.recipe.encoders:
            return 0.0
        rows = item_plan(self.recipe, next(iter(self.recipe.encoders))).num_rows
        ends = np.arange(rows, self.recipe.data.sequence_length + 1, rows)
        kinds = self.settings.layer_kinds()  # type: ignore[attr-defined]
        window = self.settings.sliding_window + rows - 1  # type: ignore[attr-defined]
        sliding = kinds.count("sliding") / len(kinds)
        return float(sliding * np.minimum(ends, window).mean() + (1 - sliding) * ends.mean()) / rows

    @property
    def _rotation_width(self) -> float:
        """Channels of a head that rotate."""
        settings = self.settings
        if hasattr(settings, "mrope_section"):
            return 2 * sum(settings.mrope_section)  # type: ignore[attr-defined]
        if not hasattr(settings, "rotary_base"):
            return 0
        head = settings.hidden_size // settings.num_attention_heads
        return getattr(settings, "head_size", head)

    def _kept_by_experts(self) -> float:
        """Of each choice: input, output, both halves of FC1, the activated half, their product."""
        module, tp, width, wide = self.module, self.grid.tp, self._width, 4 / self.size
        each, shared = (module.mean(f"{n}.linear_fc2.weight")[1] for n in ("experts", "_expert"))
        kept = self.chosen * (2 * self.settings.hidden_size * self.grid.etp + 4 * each)
        # The shared expert keeps all but its activated half; the router its input in fp32.
        kept = (kept + 3 * shared) / tp + width * (shared > 0) + width * wide
        return kept + 3 * wide * module.routers[1] / self.parts

    def _kept_before_layers(self) -> float:
        """On the first stage."""
        if self.name != LANGUAGE:
            return 0 if self.is_frozen else self._embedding_width / self.parts
        if not self.recipe.trains_before_language:
            return 0
        links = [link for name in self.layout.encoders for link in self.layout.links_of(name)]
        levels = sum(len(link.levels) for link in links if link.stage == 0)
        return self._width * (2 * levels - 1)  # rows, and levels side by side

    def _kept_after_layers(self) -> float:
        """On the last stage."""
        if self.name == LANGUAGE:
            return (self._width + self.settings.hidden_size) * self._has_backward
        levels = getattr(self.settings, "num_levels", 0) * self.is_frozen
        kept = self._width * (1 + levels) + self._kept_by_projector()
        return kept * self.module.part.trains

    @property
    def _embedding_width(self) -> float:
        """Numbers of a tower's input."""
        return sum(
            columns
            for name, (_, columns) in self.module.shapes.items()
            if not IN_LAYER(name) and name.startswith(("patch_embed.w", "conv"))
        )

    def _projector(self) -> list[tuple[str, int, int]]:
        """Name, rows and columns of the projector's linears."""
        sizes = self.module.shapes.items()
        last = self.module.last
        return [
            (n, *s) for n, s in sizes if n.startswith(last) and n.endswith("weight") and s[1] > 1
        ]

    @property
    def _output_width(self) -> int:
        """Numbers of a row with all of its levels."""
        return sum(rows for name, rows, _ in self._projector() if "fc1" not in name)

    def _kept_by_projector(self) -> float:
        tp, total = self.grid.tp, 0.0
        for name, rows, columns in self._projector():
            cut = (rows / tp, columns) if "fc1" in name else (rows, columns / tp)
            total += sum(cut)
        return total * self._rows / self.tokens / self.parts

    @property
    def _rows(self) -> float:
        return items_at_once(self.recipe, self.layout, self.name) * self._plan.num_rows

    def _backward_of_layer(self) -> float:
        """Bytes of temporary tensors: gradients, and a linear's gathered inputs under SP."""
        unit, tp, width, hidden = (
            self.tokens * self.size,
            self.grid.tp,
            self._width,
            self.settings.hidden_size,
        )
        trains = self.module.in_all(self.module.trained) > 0
        gathered = hidden if self.parts > 1 else 0
        weights = self.size * trains
        if self.chosen:
            each = self.module.mean("experts.linear_fc2.weight")[1]
            rows = self.chosen * (3 * hidden * self.grid.etp + 3 * each) / tp
            return unit * (width + rows + gathered) + self.module.held["experts"] * 2 / 3 * weights
        _, fc1, fc2 = self._linears
        levels = getattr(self.settings, "num_levels", 0) * width
        last = unit * (width + gathered + fc2[1] / tp) + fc2[0] * fc2[1] / tp * weights
        middle = unit * (width + fc1[0] / tp)
        first = unit * (width + hidden - fc2[1] / tp) + fc1[0] * fc1[1] / tp * weights
        return max(last, middle, first) + unit * (levels + gathered)

    def _backward_of_projector(self) -> float:
        """Bytes of temporary tensors at the end of a tower: gradients of rows and linears."""
        linears = self._projector()
        if not linears or not self.module.part.trains:
            return 0.0
        widest = max(max(rows, columns) for _, rows, columns in linears)
        output = self._output_width
        weight = max(rows * columns for _, rows, columns in linears) / self.grid.tp
        return self.size * (self._rows / self.parts * (output + 2 * widest) + weight)

    def _logits(self) -> float:
        """Bytes of temporary tensors of the head's backward.

        A block of logits in at least fp32, in 16 bits once more in the dtype of the model; the
        gradient of hidden states in at least fp32, and a block's part of it; that of the weight.
        Under SP also the buffer that layers gather their inputs in.
        """
        if not self._has_backward:
            return self.block_of_logits
        hidden = self.tokens * self.settings.hidden_size
        hidden *= self.wide + self.size * (2 if self.parts > 1 else 1)
        trains = self.module.trained["last" if OUTPUT in self.module.shapes else "first"] > 0
        weight = self.module.vocabulary / self.grid.tp * self.settings.hidden_size * self.size
        return self.block_of_logits + hidden + weight * trains

    @property
    def block_of_logits(self) -> float:
        columns = self.module.vocabulary / self.grid.tp
        block = self.tokens * min(columns, rows_at_once(int(self.tokens)))
        return block * (self.wide + (self.size if self.size < self.wide else 0))
