"""Compare our input path with other loaders on the same photos.

One rank reads all samples by our loader and by webdataset, alone and with workers. webdataset
prepares them by the image processor and the tokenizer of transformers, as in a user's loader.
Then the ranks of one lane on one host read the same samples: ours decode each sample once and share
it, a DataLoader of PyTorch decodes by our reader the steps of our plan, in every rank.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks import harness
from benchmarks.harness import Bound, Contest, Run
from benchmarks.train import answer_labels, chat, write_shard
from data.index.reader import SampleReader
from data.index.store import load_or_build_index
from data.loader import LoadedStep, StepLoader
from data.modalities.images import ImageProcessor
from data.order import SampleOrder
from data.text.chat import ChatTokenizer, EncodedSample
from data.text.messages import MediaText
from data.worker_process import TEXT, decode
from mimo.checkpoint.hf.tiny import build_tokenizer
from mimo.config.training import Data
from mimo.device import Staging, copy_stream
from mimo.families.wire import WirePatches
from mimo.model.decoding import decoding_of, gather_items, pack_language, tasks_of_step
from mimo.model.step_plan import StepPlanner
from mimo.parallel.connections import SHARED_MEMORY, Host
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

_BATCH = 8  # samples that are packed together
_WORDS = 60  # of a sample's text
_PLACEHOLDER, _TOKENIZER = "<|image_pad|>", "tokenizer"
_DISTINCT = 4  # photos; samples take turns with them
_SMOOTH, _GRAIN, _QUALITY = 32, 4.5, 95  # 3.5 bits a pixel, as cameras write
_PHOTO, _TINY = (1024, 768), (200, 150)
_GOALS = {"webdataset": 1.5, "DataLoader": 1.2}  # times our CPU seconds
_VISION, _ENDLESS = "vision", 1_000_000  # steps


@dataclass(frozen=True)
class Workload:
    """A folder with shards of photos of one size, and their index.

    num_shards: each has equally many whole batches, so that workers have equal parts.
    """

    directory: Path
    size: tuple[int, int]
    num_samples: int
    num_shards: int

    def write(self) -> None:
        """Write the tokenizer, the shards and their index."""
        rng = np.random.default_rng(0)
        build_tokenizer("qwen2_5_vl").save_pretrained(str(self.directory / _TOKENIZER))
        photos = [_photo(*self.size, rng) for _ in range(_DISTINCT)]
        samples: list[dict[str, Any]] = []
        for number in range(self.num_samples):
            image, text = photos[number % _DISTINCT], chat(_WORDS, 1, rng)
            samples.append({"__key__": f"sample{number:06d}", "json": text, "0.jpg": image})
        for number in range(self.num_shards):
            write_shard(self.directory / f"{number}.tar", samples[number :: self.num_shards])
        self.reader()  # writes the index

    def reader(self) -> SampleReader:
        """Ours; its processor's defaults are the limits of Qwen2.5-VL."""
        tokens = ChatTokenizer(self.directory / _TOKENIZER, {"image": MediaText(_PLACEHOLDER)})
        media = {"image": ImageProcessor()}
        index = load_or_build_index(str(self.directory / "*.tar"), tokens, media)
        return SampleReader(index, tokens, media)


def _photo(width: int, height: int, rng: np.random.Generator) -> bytes:
    """A JPEG of smooth colours and the grain of a sensor."""
    shape = (height // _SMOOTH, width // _SMOOTH, 3)
    coarse = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    pixels = smooth + _GRAIN * rng.standard_normal((height, width, 1), np.float32)
    buffer = io.BytesIO()
    photo = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    photo.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


@dataclass(frozen=True)
class Batch:
    """One microbatch of a loader.

    keys, tokens: of its samples, without padding. tensors: for the device.
    """

    keys: list[str]
    tokens: int
    tensors: list[Tensor]


Loader = Callable[[Workload, int, int, Host], Iterator[Batch]]
"""Batches without end, by workload, workers, rank of the one lane, and all ranks' host."""


def webdataset_batches(workload: Workload, num_workers: int, *_: Any) -> Iterator[Batch]:
    """Yield epoch after epoch, in the order of the shards, without positions."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from webdataset.compat import WebDataset, WebLoader

    tokens: Any = AutoTokenizer.from_pretrained(
        str(workload.directory / _TOKENIZER), local_files_only=True
    )
    images = Qwen2VLImageProcessorPil()

    def encode(sample: dict[str, Any]) -> dict[str, Any]:
        patches: Any = images(images=[sample["0.jpg"]], return_tensors="pt")
        messages = sample["json"]["messages"]
        rows = int(patches["image_grid_thw"].prod()) // images.merge_size**2
        text = tokens.apply_chat_template(messages, tokenize=False)
        text = text.replace(_PLACEHOLDER, rows * _PLACEHOLDER)
        ids = tokens(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        labels = answer_labels(tokens, ids, messages)
        return {"key": sample["__key__"], "ids": ids, "labels": labels, **patches}

    def join(samples: Sequence[dict[str, Any]]) -> Batch:
        names = ("ids", "labels", "pixel_values", "image_grid_thw")
        tensors = [torch.cat([sample[name] for sample in samples]) for name in names]
        return Batch([sample["key"] for sample in samples], len(tensors[0]), tensors)

    shards = sorted(map(str, workload.directory.glob("*.tar")))
    samples: Any = WebDataset(shards, shardshuffle=False)
    batches = samples.decode("pil").map(encode).batched(_BATCH, collation_fn=join).repeat()
    yield from WebLoader(batches, batch_size=None, num_workers=num_workers)


def planned_batches(
    workload: Workload, num_workers: int, rank: int, host: Host, shares: bool = True
) -> Iterator[Batch]:
    """Our plan and packing, epoch after epoch.

    shares: decode by our loader, which shares the work with the other ranks; else by a DataLoader
    of PyTorch in each rank.
    """
    reader, tp = workload.reader(), len(host.ranks)
    grids = {_VISION: GridSpec(_VISION, tp=tp)}
    layout = Layout(GridSpec(LANGUAGE, tp=tp), grids, tp, frozenset(grids))
    order = SampleOrder([len(reader.index)], [1.0], 0, None)
    media = {_VISION: ("image",)}
    planner = StepPlanner(layout, media, [reader.index], order, _BATCH, 1, rank=rank)
    if not shares:
        steps, sampler = _Steps(planner, reader, rank), range(_ENDLESS)
        loader = DataLoader(steps, None, sampler=sampler, num_workers=num_workers)
        for loaded in loader:
            yield _packed(loaded, planner, reader, rank)
    ahead = Data.model_fields["prefetch_mib"].default * 2**20
    with decoding_of([reader], layout, rank, host, num_workers, ahead) as decoding:
        loader = StepLoader(planner, [reader], decoding, 0, _ENDLESS)
        while True:
            yield _packed(loader.next(), planner, reader, rank)


@dataclass(frozen=True)
class _Steps(Dataset[LoadedStep]):
    """The steps of a plan, of one microbatch each, decoded for one rank alone."""

    planner: StepPlanner
    reader: SampleReader
    rank: int

    def __getitem__(self, step: int) -> LoadedStep:
        microbatches = self.planner.microbatches(step)
        loaded = LoadedStep(step, microbatches, self.planner.used_before(step + 1), [{}], [{}])
        places = {"layout": self.planner.layout, "rank": self.rank, "host_ranks": (self.rank,)}
        for task in tasks_of_step(step, microbatches, [self.reader], Path, **places):
            arrays = decode(self.reader, task.kind, task.address)
            if task.kind == TEXT:
                loaded.encoded[0][task.number] = EncodedSample(*arrays)
            else:
                loaded.patches[0][task.source, task.address] = torch.from_numpy(arrays[0])
        return loaded


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
    tensors = [staging.copy(torch.from_numpy(array)) for array in arrays]
    pixels = WirePatches.of(items.patches, staging.join, staging.copy).parts[0]
    keys = [reader.index.key(sample) for sample in plan.microbatches[0].samples.sample.tolist()]
    tensors += [pixels, torch.from_numpy(items.grids)]
    return Batch(keys, sum(lane.real_lengths), tensors)


def one_pass(loader: Loader, workload: Workload, num_workers: int, num_ranks: int = 1) -> Run:
    """Time a pass of all ranks of a lane, after an untimed pass that fills the queues."""
    free, job = shutil.disk_usage(SHARED_MEMORY).free, f"bench{uuid.uuid4().hex}"
    host = Host(tuple(range(num_ranks)), job, free, len(os.sched_getaffinity(0)))

    def make(rank: int) -> Callable[[], dict[str, int]]:
        batches = loader(workload, num_workers, rank, host)

        def one() -> dict[str, int]:
            keys, tokens = set[str](), 0
            for batch in islice(batches, workload.num_samples // _BATCH):
                keys.update(batch.keys)
                tokens += batch.tokens
            return {"samples": len(keys), "tokens": tokens}

        return one

    with harness.workers(*[partial(make, rank) for rank in range(num_ranks)]) as read:
        read()
        return harness.timed(read)


def judge(contests: Sequence[Contest], num_samples: int) -> Iterator[Bound]:
    """Every promise, kept or not: that it was the same work, and how much faster."""
    results = [r.result for contest in contests for runs in contest.runs.values() for r in runs]
    left_out = num_samples - min(result["samples"] for result in results)
    yield Bound("samples that a pass left out", left_out, 0, True)
    tokens = [result["tokens"] for result in results]
    yield Bound("difference of tokens", max(tokens) - min(tokens), 0, True)
    for contest in contests:
        rival = [*contest.runs][1]
        if contest.name != "1 ranks of a lane":  # which has nothing to share
            name = f"CPU time of {rival}: {contest.name}, by ours"
            yield Bound(name, contest.ratio(rival, "processor_seconds"), _GOALS[rival], False)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes of each loader.")] = 3,
    quick: harness.Quick = False,
    json_path: harness.Figures = None,
) -> int:
    """Compare loaders on the same photos; return 1 when a bound is missed."""
    workers = len(os.sched_getaffinity(0))
    size, per_worker, rounds = (_TINY, _BATCH, 1) if quick else (_PHOTO, 2 * _BATCH, rounds)
    samples = per_worker * workers
    places = [(f"{number} workers", "webdataset", number, 1) for number in (0, workers)]
    for number in (1, 2) if quick else (1, 2, 4):
        places.append((f"{number} ranks of a lane", "DataLoader", 1, number))
    loaders: dict[str, Loader] = {
        "webdataset": webdataset_batches,
        "DataLoader": partial(planned_batches, shares=False),
    }
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        workload = Workload(Path(directory), size, samples, workers)
        workload.write()
        contests = []
        for where, rival, *place in places:
            pair = {"ours": planned_batches, rival: loaders[rival]}
            turns = {n: partial(one_pass, loader, workload, *place) for n, loader in pair.items()}
            contests.append(Contest(where, harness.take_turns(turns, rounds)))
    return harness.conclude(
        f"The input path of loaders on the same photos of {size[0]} × {size[1]} pixels",
        contests,
        {
            "samples/s": lambda contest, name: samples / contest.median(name),
            "CPU s": lambda contest, name: contest.median(name, "processor_seconds"),
        },
        [*judge(contests, samples)],
        json_path,
        judge_speed=not quick,
    )


if __name__ == "__main__":
    harness.command(main)()
