"""Compare our input path with other loaders on the same photos.

One rank reads all samples by each loader, alone and with workers. Then the ranks of one lane on one
host read the same samples: ours decode each sample once and share it, a DataLoader of PyTorch
decodes it in every rank.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image

from benchmarks.data_rival import (
    BATCH,
    ENERGON,
    OPTIONAL,
    PLACEHOLDER,
    RIVALS,
    Batch,
    Place,
    decode_in_rank,
    is_installed,
    prepare_energon,
)
from benchmarks.harness import (
    Bound,
    Contest,
    Figures,
    Quick,
    Run,
    Worker,
    command,
    conclude,
    in_subprocess,
    take_turns,
    timed,
)
from benchmarks.train import chat, write_shard
from data.index.reader import SampleReader
from data.index.store import load_or_build_index
from data.loader import LoadedStep, StepLoader
from data.modalities.images import ImageProcessor
from data.order import SampleOrder
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from mimo.checkpoint.hf.tiny import build_tokenizer
from mimo.config.training import Data
from mimo.device import Staging, copy_stream
from mimo.families.wire import WirePatches
from mimo.model.decoding import decoding_of, gather_items, pack_language
from mimo.model.step_plan import StepPlanner
from mimo.parallel.connections import SHARED_MEMORY, Host
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

_FAMILY = "qwen2_5_vl"
_WORDS = 60  # of a sample's text
_DISTINCT = 4  # photos of each size; samples take turns with them
_OCTAVES, _COLOUR_FROM = range(1, 9), 5  # details of 2 to 256 pixels; larger ones have colours
_ROUGHNESS, _CONTRAST, _GRAIN, _QUALITY = 0.6, 45, 6, 95  # 3.5 bits a pixel, as cameras write
_PHOTO, _LARGE = (1024, 768), (4000, 3000)
_TINY, _TINIER = (200, 150), (90, 120)
_LANE_RANKS = (2, 4)
_GOALS = {"webdataset": 1.5, "energon": 1.2, "DataLoader": 1.2}  # times our CPU seconds
_ROUNDING = 0.05  # of values: torchvision rounds in another way
_VISION, _ENDLESS = "vision", 1_000_000  # steps

Size = tuple[int, int]


@dataclass(frozen=True)
class Workload:
    """A folder with shards and their index: one sample in ``BATCH`` has the first size.

    num_shards: each has equally many whole batches, so that workers have equal parts.
    """

    directory: Path
    sizes: tuple[Size, Size]
    num_samples: int
    num_shards: int

    def __str__(self) -> str:
        """Its images, in words."""
        first, other = (f"{width} × {height}" for width, height in self.sizes)
        return other if first == other else f"{other}, one in {BATCH} {first}"

    @property
    def num_batches(self) -> int:
        """The number of batches in a pass over the samples."""
        return self.num_samples // BATCH

    @property
    def tokenizer(self) -> Path:
        """In Hugging Face format."""
        return self.directory / "tokenizer"

    @property
    def shards(self) -> list[Path]:
        """All of them."""
        return [self.directory / f"{number:05d}.tar" for number in range(self.num_shards)]

    def write(self) -> float:
        """Write everything; return the mean bytes of an image."""
        rng = np.random.default_rng(0)
        self.directory.mkdir(parents=True)
        build_tokenizer(_FAMILY).save_pretrained(str(self.tokenizer))
        photos = {size: [_photo(*size, rng) for _ in range(_DISTINCT)] for size in set(self.sizes)}
        samples: list[dict[str, Any]] = []
        for number in range(self.num_samples):
            of_size = photos[self.sizes[0 if number % BATCH == 0 else 1]]
            image = of_size[number // BATCH % len(of_size)]
            text = chat(_WORDS, 1, rng)
            samples.append({"__key__": f"sample{number:06d}", "json": text, "0.jpg": image})
        each = self.num_samples // self.num_shards
        for number, path in enumerate(self.shards):
            write_shard(path, samples[number * each : (number + 1) * each])
        self.reader()  # writes the index
        return float(np.mean([len(sample["0.jpg"]) for sample in samples]))

    def reader(self) -> SampleReader:
        """Ours; its processor's defaults are the limits of Qwen2.5-VL."""
        tokens = ChatTokenizer(self.tokenizer, {"image": MediaText(PLACEHOLDER)})
        media = {"image": ImageProcessor()}
        index = load_or_build_index(str(self.directory / "*.tar"), tokens, media)
        return SampleReader(index, tokens, media)


def _photo(width: int, height: int, rng: np.random.Generator) -> bytes:
    """A JPEG of smooth shapes of all sizes, some with colours, and the grain of a sensor."""
    total = np.zeros((height, width, 3), np.float32)
    for octave in _OCTAVES:
        cell = 2**octave
        shares = [(slice(None), 1.0)]  # channels, and how much they get
        if octave >= _COLOUR_FROM:
            shares += [(slice(0, 1), 0.3), (slice(2, 3), 0.3)]
        for channels, weight in shares:
            shape = height // cell + 2, width // cell + 2
            coarse = Image.fromarray(rng.standard_normal(shape, np.float32))
            fine = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
            total[..., channels] += weight * cell**_ROUGHNESS * fine[..., None]
    total *= _CONTRAST / total.std()
    total += 128 + _GRAIN * rng.standard_normal((height, width, 1), np.float32)
    buffer = io.BytesIO()
    pixels = total.clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


# ------------------------------------------------------------------------------ loaders

Loader = Callable[[Workload, Place], Iterator[Batch]]
"""Batches without end."""


def planned_batches(workload: Workload, place: Place, shares: bool) -> Iterator[Batch]:
    """Our plan and packing, epoch after epoch.

    shares: decode by our loader, which shares the work with the other ranks; else by a DataLoader
    of PyTorch in each rank.
    """
    reader, tp = workload.reader(), place.num_ranks
    grids = {_VISION: GridSpec(_VISION, tp=tp)}
    layout = Layout(GridSpec(LANGUAGE, tp=tp), grids, tp, frozenset(grids))
    order = SampleOrder([len(reader.index)], [1.0], 0, None)
    media = {_VISION: ("image",)}
    planner = StepPlanner(layout, media, [reader.index], order, BATCH, 1, rank=place.rank)
    if not shares:
        for loaded in decode_in_rank(planner, reader, place.rank, place.num_workers):
            yield _packed(loaded, planner, reader, place.rank)
    free = shutil.disk_usage(SHARED_MEMORY).free
    host = Host(tuple(range(tp)), place.job, free, len(os.sched_getaffinity(0)))
    ahead = Data.model_fields["prefetch_mib"].default * 2**20
    with decoding_of([reader], layout, place.rank, host, place.num_workers, ahead) as decoding:
        loader = StepLoader(planner, [reader], decoding, 0, _ENDLESS)
        while True:
            yield _packed(loader.next(), planner, reader, place.rank)


def _packed(loaded: LoadedStep, planner: StepPlanner, reader: SampleReader, rank: int) -> Batch:
    """Pack and stage a step of one microbatch as training does."""
    plan = planner.finish(loaded.microbatches)
    (lane,) = pack_language(loaded, plan, [reader], 0, reader.chat.pad_token_id)
    coords, form = planner.layout.encoders[_VISION].coords(rank), reader.processors["image"].wire
    (items,) = gather_items(loaded, plan, [reader], _VISION, coords, form)
    assert items.patches is not None, "the first stage has patches"
    staging = Staging(copy_stream())
    loss_at = np.flatnonzero(lane.loss_mask)
    arrays = (lane.input_ids, lane.position_ids, lane.labels[loss_at], loss_at)
    ids, *others = (staging.copy(torch.from_numpy(array)) for array in arrays)
    wire = WirePatches.of(items.patches, staging.join, staging.copy)
    samples = plan.microbatches[0].samples.sample.tolist()
    return Batch(
        keys=[reader.index.key(sample) for sample in samples],
        input_ids=ids,
        tokens=list(lane.real_lengths),
        pixels=wire.parts[0],
        patches=[len(patches) for _, patches in items.patches[1:]],
        others=[*others, torch.from_numpy(items.grids)],
    )


OURS: Loader = partial(planned_batches, shares=True)
DATALOADER: Loader = partial(planned_batches, shares=False)


def batches_of(loader: Loader, workload: Workload, place: Place) -> Iterator[Batch]:
    """Start a loader in this process."""
    torch.set_num_threads(1)  # as in workers; else one rival's process would use all cores
    warnings.filterwarnings("ignore", "'pin_memory' argument")  # there may be no device
    return loader(workload, place)


def one_pass(loader: Loader, workload: Workload, num_workers: int, num_ranks: int = 1) -> Run:
    """Time a pass of all ranks of a lane after one that is not timed, so that queues are filled.

    The result has the number of samples, and the bytes that a rank hands over for the device.
    """

    def make(rank: int, job: str) -> Callable[[], dict[str, int]]:
        batches = batches_of(loader, workload, Place(num_workers, rank, num_ranks, job))

        def one() -> dict[str, int]:
            keys, num_bytes = set[str](), 0
            for batch in islice(batches, workload.num_batches):
                keys.update(batch.keys)
                num_bytes += batch.num_bytes
            return {"samples": len(keys), "bytes": num_bytes}

        return one

    with ExitStack() as stack:
        job = f"bench{uuid.uuid4().hex}"
        sides = [partial(make, rank, job) for rank in range(num_ranks)]
        ranks = [stack.enter_context(Worker(side)) for side in sides]
        threads = stack.enter_context(ThreadPoolExecutor(num_ranks))

        def run() -> dict[str, int]:
            results = list(threads.map(Worker.__call__, ranks))
            return results[0]

        run()
        return timed(run)


def difference(loader: Loader, workload: Workload) -> tuple[float, int]:
    """Return the largest difference of a pixel's value to ours, and samples with other tokens.

    For a process of its own.
    """
    wire, ours = ImageProcessor().wire, {}
    for batch in islice(batches_of(OURS, workload, Place()), workload.num_batches):
        ours |= {key: (ids, pixels) for key, ids, pixels in batch.samples()}
    largest, others = 0.0, set(ours)
    for batch in islice(batches_of(loader, workload, Place()), workload.num_batches):
        for key, ids, pixels in batch.samples():
            if torch.equal(ids, ours[key][0]):
                others.discard(key)
            values = torch.from_numpy(wire.values(ours[key][1].numpy()))
            largest = max(largest, float((values - pixels).abs().max()))
    return largest, len(others)


# --------------------------------------------------------------------------- the command


def judge(
    contests: Sequence[Contest], num_samples: int, differences: Mapping[str, tuple[float, int]]
) -> list[Bound]:
    """Every promise, kept or not: that it was the same work, and how much faster."""
    passes = [run for contest in contests for runs in contest.runs.values() for run in runs]
    left_out = num_samples - min(run.result["samples"] for run in passes)
    bounds = [Bound("samples that a pass left out", left_out, 0, True)]
    for rival, (pixels, tokens) in differences.items():
        bounds.append(Bound(f"{rival}: samples with other tokens", tokens, 0, True))
        most = 0.0 if rival.endswith("pil") else _ROUNDING
        bounds.append(Bound(f"{rival}: difference of pixel values", pixels, most, True))
    for contest in contests:
        for rival in [*contest.runs][1:]:
            name = f"CPU time of {rival}: {contest.name}, by ours"
            goal = _GOALS[rival.split(",")[0]]
            bounds.append(Bound(name, contest.ratio(rival, "processor_seconds"), goal, False))
    return bounds


def main(
    samples: Annotated[int, typer.Option(min=1, help="Samples of a pass, at least.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes of each loader.")] = 3,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    quick: Quick = False,
    json_path: Figures = None,
) -> int:
    """Compare loaders on the same photos; return 1 when a bound is missed."""
    workers, rounds = workers or len(os.sched_getaffinity(0)), 1 if quick else rounds
    missing = [package for package in OPTIONAL if not is_installed(package)]
    rivals: dict[str, Loader] = {}
    for backend in ("pil", "torchvision") if "torchvision" not in missing else ("pil",):
        for name, batches in RIVALS.items():
            if name != "energon" or ENERGON not in missing:
                rivals[f"{name}, {backend}"] = partial(batches, backend=backend)
    samples = -(-samples // (BATCH * workers)) * BATCH * workers  # workers have equal parts
    sizes = [(_TINY, _TINIER)] if quick else [(_PHOTO, _PHOTO), (_LARGE, _PHOTO)]
    notes = [f"left out: {package} (pip install {package})" for package in missing]
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        workloads = [
            Workload(Path(directory) / str(number), pair, samples, workers)
            for number, pair in enumerate(sizes)
        ]
        for workload in workloads:
            notes.append(f"{workload}: {workload.write() / 1e6:.2f} MB a JPEG")
            if ENERGON not in missing:
                in_subprocess(partial(prepare_energon, workload))
        differences = {
            name: in_subprocess(partial(difference, loader, workloads[-1]))
            for name, loader in rivals.items()
        }
        turns: dict[tuple[str, str], Callable[[], Run]] = {}
        for workload in workloads:
            for number in (0, workers):
                for name, loader in {"ours": OURS, **rivals}.items():
                    where = f"{workload}, {number} workers"
                    turns[where, name] = partial(one_pass, loader, workload, number)
        for number in _LANE_RANKS[:1] if quick else _LANE_RANKS:
            for name, loader in {"ours": OURS, "DataLoader": DATALOADER}.items():
                where = f"{workloads[0]}, {number} ranks of a lane"
                turns[where, name] = partial(one_pass, loader, workloads[0], 1, number)
        passes = take_turns(turns, rounds, verbose=True)
    runs: dict[str, dict[str, list[Run]]] = {}
    for (where, name), of_loader in passes.items():
        runs.setdefault(where, {})[name] = of_loader
    contests = [Contest(place, of_place) for place, of_place in runs.items()]
    return conclude(
        "The input path of loaders on the same photos",
        contests,
        {
            "samples/s": lambda contest, name: f"{samples / contest.median(name):.1f}",
            "CPU ms / sample": lambda contest, name: (
                f"{1e3 * contest.median(name, 'processor_seconds') / samples:.1f}"
            ),
            "MB / sample": lambda contest, name: (
                f"{contest.median(name, 'bytes') / samples / 1e6:.2f}"
            ),
        },
        judge(contests, samples, differences),
        json_path,
        notes=notes,
        judge_speed=not quick,
    )


if __name__ == "__main__":
    command(main)()
