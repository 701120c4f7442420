"""Our input path, as `mimo train` has it: from shards to the device, and late in a large index."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.data_workload import BATCH, Batch, Workload
from benchmarks.harness import Run, timed
from data.index.samples import Index
from data.index.shard_index import write_shard_index
from data.index.shards import describe_shard
from data.index.store import index_homes, survey
from data.order import SampleOrder
from data.packing import TokenBudget, Used
from mimo.config.data import Data
from mimo.device import Staging, copy_stream
from mimo.families.wire import WirePatches
from mimo.model.decoding import Decoding
from mimo.model.loader import StepLoader, gather_items, pack_language
from mimo.model.step_plan import StepPlanner
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.parallel.hosts import SHARED_MEMORY, Host

_VISION, _ENDLESS = "vision", 1_000_000  # steps

POSITION = 100_000_000
_SAMPLES, _MICROBATCHES, _TOKENS = 1_000_000, 64, 8192  # of a shard; of a step; of a microbatch
_SETTINGS = "synthetic"


def planner_of(
    index: Index,
    num_microbatches: int = 1,
    done: tuple[int, Used] = (0, Used()),
    budget: TokenBudget | None = None,
) -> StepPlanner:
    """Of a single rank that has an encoder and a language model."""
    encoders = {_VISION: GridSpec(_VISION)}
    layout = Layout(GridSpec(LANGUAGE), encoders, 1, frozenset(encoders))
    order, micro_batch = SampleOrder([len(index)], [1.0], 0, None), 1 if budget else BATCH
    media = {_VISION: ("image",)}
    return StepPlanner(
        layout, media, [index], order, micro_batch, num_microbatches, done=done, budget=budget
    )


def our_batches(workload: Workload, num_workers: int) -> Iterator[Batch]:
    """Epoch after epoch."""
    reader = workload.reader()
    planner, readers = planner_of(reader.index), [reader]
    free = shutil.disk_usage(SHARED_MEMORY).free if num_workers else 0
    host = Host((0,), f"bench{os.getpid()}", free, len(os.sched_getaffinity(0)))
    ahead = Data.model_fields["prefetch_mib"].default * 2**20
    form, stream = reader.processors["image"].wire, copy_stream()
    with Decoding(readers, planner.layout, 0, host, num_workers, ahead) as decoding:
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


def write_index(folder: Path, num_shards: int) -> None:
    """Shards that are nothing but a size, and their index: a sample has one image."""
    folder.mkdir()
    rng, n = np.random.default_rng(0), np.arange(_SAMPLES)
    rows = rng.integers(1, 200, _SAMPLES)
    constants = {"json_size": 500, "loss_tokens": 50, "item_media": 0, "item_number": 0}
    constants |= {"item_frames": 1, "item_size_0": 640, "item_size_1": 480, "file_size": 3000}
    constants |= {"item_placeholder": 3, "item_cost": 1, "unknown_tokens": 0, "keys": ord("x")}
    columns = {name: np.full(_SAMPLES, value) for name, value in constants.items()}
    columns |= {"item_start": n, "item_file": n, "key_end": n + 1}
    columns |= {"json_offset": n * 4096, "file_offset": n * 4096 + 512}
    columns |= {"item_fps": np.full(_SAMPLES, 2.0), "item_rows": rows, "token_length": rows + 100}
    columns["keys"] = columns["keys"].astype(np.uint8)
    (home,) = index_homes(str(folder / "*.tar"), _SETTINGS, None)
    for number in range(num_shards):
        path = folder / f"{number:05}.tar"
        with path.open("wb") as file:
            file.truncate(_SAMPLES * 4096)  # of which the disk holds nothing
        state = describe_shard(str(path))
        write_shard_index(home / f"{path.name}.index", _SETTINGS, state, columns, [])
    _survey(folder).open()  # writes the catalog


def resume(folder: Path) -> Run:
    """From nothing to the plan of the step at `POSITION`: index, order, packs, transfers."""

    def plan() -> int:
        used = (1, Used(POSITION))
        planner = planner_of(_survey(folder).open(), _MICROBATCHES, used, TokenBudget(_TOKENS))
        return planner.finish(planner.microbatches(1)).num_tokens

    run = timed(plan)
    assert run.found > _MICROBATCHES * _TOKENS * 0.9, "sequences are full"
    return run


def _survey(folder: Path):
    pattern = str(folder / "*.tar")
    (home,) = index_homes(pattern, _SETTINGS, None)
    return survey(pattern, _SETTINGS, ("image",), home)
