"""Towers of transformers with their projectors: packed items to embeddings.

The host prepares whatever depends on the items' grids alone, ahead of the forward, so transformers
does not wait for the device to read it.

Letters: I items, P patches of all items, C numbers of each, N embeddings, L levels, H hidden size
of the language model.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from mimo.device import send
from mimo.engines.fsdp.context import FsdpContext, Wrapper
from mimo.engines.fsdp.models import TOWER_NAME, Segments, layer_form, on_meta
from mimo.ops.segments import PackedSegments, to_device

MakeRows = Callable[[Tensor, tuple[int, ...]], Any]


@dataclass(frozen=True)
class PreparedItems:
    """The arguments of a forward beside patches.

    sizes: embeddings of each item. packed: segments, then windows if there are any. options: of the
    tower's forward.
    """

    sizes: tuple[int, ...]
    grids: Tensor
    packed: tuple[PackedSegments, ...]
    options: dict[str, Any]


class Tower(Wrapper):
    """A tower and its projector from a model of transformers; its units are its layers.

    make_rows: (embeddings (N, (1 + L)·H), embeddings of each item) -> the result of `run`.
    """

    parts: tuple[str, ...]
    """Names of its modules in the whole model."""
    layers: str
    """Name of the list of its layers."""
    packs = True
    """Whether its attention is packed, by a kernel of ours."""

    def __init__(self, config: PretrainedConfig, ctx: FsdpContext, make_rows: MakeRows) -> None:
        super().__init__(ctx)
        whole = on_meta(config, "sdpa", ctx.stored_dtype)
        for part in self.parts:
            module = whole.get_submodule(part)
            self.add_module(part.rpartition(".")[2], module)
            if self.packs and ctx.mesh is not None:
                # Set directly: transformers would look for a package of that name.
                module.config._attn_implementation = TOWER_NAME
        self.name_as_in(whole)
        self.config, self.make_rows = config, make_rows
        self.units = list(self.get_submodule(self.layers).children())
        if ctx.recompute == "full":
            for module in self.children():
                if isinstance(module, PreTrainedModel):
                    module.activation_checkpointing_enable({"use_reentrant": False})

    def prepare(self, grids: Tensor, copy: Callable[[Tensor], Tensor]) -> PreparedItems:
        """Do all host work for items with these grids (I, 3) int64, in any thread.

        copy: brings a host tensor to the device. Without items it prepares a blank one, so that
        this rank takes part in all collectives.
        """
        sizes = tuple(self._sizes(grids))
        if not sizes:
            grids = torch.tensor([self._blank()[0]])
        packed, options = self._pack(grids)
        return to_device(PreparedItems(sizes, grids, packed, options), copy)

    def run(self, patches: Any, items: Any) -> Any:
        """Encode items and return the result of `make_rows`.

        patches: see `values`. items: as prepared, or their grids (I, 3).
        Without items, 0 embeddings are part of the graph.
        """
        device = next(self.parameters()).device
        if isinstance(items, Tensor):
            items = self.prepare(items, partial(send, device=device))
        if not items.sizes:
            grid, width = self._blank()
            blank = torch.zeros(math.prod(grid), width, dtype=self.ctx.dtype, device=device)
            # A copy: a change in place of a view would lose FSDP2's hook; torch warns about it.
            return self.make_rows(self._rows(blank, items)[:0].clone(), ())
        rows = self._rows(self.values(patches), items)
        # The surplus, or what is missing, is the last items'; the bridge compares it with the plan.
        ends = [min(end, len(rows)) for end in itertools.accumulate(items.sizes[:-1])]
        sizes = itertools.pairwise([0, *ends, len(rows)])
        return self.make_rows(rows, tuple(end - start for start, end in sizes))

    # ---- what differs between towers

    @abstractmethod
    def _blank(self) -> tuple[tuple[int, int, int], int]:
        """The grid of the smallest item, and C."""

    @abstractmethod
    def _sizes(self, grids: Tensor) -> list[int]:
        """The number of embeddings of each item."""

    @abstractmethod
    def _pack(self, grids: Tensor) -> tuple[tuple[PackedSegments, ...], dict[str, Any]]:
        """The layers' segments, with plans, and options of transformers' forward; on the host."""

    @abstractmethod
    def _rows(self, values: Tensor, items: PreparedItems) -> Tensor:
        """values (P, C) -> (N, (1 + L)·H)."""


class QwenTower(Tower):
    """Towers of Qwen2.5-VL and Qwen3-VL: items of any size, packed; frames are segments."""

    parts = ("model.visual",)
    layers = "visual.blocks"
    visual: Any

    def _blank(self) -> tuple[tuple[int, int, int], int]:
        side, vision = self.visual.spatial_merge_size, self.config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return (1, side, side), width

    def _sizes(self, grids: Tensor) -> list[int]:
        return (grids.prod(1) // self.visual.spatial_merge_unit).tolist()

    def _pack(self, grids: Tensor) -> tuple[tuple[PackedSegments, ...], dict[str, Any]]:
        vision, merge = self.config.vision_config, self.visual.spatial_merge_size
        options: dict[str, Any] = {"position_ids": get_vision_position_ids(grids, merge)}
        packed = [_segments(get_vision_cu_seqlens(grids))]
        options |= {"max_seqlen": packed[0].max_seqlen_q, "cu_seqlens": packed[0].cu_seqlens_q}
        if vision.model_type.startswith("qwen2_5"):
            index, bounds = get_vision_window_index(
                grids, merge, self.visual.window_size, self.visual.patch_size
            )
            packed.append(_segments(bounds))
            options |= {
                "window_index": index,
                "cu_window_seqlens": packed[1].cu_seqlens_q,
                "max_window_seqlen": packed[1].max_seqlen_q,
            }
        else:
            indices, weights = get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=self.visual.num_grid_per_side,
                mode=self.visual.interpolation_mode,
                align_corners=self.visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            options |= {"interp_indices": indices, "interp_weights": weights}
        head_size = vision.hidden_size // vision.num_heads
        for packing in packed:
            packing.prepare((layer_form(head_size, self.ctx.dtype, causal=False),))
        return tuple(packed), options

    def _rows(self, values: Tensor, items: PreparedItems) -> Tensor:
        options = dict(items.options)
        if self.ctx.mesh is not None:
            options["segments"] = Segments(items.packed, self.ctx.recompute == "selective")
        made = self.visual(values, grid_thw=items.grids, **options)
        levels = made.get("deepstack_features") or ()
        return torch.cat((made.pooler_output, *levels), dim=-1)


def _segments(bounds: Tensor) -> PackedSegments:
    """The segments with these bounds (n + 1,), some perhaps empty; host tensors."""
    return PackedSegments.from_lengths(bounds.diff().tolist(), torch.device("cpu"))


class GemmaTower(Tower):
    """Tower of Gemma-3: square images of one size, a batch."""

    parts = ("model.vision_tower", "model.multi_modal_projector")
    layers = "vision_tower.encoder.layers"
    packs = False
    vision_tower: Any
    multi_modal_projector: Any

    @property
    def _sides(self) -> tuple[int, int, int]:
        """Patches along a side of an image and of a pooled block, and pixels along a patch."""
        projector = self.multi_modal_projector
        patch = self.config.vision_config.patch_size
        return projector.patches_per_image, projector.kernel_size, patch

    def _blank(self) -> tuple[tuple[int, int, int], int]:
        side, _, patch = self._sides
        return (1, side, side), 3 * patch**2

    def _sizes(self, grids: Tensor) -> list[int]:
        return [self.multi_modal_projector.tokens_per_side**2] * len(grids)

    def _pack(self, grids: Tensor) -> tuple[tuple[PackedSegments, ...], dict[str, Any]]:
        return (), {}

    def _rows(self, values: Tensor, items: PreparedItems) -> Tensor:
        side, block, patch = self._sides
        # Patches of a pooled block follow each other; transformers takes whole images.
        blocks = values.view(-1, side // block, side // block, block, block, 3, patch, patch)
        images = blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(
            len(items.grids), 3, *[side * patch] * 2
        )
        hidden = self.vision_tower(pixel_values=images).last_hidden_state
        return self.multi_modal_projector(hidden).flatten(0, 1).clone()  # no view, as in `run`


TOWERS: dict[str, type[Tower]] = {
    "qwen2_5_vl": QwenTower,
    "qwen3_vl": QwenTower,
    "qwen3_vl_moe": QwenTower,
    "qwen3_5": QwenTower,
    "gemma3": GemmaTower,
}
"""By `model_type` of the whole model."""
