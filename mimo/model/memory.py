"""The memory that a rank needs, by its role, with estimates for modules under FSDP2.

Weights, gradients and optimizer state are exact: see `mimo.model.module_sizes`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from mimo.config.schema import Recipe
from mimo.families.registry import encoder_settings
from mimo.model.activations import Activations
from mimo.model.module_sizes import (
    ModuleSizes,
    RoleMemory,
    draw_size,
    microbatches_in_flight,
    parameters_by_role,
)
from mimo.parallel.grids import LANGUAGE, Layout

_NUMBERED = re.compile(r"\.\d+\.").search


def memory_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Return the memory of every encoder, of the language model's stages, and of generators."""
    roles = []
    for role in parameters_by_role(recipe, layout):
        module = ModuleSizes(recipe, layout, role.module)
        kind = FsdpActivations if module.grid.engine == "fsdp" else Activations
        if role.module in recipe.generators:
            kind = GeneratorActivations
        elif module.is_general:
            kind = TransformersActivations
        estimate, stage = kind(module), module.grid.coords(role.ranks[0]).pp
        roles.append(replace(role, inputs=estimate.inputs(), **estimate.of_stage(stage)))
    return roles


class FsdpActivations(Activations):
    """The estimate for a module of transformers under FSDP2.

    The peak is at one of three places: the backward of what follows the layers, that of a layer, or
    the embedding. A backward frees a part of what the forward keeps.
    """

    def of_stage(self, stage: int) -> dict[str, float]:
        module, size, unit = self.module, self.size, self.tokens * self.size
        waiting = microbatches_in_flight(self.recipe, self.layout, self.name, stage)
        inside, after = unit * self._kept_in_layer(), unit * self._kept_after_layers()
        layers = self.num_layers * (unit * self._width if self.recomputes else inside)
        logits = self._logits_of_forward() if self.name == LANGUAGE else 0.0
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
        gathers = module.part.reshard_after_forward and (module.shares > 1 or size < self.wide)
        if module.keeps_gradients and gathers:
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

    def _logits_of_forward(self) -> float:
        return self.block_of_logits

    def _message(self, place: str) -> float:
        """Bytes of gradients that are sent to other lanes in fp32; 0 while they stay whole."""
        module = self.module
        is_new = module.shares > 1 and not module.keeps_layers
        return module.trained[place] * self.wide * is_new

    @property
    def _num_outputs(self) -> int:
        return 1 if self.name == LANGUAGE else 1 + getattr(self.settings, "num_levels", 0)

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
        if any(re.search(r"norm\w*\.bias$", name) for name in self.module.shapes):
            return 1
        in_fp32 = self.wide // self.size
        return in_fp32 + (in_fp32 if self._norms_are_wide else 1)

    @property
    def _norms_are_wide(self) -> bool:
        """Whether the norms multiply by their weights in fp32, as those with 1 + weight do."""
        is_language = self.name == LANGUAGE
        return is_language and "layernorm_zero_centered_gamma" in self.settings.stack_shape()

    def _kept_in_layer(self) -> float:
        """Elements of a token that a layer keeps on a rank."""
        module, tp, norm = self.module, self.grid.tp, self._kept_in_norm
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


class TransformersActivations(FsdpActivations):
    """The estimate for any model of transformers, by the shapes of its linears.

    Its operations are not fused: of each token a layer keeps the outputs of linears and the inputs
    of the last ones of attention and MLP, activated ones twice; and an RMS norm keeps its input in
    fp32 and what it is multiplied by.
    """

    @cached_property
    def _linears(self) -> tuple[float, float, float]:
        """Outputs of a layer's linears, of attention, and of an MLP's first linears."""
        hidden, inner = self.settings.hidden_size, self.settings.ffn_hidden_size
        # Neither experts, which are stacked, nor another tower have linears of this width.
        shapes = self.module.shapes.items()
        layers = [s for n, s in shapes if _NUMBERED(n) and hidden in s and s[1] > 1]
        count = self.module.listed
        attention = max((c for r, c in layers if r == hidden and c != inner), default=hidden)
        first = sum(rows for rows, _ in layers if rows in (inner, 2 * inner)) / count
        return sum(rows for rows, _ in layers) / count, attention, first

    def _kept_in_layer(self) -> float:
        outputs, attention, first = self._linears
        hidden, kept = self.settings.hidden_size, outputs + attention + first
        if any("k_norm" in name for name in self.module.shapes):
            of_values = self.settings.config["model_type"] in ("gemma3n", "gemma4")  # no weights
            keys = (outputs - first - 2 * hidden - attention) / 2
            kept += self._kept_in_norm * (attention + keys * (1 + of_values))
        if inner := self._text.get("moe_intermediate_size"):
            kept += self._text.get("num_experts_per_tok", 1) * (2 * hidden + 4 * inner)
        norms = self._kept_in_norm * hidden * self.module.num_norms(hidden)
        return kept / self.grid.tp + norms

    @property
    def _text(self) -> Mapping[str, Any]:
        return self.settings.config.get("text_config", {}) if self.name == LANGUAGE else {}

    @property
    def _norms_are_wide(self) -> bool:
        return bool(re.match("gemma|qwen3_(5|next)", self.settings.config["model_type"]))

    def _backward_of_layer(self) -> float:
        first = self._linears[2] / self.grid.tp
        return self.tokens * self.size * (first + 4 * self.settings.hidden_size)

    def _kept_after_layers(self) -> float:
        ends = 1 + self._kept_in_norm if self.name == LANGUAGE else 1 + 4 * self._num_outputs
        return ends * self.settings.hidden_size

    def _logits_of_forward(self) -> float:
        """Logits stay whole: probabilities in fp32 and two gradients of them."""
        each = 3 * self.wide + self.size * bool(self._text.get("final_logit_softcapping"))
        logits = self.tokens * self.module.vocabulary * each
        return max(0.0, logits - self.module.held["layer"] * self.size)  # no layer is gathered then


class GeneratorActivations(TransformersActivations):
    """The estimate for a transformer of diffusers, by its products and their numbers of tokens."""

    def __init__(self, module: ModuleSizes) -> None:
        super().__init__(module)
        self.num_layers = self._layers[0]

    @cached_property
    def _layers(self) -> tuple[float, float]:
        """Number of layers, weighted by their share of tokens, and what they keep of a token."""
        count, grid, rows = draw_size(self.recipe, self.layout, self.name)
        tokens = self.settings.counts(np.array([(1, *grid)] * count), np.full(count, rows))
        kept, units = 0.0, dict[str, set[str]]()
        for product in self.settings.products():
            layer = _NUMBERED(product.parameter or "")
            if layer is not None and product.per != "item":
                units.setdefault(layer.string[: layer.end()], set()).add(product.per)
                is_first = product.shape[0] == self.settings.ffn_hidden_size
                kept += tokens[product.per] * product.shape[0] * (1 + is_first)
        layers = sum(tokens[unit] for of_layer in units.values() for unit in of_layer)
        in_dtype, in_fp32 = self.settings.kept_beside_linears
        beside = self.settings.hidden_size + in_dtype + in_fp32 * self.wide / self.size
        return layers / self.tokens, (kept + layers * beside) / self.tokens

    def _kept_in_layer(self) -> float:
        layers, kept = self._layers
        return kept / layers

    def _backward_of_layer(self) -> float:
        return self.tokens * self.size * 8 * self.settings.hidden_size
