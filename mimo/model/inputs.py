"""The inputs of a rank's modules: batches copied to the device, and rows received from encoders.

Letters: B sequences (1 for packed) of S tokens on this lane, I items, n rows of this rank,
H hidden, k levels of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bridge import ItemRows, UnexpectedRows, split_levels
from data.batch import PackedLane
from mimo.device import Staging
from mimo.engines.contract import Draw
from mimo.families.contracts import ItemRules
from mimo.families.wire import WirePatches
from mimo.model.decoding import EncoderItems
from mimo.ops.segments import Form, PackedSegments, insert_embeddings, to_device
from mimo.parallel.grids import Link
from mimo.parallel.partition import PartitionAdapter


@dataclass(frozen=True)
class LanguageBatch:
    """One microbatch of the language model on one rank, on any pipeline stage.

    input_ids: (B, S/cp) int64, or (B, S) when whole rows arrive. position_ids: (3, B, S/cp) int64.
    labels: (n,) int64 of the tokens with a loss. loss_at: (n,) int64 positions of these tokens:
    s·B + b for token s of sequence b of this rank's (B, S/cp). segments: of the whole packed
    sequence; None for unpacked batches. queries: by generator, the number of each query of this
    rank, (n,) int64, and its local position, (n,) int64 like `ReceivedRows.places`.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_at: Tensor
    segments: PackedSegments | None
    queries: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """(S/cp, B)."""
        _, batch, length = self.position_ids.shape
        return length, batch


@dataclass(frozen=True)
class WholeBatch:
    """One microbatch of a language model that takes rows itself, as models of transformers do.

    inputs: the result of the model's `prepare`. size: (S, B) of the lane.
    """

    inputs: Any
    size: tuple[int, int]


@dataclass(frozen=True)
class EncoderBatch:
    """Items that an encoder of this rank encodes in one go.

    patches: on the encoder's first stage; else None. items: the result of the tower's `prepare`.
    """

    patches: WirePatches | None
    items: Any


Batch = LanguageBatch | WholeBatch


@dataclass(frozen=True)
class Inputs:
    """The inputs of this rank's modules in one step, on the device.

    language: its microbatches. items: by encoder, its microbatches, or groups of them. draws: by
    generator, the forwards of each microbatch.
    """

    language: list[Batch]
    items: dict[str, list[EncoderBatch]]
    draws: dict[str, list[list[Draw]]]


def stage_lane(
    lane: PackedLane,
    rules: ItemRules,
    partition: PartitionAdapter,
    whole_rows: bool,
    forms: Collection[Form],
    staging: Staging,
    outputs: Mapping[str, str],
) -> LanguageBatch:
    """Copy to the device what every language stage and TP rank needs of a microbatch.

    It is cut on the host, so that only this rank's part is copied. whole_rows: leave the token ids
    whole. forms: of the attention of this rank's layers; their plans are made here too. outputs: by
    generator with queries, the modality of its items.
    """
    batch = lane.num_sequences
    segments = None
    if lane.packed:
        segments = PackedSegments.from_lengths(
            lane.lengths,
            torch.device("cpu"),
            lane.real_lengths,
            rules.bidirectional_spans(lane),
            lane.tail,
        )
        segments.prepare(forms)
    ids, labels, loss_mask = (
        torch.from_numpy(tokens).view(batch, -1)
        for tokens in (lane.input_ids, lane.labels, lane.loss_mask)
    )
    labels, loss_mask = (partition.slice_tokens(t, segments) for t in (labels, loss_mask))
    # On the host: the number of these tokens would have to come back from the device.
    loss_at = np.flatnonzero(loss_mask.numpy().T)
    if not whole_rows:
        ids = partition.slice_tokens(ids, segments)
    positions = torch.from_numpy(rules.position_ids(lane)).view(3 * batch, -1)
    positions = partition.slice_tokens(positions, segments).view(3, batch, -1)
    return LanguageBatch(
        input_ids=staging.copy(ids),
        position_ids=staging.copy(positions),
        labels=staging.copy(torch.from_numpy(labels.numpy().T.ravel()[loss_at])),
        loss_at=staging.copy(torch.from_numpy(loss_at)),
        segments=to_device(segments, staging.copy),
        queries={
            name: _queries(lane, modality, partition, segments, whole_rows, staging)
            for name, modality in outputs.items()
        },
    )


def _queries(
    lane: PackedLane,
    modality: str,
    partition: PartitionAdapter,
    segments: PackedSegments | None,
    whole_rows: bool,
    staging: Staging,
) -> tuple[Tensor, Tensor]:
    """Return numbers and local positions (n,) of this rank's queries of one generator."""
    number = torch.zeros(len(lane.input_ids), dtype=torch.int64)
    for kind, first, count in lane.queries:
        if kind == modality:  # 0 is no query
            number[first : first + count] = torch.arange(1, count + 1)
    number = number.view(lane.num_sequences, -1)
    if not whole_rows:
        number = partition.slice_tokens(number, segments)
        if partition.sequence_parallel:
            number = number.chunk(partition.tp.size(), dim=1)[partition.tp.rank()]
    number = number.flatten()
    places = number.nonzero().flatten()
    return staging.copy(number[places] - 1), staging.copy(places)


def stage_whole(lane: PackedLane, model: Any, staging: Staging) -> WholeBatch:
    """Copy to the device what a ``model`` that takes rows itself needs of a microbatch."""
    size = len(lane.input_ids) // lane.num_sequences, lane.num_sequences
    return WholeBatch(model.prepare(lane, staging.copy), size)


def stage_items(items: Sequence[EncoderItems], tower: Any, staging: Staging) -> EncoderBatch:
    """Copy the items of one microbatch, or of several that ``tower`` encodes in one go."""
    parts = [part for microbatch in items for part in microbatch.patches or ()]
    grids = np.concatenate([microbatch.grids for microbatch in items])
    prepared = tower.prepare(torch.from_numpy(grids), staging.copy)
    patches = WirePatches.of(parts, staging.join, staging.copy) if parts else None
    return EncoderBatch(patches, prepared)


# ----------------------------------------------------------------- rows of encoders


@dataclass(frozen=True)
class ReceivedRows:
    """The rows of one encoder that a chunk of the language model received.

    embeddings: (n, H) for the first layer's input, on the first chunk; else None.
    levels: (k, n, H), the first for the chunk's first layer, and so on.
    places: (n,) int64 local positions: b·S + s is token s of sequence b.
    """

    embeddings: Tensor | None
    levels: Tensor
    places: Tensor

    @property
    def side_by_side(self) -> Tensor:
        """All levels of each row beside its embedding, (n, (1 + k)·H)."""
        parts = [*self.levels] if self.embeddings is None else [self.embeddings, *self.levels]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    @classmethod
    def of(
        cls, rows: Tensor, places: Tensor, hidden_size: int, *, has_embeddings: bool
    ) -> ReceivedRows:
        """Split rows (n, j·H) with all j levels side by side; embeddings, if any, come first."""
        if rows.shape[1] == hidden_size and has_embeddings:
            return cls(rows, rows.new_zeros(0, *rows.shape), places)
        levels = rows.unflatten(1, (-1, hidden_size)).transpose(0, 1)
        if has_embeddings:
            return cls(levels[0], levels[1:], places)
        return cls(None, levels, places)


def place_embeddings(
    text: Tensor,
    queries: Mapping[str, Tensor],
    received: Sequence[ReceivedRows],
    places: Mapping[str, tuple[Tensor, Tensor]],
) -> Tensor:
    """Write the embeddings of all encoders, and queries, into text embeddings (S, B, H).

    queries: parameters (K, H) by generator. places: `LanguageBatch.queries`.
    """
    for rows in received:
        if rows.embeddings is not None:
            text = insert_embeddings(text, rows.embeddings, rows.places)
    for name, (number, at) in places.items():
        text = insert_embeddings(text, queries[name].index_select(0, number), at)
    return text


def join_levels(received: Sequence[ReceivedRows]) -> tuple[Tensor, Tensor] | None:
    """Join the levels of all encoders, padded with zeros: rows (k, n, H), places (n,); or None."""
    with_levels = [rows for rows in received if rows.levels.shape[0] > 0]
    if not with_levels:
        return None
    most = max(rows.levels.shape[0] for rows in with_levels)
    padded = [
        torch.nn.functional.pad(rows.levels, (0, 0, 0, 0, 0, most - rows.levels.shape[0]))
        for rows in with_levels
    ]
    return torch.cat(padded, dim=1), torch.cat([rows.places for rows in with_levels])


def cut_levels(
    levels: tuple[Tensor, Tensor], batch: int, length: int, cut: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Cut levels of whole sequences to this rank's part, one row for each of its tokens.

    cut: (S, B, H) -> (S', B, H), the same cut as for the embeddings. Tokens without a row get
    zeros. This is the readable reference for sharded delivery, which sends only this rank's rows.
    """
    rows, places = levels
    parts = []
    for level in rows:
        whole = insert_embeddings(level.new_zeros(length, batch, level.shape[1]), level, places)
        parts.append(cut(whole).transpose(0, 1).flatten(0, 1))
    return torch.stack(parts), torch.arange(parts[0].shape[0], device=places.device)


def rows_of_links(output: ItemRows, links: Collection[Link], microbatch: int) -> list[ItemRows]:
    """Split a tower's output into the rows of each link of its encoder.

    microbatch: the first of its items. Raises UnexpectedRows for other levels than planned.
    """
    try:
        parts = split_levels(output.values, [link.levels for link in links])
    except ValueError as error:
        (encoder,) = {link.module for link in links}
        what = f"encoder {encoder}, microbatch {microbatch}: {error}"
        raise UnexpectedRows(what, microbatch) from error
    return [replace(output, values=part) for part in parts]
