"""What the modules of a rank compute on, made and copied to the device ahead of use.

A thread in the background calls the functions here while the device works on another step.

Letters: B sequences (1 for packed) of S tokens on this lane, I items.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import PackedLane
from mimo.device import Staging
from mimo.families.contracts import ItemRules
from mimo.families.wire import WirePatches
from mimo.model.decoding import EncoderItems
from mimo.ops.attention_plan import LayerForm
from mimo.ops.segments import PackedSegments, to_device
from mimo.parallel.partition import PartitionAdapter


@dataclass(frozen=True)
class LanguageBatch:
    """One microbatch of the language model on one rank, on any pipeline stage.

    input_ids: (B, S/cp) int64, or (B, S) when whole rows arrive. position_ids: (3, B, S/cp) int64.
    labels: (n,) int64 of the tokens that count in the loss. loss_at: (n,) int64, where they
    are: s·B + b for token s of sequence b of this rank's (B, S/cp). segments: whole; None for a
    batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_at: Tensor
    segments: PackedSegments | None


@dataclass(frozen=True)
class EncoderBatch:
    """Items that an encoder of this rank encodes in one go.

    patches: on the encoder's first stage; else None. items: what the tower's `prepare` made of
    them.
    """

    patches: WirePatches | None
    items: Any


def stage_lane(
    lane: PackedLane,
    rules: ItemRules,
    partition: PartitionAdapter,
    whole_rows: bool,
    forms: Collection[LayerForm],
    staging: Staging,
) -> LanguageBatch:
    """What every stage and tensor-parallel rank needs of a microbatch, cut for this rank.

    It is cut on the host, so that only this rank's part is copied. whole_rows: leave the token ids
    whole. forms: of the attention of this rank's layers, whose plans are made here too.
    """
    batch = lane.num_sequences
    segments = None
    if lane.packed:
        segments = PackedSegments.from_lengths(
            lane.lengths, torch.device("cpu"), lane.real_lengths, rules.bidirectional_spans(lane)
        )
        segments.prepare(forms)
    ids, labels, loss_mask = (
        torch.from_numpy(own).view(batch, -1)
        for own in (lane.input_ids, lane.labels, lane.loss_mask)
    )
    labels, loss_mask = (partition.slice_tokens(own, segments) for own in (labels, loss_mask))
    # Chosen on the host: asking a device how many there are would stop the host.
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
    )


def stage_items(items: Sequence[EncoderItems], tower: Any, staging: Staging) -> EncoderBatch:
    """The items of one microbatch, or of several that ``tower`` encodes in one go."""
    parts = [part for own in items for part in own.patches or ()]
    grids = np.concatenate([own.grids for own in items])
    prepared = tower.prepare(torch.from_numpy(grids), staging.copy)
    patches = WirePatches.of(parts, staging.join, staging.copy) if parts else None
    return EncoderBatch(patches, prepared)
