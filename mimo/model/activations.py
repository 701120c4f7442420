"""The estimate of what a rank keeps between forward and backward, and of temporary tensors.

It is for full microbatches whose tokens all stand for items and have a loss. Of each token a layer
keeps the inputs of norms and linears and the outputs of the first linears, attention its rotated
queries and keys, their cosines and sines, and no scores; frozen linears keep no input. With
``recompute: full`` a layer keeps its input alone. Source: Korthikanti et al. 2022,
arXiv:2205.05198, section 4. The kernels are those of Transformer Engine or flash-attn.
"""

import math
from functools import cached_property
from typing import Any

import numpy as np

from data.modalities.processor import PartPlan, WireForm
from mimo.families.registry import (
    encoder_settings,
    language_settings,
    module_settings,
)
from mimo.model.module_sizes import (
    ModuleSizes,
    draw_size,
    item_plan,
    items_at_once,
    microbatches_at_once,
    microbatches_in_flight,
)
from mimo.ops.cross_entropy import rows_at_once
from mimo.parallel.grids import LANGUAGE, num_microbatches

_TOKEN_BYTES = 48
"""Bytes of a token's id, three positions, label and place among loss tokens."""
_PLACE_BYTES = 64
"""About the bytes of a patch's place and of the learned positions around it."""


class Activations:
    """The estimate for a module of Megatron: numbers of ``size`` bytes for each token.

    expert, shared: inputs of the last linear of an expert, and of the shared one.
    """

    def __init__(self, module: ModuleSizes) -> None:
        self.module, self.recipe, self.layout = module, module.recipe, module.layout
        self.name, self.grid = module.name, module.grid
        self.num_layers: float = module.layers
        self.size, self.wide = module.size, module.wide
        self.parts = self.grid.tp if self.grid.sp else 1
        self.recomputes = module.part.recompute == "full"
        self.settings: Any = module_settings(self.recipe, self.name)
        self.chosen = module.routers[2] if self.name == LANGUAGE else 0  # experts of a token
        self.expert, self.shared = (
            module.mean(f"{name}.linear_fc2.weight")[1] for name in ("experts", "_expert")
        )
        self.trains_layers = module.trained["layer"] + module.trained["experts"] > 0

    def of_stage(self, stage: int) -> dict[str, float]:
        """Return the bytes of a pipeline stage's activations, logits and buffers."""
        waiting = microbatches_in_flight(self.recipe, self.layout, self.name, stage)
        is_last, is_language = stage == self.grid.pp - 1, self.name == LANGUAGE
        unit, layers = self.tokens * self.size, self.module.layers
        in_layer = unit * self._kept_in_layer()
        after = unit * self._kept_after_layers() if is_last else 0.0
        kept = after
        if stage == 0 and self._has_backward:
            # The rows of items, or a tower's input.
            rows = self._width * self.recipe.trains_before_language
            kept += unit * (rows if is_language else self._form.patch_dim / self.parts)
        temporary = in_layer  # without a backward, layers keep nothing
        if self._has_backward:
            kept += unit * layers * self._width if self.recomputes else layers * in_layer
            temporary = self._backward_of_layer() + (in_layer if self.recomputes else 0)
        head = self._logits() if is_last and is_language else 0.0
        # A layer's backward comes when that of what follows the layers is over.
        buffers = max(temporary - head - after, 0)
        if is_last and not is_language:
            width = self.module.hidden * (1 + getattr(self.settings, "num_levels", 0))
            ends = 2 * self._rows / self.parts * width * self.size  # rows and their gradients
            # They exist before the backward of layers begins; those of colocated encoders stay.
            stay = self.name in self.layout.colocated
            buffers = buffers + ends if stay else max(buffers, ends)
        return {"activations": waiting * kept, "logits": head, "buffers": buffers}

    @cached_property
    def tokens(self) -> float:
        """Tokens of one forward on a context-parallel rank; for a tower, its inputs."""
        if self.name == LANGUAGE:
            return self.recipe.longest_microbatch / self.grid.cp
        if self.name in self.layout.generators:
            count, grid, rows = draw_size(self.recipe, self.layout, self.name)
            return count * (math.prod(grid) + rows)
        settings, grid = encoder_settings(self.recipe, self.name), self._plan.grid
        # Layers of a sound's tower see fewer tokens than there are frames.
        tokens = settings.counts(np.array([grid])).get("token", settings.num_inputs(grid))
        if self.module.is_general:  # the processor's arrays are planned as numbers
            tokens = self._plan.num_patches / (3 * math.prod(self.settings.patch_shape))
        return items_at_once(self.recipe, self.layout, self.name) * tokens

    @cached_property
    def _plan(self) -> PartPlan:
        return item_plan(self.recipe, self.name)

    @cached_property
    def _form(self) -> WireForm:
        settings = encoder_settings(self.recipe, self.name)
        return settings.processor(self.recipe.encoders[self.name].media).wire

    @cached_property
    def _rows(self) -> float:
        return items_at_once(self.recipe, self.layout, self.name) * self._plan.num_rows

    def inputs(self) -> float:
        """Bytes of the inputs of this step and the next, which is copied meanwhile."""
        steps = num_microbatches(self.recipe, self.layout)
        steps /= microbatches_at_once(self.recipe, self.layout, self.name)
        if self.name in self.layout.generators:
            count, grid, rows = draw_size(self.recipe, self.layout, self.name)
            token = 3 * self.settings.token_pixels**2 + 4 * self.settings.in_channels
            return 2 * steps * count * (math.prod(grid) * token + 8 * rows)
        if self.name == LANGUAGE:
            return 2 * steps * self.tokens * _TOKEN_BYTES
        patches = items_at_once(self.recipe, self.layout, self.name) * self._plan.num_patches
        place = _PLACE_BYTES * (self._form.width > 1)
        return 2 * steps * patches * (self._form.width * self._form.dtype.itemsize + place)

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

    @property
    def _width(self) -> float:
        """Between layers."""
        return self.settings.hidden_size / self.parts

    def _kept_in_layer(self) -> float:
        module, tp, width, trains = self.module, self.grid.tp, self._width, self.trains_layers
        attention, rotated = self._kept_by_attention()
        # Norms keep their inputs. Those after attention and MLP have outputs of linears.
        kept = width * (module.num_norms(self.settings.hidden_size) + 2 * trains)
        kept += attention / tp + 2 * rotated
        if self.chosen:
            # Of each choice: input, output, both halves of FC1, the activated one, their product.
            of_choice = 2 * self.settings.hidden_size * self.grid.etp + 4 * self.expert
            # The shared expert keeps all but its activated half; the router its input in fp32.
            kept += (self.chosen * of_choice + 3 * self.shared) / tp
            kept += width * ((self.shared > 0) + 4 / self.size - trains)
            return kept + 12 / self.size * module.routers[1] / self.parts
        # Attention keeps its output anyway, but MLPs keep products only for a linear that trains.
        fc1, fc2 = (module.mean(f".mlp.linear_{name}.weight") for name in ("fc1", "fc2"))
        return kept + (fc1[0] + fc2[1] * trains) / tp

    def _kept_by_attention(self) -> tuple[float, float]:
        """On all tensor-parallel ranks together, and cosines, or sines, on each."""
        module, settings, cp = self.module, self.settings, self.grid.cp
        count = settings.num_attention_heads
        groups = getattr(settings, "num_query_groups", count)
        head = getattr(settings, "head_size", settings.hidden_size // count)
        queries, keys, rotated = count * head, groups * head, 0
        is_whole = module.part.recompute != "selective"
        # The linear's output, and that of attention, the next linear's input.
        kept = queries + 2 * keys + queries * (self.trains_layers or is_whole)
        if hasattr(settings, "rotary_base"):
            kept, rotated = kept + queries + keys, head
        if module.mean("q_layernorm.weight")[0] and groups > self.grid.tp:
            kept += queries  # a copy, because those of several groups are not adjacent
        kept += self._kept_for_items(queries, keys)
        channels = module.mean("conv_weight")[0]
        if channels:
            kept += 3 * queries  # their gates, before and after the sigmoid, and the product
        if is_whole and cp > 1:  # gathered, once for each of two chunks
            kept += 2 * keys * (cp + 0.5) - keys
        # Linear attention: around its convolution, in the kernel, and in its gated norm.
        share = module.share_of_attention
        values = module.mean("self_attention.linear_proj.weight")[1] - share * queries
        linear = 3 * channels + (6.5 + 4 / self.size) * values
        return share * kept + linear, share * rotated

    def _kept_for_items(self, queries: float, keys: float) -> float:
        """Elements that a token keeps for attention in both directions within items.

        An item gathers its own keys and values, and those of a window before it.
        """
        is_bidirectional = language_settings(self.recipe).item_rules.bidirectional
        if (
            self.name != LANGUAGE
            or not is_bidirectional
            or self.module.part.recompute == "selective"
        ):
            return 0.0
        rows = min((item_plan(self.recipe, n).num_rows for n in self.layout.encoders), default=0)
        window = getattr(self.settings, "sliding_window", 0)
        return 3 * queries + 2 * keys * (1 + window / rows) if rows else 0.0

    def _kept_after_layers(self) -> float:
        """On the last stage: by the norm and the head, or the projector's linears."""
        if self.name == LANGUAGE:
            return (self._width + self.settings.hidden_size) * self._has_backward
        if not self.module.part.trains:
            return 0.0
        levels = getattr(self.settings, "num_levels", 0) * self.is_frozen
        linears = sum(
            rows + columns
            for name, (rows, columns) in self.module.shapes.items()
            if name.startswith(self.module.last) and name.endswith("weight") and columns > 1
        )
        return self._width * (1 + levels) + linears * self._rows / self.tokens / self.grid.tp

    def _backward_of_layer(self) -> float:
        """Bytes of temporary tensors: gradients, and a linear's gathered inputs under SP."""
        module, tp, width = self.module, self.grid.tp, self._width
        unit, hidden = self.tokens * self.size, self.settings.hidden_size
        gathered = hidden if self.parts > 1 else 0
        weights = self.size * self.trains_layers
        if self.chosen:
            rows = self.chosen * (3 * hidden * self.grid.etp + 3 * self.expert) / tp
            return unit * (width + rows + gathered) + module.held["experts"] * 2 / 3 * weights
        fc1, levels = module.mean(".mlp.linear_fc1.weight"), getattr(self.settings, "num_levels", 0)
        rows = width * (1 + levels) + fc1[0] / tp + gathered
        return unit * rows + fc1[0] * fc1[1] / tp * weights

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
        trains = self.module.trained["last" if self.module.has_head else "first"] > 0
        weight = self.module.vocabulary / self.grid.tp * self.settings.hidden_size * self.size
        return self.block_of_logits + hidden + weight * trains

    @property
    def block_of_logits(self) -> float:
        columns = self.module.vocabulary / self.grid.tp
        block = self.tokens * min(columns, rows_at_once(int(self.tokens)))
        return block * (self.wide + (self.size if self.size < self.wide else 0))
