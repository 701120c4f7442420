"""Estimates of the memory that a rank needs, by its role.

Weights, gradients and optimizer state are exact: see `mimo.model.module_sizes`. What a rank keeps
between forward and backward, and its temporary tensors, are estimates for full microbatches whose
tokens all stand for items and have a loss. Of each token a layer keeps the inputs of norms and
linears and the outputs of the first linears, attention its rotated queries and keys, their cosines
and sines, and no scores; frozen linears keep no input. With ``recompute: full`` a layer keeps its
input alone. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4. The kernels are those of
Transformer Engine or flash-attn. The device's context, memory of libraries such as NCCL, and
fragmentation come on top.
"""

import math
from dataclasses import replace
from functools import cached_property

import numpy as np

from data.modalities.processor import PartPlan, WireForm
from mimo.config.schema import Recipe
from mimo.families.registry import (
    encoder_settings,
    generator_settings,
    language_settings,
    module_settings,
)
from mimo.model.module_sizes import (
    IN_LAYER,
    OUTPUT,
    ModuleSizes,
    RoleMemory,
    item_plan,
    items_at_once,
    microbatches_at_once,
    microbatches_in_flight,
    parameters_by_role,
)
from mimo.ops.cross_entropy import rows_at_once
from mimo.parallel.grids import LANGUAGE, Layout, num_microbatches

_TOKEN_BYTES = 48
"""Bytes of a token's id, three positions, label and place among loss tokens."""
_PLACE_BYTES = 64
"""About the bytes of a patch's place and of the learned positions around it."""


def memory_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Return the memory of every encoder, then of the language model's different stages."""
    roles = []
    for role in parameters_by_role(recipe, layout):
        module = ModuleSizes(recipe, layout, role.module)
        kind = FsdpActivations if module.grid.engine == "fsdp" else Activations
        estimate, stage = kind(module), module.grid.coords(role.ranks[0]).pp
        roles.append(replace(role, inputs=estimate.inputs(), **estimate.of_stage(stage)))
    return roles


class Activations:
    """The estimate for a module of Megatron: numbers of ``size`` bytes for each token.

    expert, shared: inputs of the last linear of an expert, and of the shared one.
    """

    def __init__(self, module: ModuleSizes) -> None:
        self.module, self.recipe, self.layout = module, module.recipe, module.layout
        self.name, self.grid = module.name, module.grid
        self.size, self.wide = module.size, module.wide
        self.parts = self.grid.tp if self.grid.sp else 1
        self.recomputes = module.part.recompute == "full"
        self.settings = module_settings(self.recipe, self.name)
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
            return self._tokens_of_generator()
        settings, grid = encoder_settings(self.recipe, self.name), self._plan.grid
        # Layers of a sound's tower see fewer tokens than there are frames.
        tokens = settings.counts(np.array([grid])).get("token", settings.num_inputs(grid))
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
            return 2 * steps * self.tokens * _TOKEN_BYTES
        patches = items_at_once(self.recipe, self.layout, self.name) * self._plan.num_patches
        return 2 * steps * patches * (self._form.width * self._form.dtype.itemsize + _PLACE_BYTES)

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
        trains = self.module.trained["last" if OUTPUT in self.module.shapes else "first"] > 0
        weight = self.module.vocabulary / self.grid.tp * self.settings.hidden_size * self.size
        return self.block_of_logits + hidden + weight * trains

    @property
    def block_of_logits(self) -> float:
        columns = self.module.vocabulary / self.grid.tp
        block = self.tokens * min(columns, rows_at_once(int(self.tokens)))
        return block * (self.wide + (self.size if self.size < self.wide else 0))


class FsdpActivations(Activations):
    """The estimate for a module of transformers under FSDP2.

    The peak is at one of three places: the backward of what follows the layers, that of a layer, or
    the embedding. A backward frees a part of what the forward keeps.
    """

    def of_stage(self, stage: int) -> dict[str, float]:
        module, size, unit = self.module, self.size, self.tokens * self.size
        waiting = microbatches_in_flight(self.recipe, self.layout, self.name, stage)
        inside, after = unit * self._kept_in_layer(), unit * self._kept_after_layers()
        layers = module.layers * (unit * self._width if self.recomputes else inside)
        logits = self.block_of_logits if self.name == LANGUAGE else 0.0
        # The next layer arrives while one computes, unless all stay gathered.
        has_next = module.shares > 1 and not module.keeps_layers
        following = module.held["layer"] * self.size * has_next
        if self.is_frozen:
            outside = unit * self._kept_before_layers() + self._bytes_of_rows
            return {"activations": inside + outside, "logits": logits, "buffers": 2 * following}
        kept = layers + after + unit * self._kept_before_layers()
        of_layer = self._backward_of_layer() + inside * self.recomputes
        in_layer = of_layer + following - after / self._num_outputs
        ends, at_end = module.trained["first"], 2 * self._bytes_of_rows
        if self.name == LANGUAGE:
            at_end, pending = self._logits(), ends * self.size
            if module.embedding:
                # The head's weight is freed, and its gradient sent, before layers begin.
                head = module.held["last"] * self.size
                pending = self._message("last") - head
                at_end = max(at_end, module.trained["last"] * self.size + pending)
        else:
            ends += module.trained["last"]
            pending = module.trained["last"] * self.size / self._num_outputs + self._bytes_of_rows
        if module.keeps_gradients and module.part.reshard_after_forward and module.shares > 1:
            # Layers are gathered again when whole gradients exist, and when inputs are freed.
            absent = (module.layers - 2) * module.held["layer"] * self.size
            at_end, in_layer = at_end - absent, in_layer - min(absent, layers)
        # The embedding's gradient; in the next forward its weight, as received and as used.
        at_embedding = max(ends * size + self._message("first"), 2 * module.embedding * size)
        at_embedding -= layers + after
        # A layer's gradient while it is sent, when its activations are freed.
        of_layer = module.trained["layer"] * size + self._message("layer") - after
        most = max(at_end, in_layer + pending - following, of_layer) + following
        buffers = max(most, at_embedding, logits) - logits
        return {"activations": waiting * kept, "logits": logits, "buffers": buffers}

    def _message(self, place: str) -> float:
        """Bytes of gradients that are sent to other lanes in fp32; 0 while they stay whole."""
        module = self.module
        is_new = module.shares > 1 and not module.keeps_layers
        return module.trained[place] * self.wide * is_new

    @property
    def _num_outputs(self) -> int:
        levels = getattr(self.settings, "num_levels", 0)
        return 1 if self.name == LANGUAGE else 1 + levels

    @property
    def _bytes_of_rows(self) -> float:
        if self.name not in self.layout.encoders:
            return 0.0
        return self._rows * self.module.hidden * self._num_outputs * self.size

    def _kept_before_layers(self) -> float:
        """Elements of a token: rows of items and the levels among them, or a tower's input."""
        if self.name != LANGUAGE:
            return self._form.patch_dim if self.name in self.layout.encoders else 0.0
        levels = [encoder_settings(self.recipe, n).num_levels for n in self.layout.encoders]
        return self._width * (1 + 2 * max(levels)) if levels else 0.0

    def _kept_after_layers(self) -> float:
        if self.name == LANGUAGE:
            return self._width * (self._kept_in_norm + 1)
        return super()._kept_after_layers() if self.name in self.layout.encoders else 0.0

    @property
    def _kept_in_norm(self) -> int:
        """Tensors that a norm keeps besides its output; RMS norms also the normalized input."""
        if any(name.endswith("norm.bias") for name in self.module.shapes):
            return 1
        in_fp32, is_centered = self.wide // self.size, self.name == LANGUAGE and self._is_centered
        return in_fp32 + (in_fp32 if is_centered else 1)

    @property
    def _is_centered(self) -> bool:
        """Whether the norms of the language model multiply by 1 + weight, in fp32."""
        return "layernorm_zero_centered_gamma" in self.settings.stack_shape()

    def _kept_in_layer(self) -> float:
        """Elements of a token that a layer keeps on a rank."""
        module, tp, norm = self.module, self.grid.tp, self._kept_in_norm
        if not module.mean("linear_qkv.weight")[0]:  # named as in transformers
            layer = {n: s for n, s in module.shapes.items() if IN_LAYER(n) or module.is_one_unit}
            outputs = sum(rows for rows, columns in layer.values() if columns > 1) / module.listed
            return 2 * (norm + 1) * module.hidden / self.parts + (norm + 1) * outputs / tp
        fc1, fc2 = (module.mean(f".mlp.linear_{name}.weight") for name in ("fc1", "fc2"))
        qkv, proj = (module.mean(f"self_attention.linear_{n}.weight") for n in ("qkv", "proj"))
        is_gated, queries, keys = fc1[0] > fc2[1], proj[1], (qkv[0] - proj[1]) / 2
        kept = self._width * (norm * module.num_norms(self.settings.hidden_size) + 2)
        kept += (qkv[0] + queries + fc1[0] + fc2[1] * (1 + is_gated)) / tp
        if module.mean("q_layernorm.weight")[0]:
            kept += norm * (queries + keys) / tp
        kept += self._kept_for_items(queries, keys) / tp
        if self.name in self.layout.encoders and hasattr(self.settings, "rotary_base"):
            kept += queries + keys  # the linear's output stays, because values are a part of it
        if self.chosen:
            kept += self.chosen * (2 * qkv[1] * self.grid.etp + 4 * self.expert) / tp
            kept += 4 * self.shared / tp + self._width * (self.shared > 0)
        return kept

    def _backward_of_layer(self) -> float:
        """Bytes of temporary tensors: gradients of an MLP's tensors, and of its last weight."""
        fc1, fc2 = (self.module.mean(f".mlp.linear_{name}.weight") for name in ("fc1", "fc2"))
        unit, weight = self.tokens * self.size, math.prod(fc2) * self.size * self.trains_layers
        return unit * (fc1[0] / self.grid.tp + self._width) + weight / self.grid.tp
