"""The baselines of `benchmarks.data`: webdataset, Megatron-Energon and PyTorch's DataLoader.

The first two prepare samples by the image processor and the tokenizer of transformers, as users
write a loader, and lay those of a batch one after the other. Positions they leave to the model.
DataLoader decodes by our reader what our plan asks for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.decoding import Task
from data.index.reader import SampleReader
from data.loader import LoadedStep
from data.text.chat import EncodedSample
from data.worker_process import TEXT, decode
from mimo.model.decoding import tasks_of_step
from mimo.model.step_plan import StepPlanner

if TYPE_CHECKING:
    from benchmarks.data import Workload

IGNORED = -100  # what transformers leaves out of the loss
_END = "<|im_end|>"
PLACEHOLDER, BATCH = "<|image_pad|>", 8  # samples that are packed together
Backend = Literal["pil", "torchvision"]
ENERGON = "megatron-energon"
OPTIONAL = (ENERGON, "torchvision")


def is_installed(package: str) -> bool:
    """Whether an optional package is there; it is not imported."""
    return any(distributions(name=package))


@dataclass(frozen=True)
class Batch:
    """What a loader hands over for one microbatch.

    keys: of its samples. input_ids: (T,) of all. tokens, patches: of each sample. pixels: (P, W).
    others: whatever else goes to the device.
    """

    keys: list[str]
    input_ids: Tensor
    tokens: list[int]
    pixels: Tensor
    patches: list[int]
    others: list[Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of all that goes to the device."""
        return sum(tensor.nbytes for tensor in (self.input_ids, self.pixels, *self.others))

    def samples(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Each sample's key, token ids and pixels."""
        ids, pixels = self.input_ids.split(self.tokens), self.pixels.split(self.patches)
        return zip(self.keys, ids, pixels, strict=True)


@dataclass(frozen=True)
class Place:
    """Where a loader runs: a rank of the one lane, its workers, and the name of its job."""

    num_workers: int = 0
    rank: int = 0
    num_ranks: int = 1
    job: str = ""


def answer_labels(tokenizer: Any, ids: Tensor, messages: Sequence[dict[str, Any]]) -> Tensor:
    """(S,) token ids of a chat -> (S,) labels on its answer and the end of it."""
    labels = torch.full_like(ids, IGNORED)
    answer = messages[-1]["content"][0]["text"]
    end = int((ids == tokenizer.convert_tokens_to_ids(_END)).nonzero().max())
    first = end - len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    labels[first : end + 1] = ids[first : end + 1]
    return labels


class Preparation:
    """What the first two do with samples. backend: of transformers' image processor."""

    def __init__(self, tokenizer: Path, backend: Backend) -> None:
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as by_pillow

        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
        if backend == "pil":
            self.images: Any = by_pillow.Qwen2VLImageProcessorPil()
        else:
            from transformers.models.qwen2_vl import image_processing_qwen2_vl as by_torchvision

            self.images = by_torchvision.Qwen2VLImageProcessor()

    def encode(self, key: str, chat: Mapping[str, Any], image: Image.Image) -> dict[str, Any]:
        """One sample: token ids, labels on the answer, and patches."""
        patches = self.images(images=[image], return_tensors="pt")
        messages, tokens = chat["messages"], self.tokenizer
        rows = int(patches["image_grid_thw"].prod()) // self.images.merge_size**2
        text = tokens.apply_chat_template(messages, tokenize=False)
        text = text.replace(PLACEHOLDER, rows * PLACEHOLDER)
        ids = tokens(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        return {"key": key, "ids": ids, "labels": answer_labels(tokens, ids, messages), **patches}

    def pack(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The fields of a batch."""
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        return {
            "keys": columns["key"],
            "input_ids": torch.cat(columns["ids"]),
            "tokens": [len(ids) for ids in columns["ids"]],
            "pixels": torch.cat(columns["pixel_values"]),
            "patches": [len(pixels) for pixels in columns["pixel_values"]],
            "others": [torch.cat(columns["labels"]), torch.cat(columns["image_grid_thw"])],
        }

    def batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch."""
        return Batch(**self.pack(samples))


def webdataset_batches(workload: Workload, place: Place, backend: Backend) -> Iterator[Batch]:
    """Epoch after epoch, in the order of the shards."""
    from webdataset.compat import WebDataset, WebLoader

    prepare = Preparation(workload.tokenizer, backend)

    def encode(sample: dict[str, Any]) -> dict[str, Any]:
        return prepare.encode(sample["__key__"], sample["json"], sample["0.jpg"])

    samples: Any = WebDataset([str(path) for path in workload.shards], shardshuffle=False)
    batches = samples.decode("pil").map(encode).batched(BATCH, collation_fn=prepare.batch).repeat()
    yield from WebLoader(batches, batch_size=None, num_workers=place.num_workers)


def prepare_energon(workload: Workload) -> None:
    """Write Megatron-Energon's own index beside the shards."""
    from megatron.energon.flavors.webdataset import (  # pyright: ignore[reportMissingImports]
        prepare,
    )

    prepare.WebdatasetPreparator.prepare_dataset(
        workload.directory,
        [path.name for path in workload.shards],
        split_parts_ratio=[("train", 1.0)],
        workers=1,
    )
    kind = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    (workload.directory / ".nv-meta" / "dataset.yaml").write_text(json.dumps(kind))


def energon_batches(workload: Workload, place: Place, backend: Backend) -> Iterator[Batch]:
    """Epoch after epoch."""
    from megatron import energon  # pyright: ignore[reportAttributeAccessIssue]

    prepare = Preparation(workload.tokenizer, backend)

    class Tasks(energon.TaskEncoder):
        decoder = energon.SampleDecoder(image_decode="pilrgb")
        cookers = [energon.Cooker(energon.stateless(lambda sample: sample))]

        @energon.stateless
        def encode_sample(self, sample: Any) -> Any:
            return prepare.encode(sample["__key__"].split("/")[-1], sample["json"], sample["0.jpg"])

        def batch(self, samples: Any) -> Any:
            return prepare.pack(samples)

    dataset = energon.get_train_dataset(
        workload.directory,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=place.num_workers),
        batch_size=BATCH,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Tasks(),
    )
    names = Batch.__dataclass_fields__
    for batch in energon.get_loader(dataset):
        yield Batch(**{name: batch[name] for name in names})


RIVALS = {"webdataset": webdataset_batches, "energon": energon_batches}


class Decoded(Dataset[list[Tensor]]):
    """The texts and items of a reader, by kind and number."""

    def __init__(self, reader: SampleReader) -> None:
        self.reader = reader

    def __getitem__(self, key: tuple[str, int]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in decode(self.reader, *key)]


def decode_in_rank(
    planner: StepPlanner, reader: SampleReader, rank: int, num_workers: int
) -> Iterator[LoadedStep]:
    """Load the steps of a plan, of one microbatch each, by a DataLoader in this rank alone."""
    planned: deque[tuple[LoadedStep, list[Task]]] = deque()

    def batches() -> Iterator[list[tuple[str, int]]]:
        for step in count():
            microbatches = planner.microbatches(step)
            tasks = tasks_of_step(
                step,
                microbatches,
                [reader],
                Path,
                layout=planner.layout,
                rank=rank,
                host_ranks=(rank,),
            )
            loaded = LoadedStep(step, microbatches, planner.used_before(step + 1), [{}], [{}])
            planned.append((loaded, [*tasks]))
            yield [(task.kind, task.address) for task in planned[-1][1]]

    sampler: Any = batches()
    for decoded in DataLoader(
        Decoded(reader), batch_sampler=sampler, num_workers=num_workers, collate_fn=list
    ):
        loaded, tasks = planned.popleft()
        for task, tensors in zip(tasks, decoded, strict=True):
            if task.kind == TEXT:
                arrays = (tensor.numpy() for tensor in tensors)
                loaded.encoded[0][task.number] = EncodedSample(*arrays)
            else:
                loaded.patches[0][task.source, task.address] = tensors[0]
        yield loaded
