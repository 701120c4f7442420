"""The baselines of `benchmarks.data`: webdataset and Megatron-Energon, as users write a loader.

Both prepare samples by the image processor and the tokenizer of transformers, and lay those of a
batch one after the other. Positions they leave to the model; ours are planned with the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from benchmarks.data_workload import BATCH, PLACEHOLDER, Batch, Workload
from benchmarks.train_theirs import answer_labels

Backend = Literal["pil", "torchvision"]
ENERGON = "megatron.energon"
INSTALL = {ENERGON: "megatron-energon", "torchvision": "torchvision"}  # optional, by its import


def is_installed(package: str) -> bool:
    """Whether an optional package is there; it is not imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False


class Preparation:
    """What both rivals do with samples. backend: of transformers' image processor."""

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
        found = self.images(images=[image], return_tensors="pt")
        messages, tokens = chat["messages"], self.tokenizer
        rows = int(found["image_grid_thw"].prod()) // self.images.merge_size**2
        text = tokens.apply_chat_template(messages, tokenize=False)
        text = text.replace(PLACEHOLDER, rows * PLACEHOLDER)
        ids = tokens(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        return {"key": key, "ids": ids, "labels": answer_labels(tokens, ids, messages), **found}

    def pack(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch."""
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        return Batch(
            keys=columns["key"],
            input_ids=torch.cat(columns["ids"]),
            tokens=[len(ids) for ids in columns["ids"]],
            pixels=torch.cat(columns["pixel_values"]),
            patches=[len(pixels) for pixels in columns["pixel_values"]],
            others=[torch.cat(columns["labels"]), torch.cat(columns["image_grid_thw"])],
        )


def webdataset_batches(workload: Workload, num_workers: int, backend: Backend) -> Iterator[Batch]:
    """Epoch after epoch, in the order of the shards."""
    from webdataset.compat import WebDataset, WebLoader

    prepare = Preparation(workload.tokenizer, backend)

    def encode(sample: dict[str, Any]) -> dict[str, Any]:
        return prepare.encode(sample["__key__"], sample["json"], sample["0.jpg"])

    found: Any = WebDataset([str(path) for path in workload.shards], shardshuffle=False)
    found = found.decode("pil").map(encode).batched(BATCH, collation_fn=prepare.pack).repeat()
    yield from WebLoader(found, batch_size=None, num_workers=num_workers)


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


def energon_batches(workload: Workload, num_workers: int, backend: Backend) -> Iterator[Batch]:
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
            return vars(prepare.pack(samples))

    dataset = energon.get_train_dataset(
        workload.directory,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=BATCH,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Tasks(),
    )
    names = Batch.__dataclass_fields__
    for found in energon.get_loader(dataset):
        yield Batch(**{name: found[name] for name in names})


RIVALS = {"webdataset": webdataset_batches, "energon": energon_batches}
