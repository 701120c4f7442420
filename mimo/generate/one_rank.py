"""The whole model on one rank, without schedules and without the bridge.

Letters: T packed tokens, N rows, H hidden, L levels with the embeddings, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from bridge.runs import count_up
from data.batch import PackedLane
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.checkpoint.load import Index, load_weights
from mimo.config.modules import Grid
from mimo.config.schema import Recipe
from mimo.device import gpu_memory, initialize_distributed, machine_memory, send
from mimo.model.build import build_model
from mimo.model.inputs import ReceivedRows, join_levels, place_embeddings
from mimo.model.modules import MimoModel
from mimo.model.recipe_checks import check_memory
from mimo.ops.segments import PackedSegments
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.parallel.groups import build_topology


def one_rank_layout(recipe: Recipe) -> Layout:
    """Return a layout with every module of the recipe on rank 0."""
    return Layout(
        language=GridSpec(LANGUAGE),
        encoders={name: GridSpec(name) for name in recipe.encoders},
        world_size=1,
        generators={name: GridSpec(name) for name in recipe.generators},
    )


def one_rank_recipe(recipe: Recipe, freeze: bool = True) -> Recipe:
    """Return the recipe with one-rank grids and no recomputation, in the precision of its weights.

    freeze: build neither optimizers nor gradients.
    """
    # FP8 needs certain GPUs and lengths; no moving average is kept.
    settings = {"fp8": "none", "ema_decay": None}
    parts: dict[str, object] = {"grid": Grid(), "recompute": "none"}
    if freeze:
        parts["freeze"] = True
    return recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update=settings),
            "language": recipe.language.model_copy(update=parts),
            **{
                section: {
                    name: module.model_copy(update=parts)
                    for name, module in getattr(recipe, section).items()
                }
                for section in ("encoders", "generators")
            },
        }
    )


def join_world_of_one() -> None:
    """Make this process a world of one rank, unless it is part of a world."""
    if not dist.is_initialized():
        # In memory: a world of one rank needs no rendezvous, so it leaves no file.
        initialize_distributed(0, 1, HashStore(), timeout_seconds=60)


class LocalModel:
    """All modules on this one rank, without optimizers; build it in a world of one rank."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer_size: int,
        initial: InitialWeights | None = None,
        provided: Collection[str] = (),
    ) -> None:
        recipe = one_rank_recipe(recipe)
        topology = build_topology(one_rank_layout(recipe))
        self.model: MimoModel = build_model(
            recipe, topology, tokenizer_size, initial, provided, trains=False
        )
        self.device = self.model.device

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Path,
        recipe: Recipe,
        stored: Index,
        tokenizer_size: int,
        average: bool = False,
    ) -> LocalModel:
        """Load a checkpoint's weights, or their moving average, into a world of one rank.

        recipe: from `portable_recipe`. stored: from `open_checkpoint`. Raises InputError for damage
        or too little memory, ValueError if the checkpoint does not fit its recipe.
        """
        join_world_of_one()
        alone = one_rank_recipe(recipe)
        check_memory(alone, one_rank_layout(alone), range(1), gpu_memory() or machine_memory())
        local = cls(recipe, tokenizer_size, provided=stored)
        modules = local.model.modules
        load_weights(modules, checkpoint, stored, average)
        for module in modules.values():
            module.whole.eval()
        return local

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def encode(self, encoder: str, patches: np.ndarray, grids: np.ndarray) -> Tensor:
        """Encode patches (P, C) float32 with grids (I, 3) int64 to rows (N, L·H)."""
        tower = self.model.modules[encoder].whole
        dtype = next(tower.parameters()).dtype
        inputs = torch.from_numpy(patches).to(self.device, dtype)
        return tower(inputs, torch.from_numpy(grids)).values

    def forward(
        self,
        lane: PackedLane,
        rows: Mapping[str, tuple[Tensor, np.ndarray]],
        with_labels: bool,
        at: np.ndarray | None = None,
    ) -> Tensor:
        """Return losses (1, T) fp32 with labels, else logits (1, T, V), or (1, n, V) with `at`.

        The queries of the lane's output items stand at their places.

        rows: of each encoder that has items, (N, L·H) and their ascending positions (N,).
        at: (n,) positions whose logits are wanted; with a large vocabulary all would be many.
        """
        language: Any = self.model.modules[LANGUAGE].whole
        if self.model.takes_rows:
            inputs = language.prepare(lane, partial(send, device=self.device), at)
            values = {encoder: values for encoder, (values, _) in rows.items()}
            return language(inputs, values, with_logits=not with_labels)[None]

        return language(
            **self._inputs(lane, rows),
            labels=self._to_device(lane.labels)[None] if with_labels else None,
            logits_at=None if at is None else self._to_device(at),
        )

    def hidden_states(
        self, lane: PackedLane, rows: Mapping[str, tuple[Tensor, np.ndarray]]
    ) -> Tensor:
        """Return the hidden states (T, H) after the final norm, as generators get them.

        rows: see `forward`. Not for a model that takes rows itself.
        """
        language: Any = self.model.modules[LANGUAGE].whole
        states = list[Tensor]()

        def keep(hidden: Tensor) -> Tensor:
            states.append(hidden.flatten(0, 1))
            return hidden.new_zeros(())

        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        language(**self._inputs(lane, rows), labels=none, loss_at=none, emit=keep)
        return states[0]

    def _inputs(
        self, lane: PackedLane, rows: Mapping[str, tuple[Tensor, np.ndarray]]
    ) -> dict[str, Any]:
        rules, size = self.model.item_rules, self.model.hidden_size
        received = [
            ReceivedRows.of(values, self._to_device(places), size, has_embeddings=True)
            for values, places in rows.values()
        ]
        places = {
            name: query_places(lane, media, self._to_device)
            for name, media in self.model.query_media.items()
        }
        return {
            "input_ids": self._to_device(lane.input_ids)[None],
            "position_ids": self._to_device(rules.position_ids(lane))[:, None, :],
            "packed_seq_params": PackedSegments.from_lengths(
                lane.lengths, self.device, items=rules.bidirectional_spans(lane), tail=lane.tail
            ),
            "place": partial(place_embeddings, received=received, places=places),
            "levels": join_levels(received),
        }


def query_places(
    lane: PackedLane, modality: str, to_device: Callable[[np.ndarray], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return numbers and positions (n,) int64 of a lane's queries of one modality."""
    spans = [(first, count) for kind, first, count in lane.queries if kind == modality]
    counts = np.array([count for _, count in spans], np.int64)
    number = count_up(counts)
    first = np.repeat(np.array([first for first, _ in spans], np.int64), counts)
    return to_device(number), to_device(first + number)
