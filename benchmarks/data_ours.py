"""Our input path, as `mimo train` has it: from shards to the device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.data_workload import BATCH, Batch, Workload
from data.index.samples import Index
from data.loader import StepLoader
from data.order import SampleOrder
from mimo.config.training import Data
from mimo.device import Staging, copy_stream
from mimo.families.wire import WirePatches
from mimo.model.decoding import decoding_of, gather_items, pack_language
from mimo.model.step_plan import StepPlanner
from mimo.parallel.connections import SHARED_MEMORY, Host
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

_VISION, _ENDLESS = "vision", 1_000_000  # steps


def planner_of(index: Index) -> StepPlanner:
    """Return the planner of a single rank that has an encoder and a language model."""
    encoders = {_VISION: GridSpec(_VISION)}
    layout = Layout(GridSpec(LANGUAGE), encoders, 1, frozenset(encoders))
    order = SampleOrder([len(index)], [1.0], 0, None)
    return StepPlanner(layout, {_VISION: ("image",)}, [index], order, BATCH, 1)


def our_batches(workload: Workload, num_workers: int) -> Iterator[Batch]:
    """Epoch after epoch."""
    reader = workload.reader()
    planner, readers = planner_of(reader.index), [reader]
    free = shutil.disk_usage(SHARED_MEMORY).free if num_workers else 0
    host = Host((0,), f"bench{os.getpid()}", free, len(os.sched_getaffinity(0)))
    ahead = Data.model_fields["prefetch_mib"].default * 2**20
    form, stream = reader.processors["image"].wire, copy_stream()
    with decoding_of(readers, planner.layout, 0, host, num_workers, ahead) as decoding:
        loader = StepLoader(planner, readers, decoding, 0, _ENDLESS)
        try:
            while True:
                loaded = loader.next()
                plan = planner.finish(loaded.microbatches)
                (lane,) = pack_language(loaded, plan, readers, 0, reader.chat.pad_token_id)
                coords = planner.layout.encoders[_VISION].coords(0)
                (items,) = gather_items(loaded, plan, readers, _VISION, coords, form)
                assert items.patches is not None, "the first stage has patches"
                staging = Staging(stream)
                loss_at = np.flatnonzero(lane.loss_mask)
                own = (lane.input_ids, lane.position_ids, lane.labels[loss_at], loss_at)
                ids, *others = (staging.copy(torch.from_numpy(array)) for array in own)
                wire = WirePatches.of(items.patches, staging.join, staging.copy)
                samples = plan.microbatches[0].samples.sample.tolist()
                yield Batch(
                    keys=[reader.index.key(sample) for sample in samples],
                    input_ids=ids,
                    tokens=list(lane.real_lengths),
                    pixels=wire.parts[0],
                    patches=[len(patches) for _, patches in items.patches[1:]],
                    others=[*others, torch.from_numpy(items.grids)],
                )
        finally:
            loader.close()
