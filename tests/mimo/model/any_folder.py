"""Two training steps from a folder of any class, and the same by transformers in one process."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from data.index.reader import SampleReader
from data.modalities.transformers import TransformersMedia
from data.text.chat import EncodedSample
from mimo.check.compare import RankSteps, Reference, ReferenceParameter
from mimo.check.workload import Sample, picture_samples, write_shard
from mimo.checkpoint.hf.architectures import ARCHITECTURES
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.families.registry import GENERAL
from tests.mimo import tiny

NUM_STEPS = 2
RATE = 0.02
# Two images in a sample, text alone, one image, three images, and a microbatch of text alone.
SAMPLES = picture_samples(6)


def samples_of(model_type: str) -> list[Sample]:
    """Return samples, with one image each where a class prepares or numbers several together."""
    most = 1 if model_type.startswith(("llava_onevision", "minicpm")) else None
    return [replace(sample, items=sample.items[:most]) for sample in SAMPLES]


def make(model_type: str, directory: Path) -> Path:
    """Write a folder of a class, chats, and a recipe for its tower on a rank of its own."""
    write_tiny(TinyCheckpoint(model_type), directory / "base")
    write_shard(directory / "train-00000.tar", samples_of(model_type))
    general = {"family": GENERAL} if model_type in ARCHITECTURES else {}  # else it is the default
    recipe = {
        "name": "any",
        "init_from": str(directory / "base"),
        "language": {"grid": {"dp": 2}, **general},
        "encoders": {"vision": {"grid": {"dp": 1}}},
        "data": {
            "sources": [{"path": str(directory / "train-*.tar")}],
            **{"sequence_length": 2048, "shuffle_block": len(SAMPLES), "workers": 0},
            **{"max_skipped_samples": 0, "cache_directory": str(directory / "cache")},
        },
        "train": {
            **{"steps": NUM_STEPS, "global_batch_size": len(SAMPLES), "micro_batch_size": 1},
            **{"precision": "fp32", "optimizer": "sgd", "learning_rate": RATE},
            **{"schedule": "constant", "clip_grad_norm": None, "threads_per_rank": 1},
            "run_dir": str(directory / "runs"),
        },
    }
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


# ------------------------------------------------------- functions that run inside ranks


def take_steps(rank: int, path: Path, overrides: Sequence[str] = ()) -> RankSteps:
    """Train to the end, with a checkpoint after the last step."""
    from mimo.check.steps import WatchedSteps, keep_fp64, open_trainer
    from mimo.parallel.build import build_layout

    recipe = load_recipe(path, overrides)
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    trainer, dataset = open_trainer(recipe, build_layout(recipe))
    watched = WatchedSteps(trainer.model.modules, rank)
    with keep_fp64(recipe.train.precision):
        metrics = [*trainer.train(dataset, None, watched)]
    return RankSteps(metrics, watched.shards)


def take_plain_steps(rank: int, path: Path, dtype: str = "float32") -> Reference:
    """Train as plain transformers does, one sample at a time; assert that inputs are equal.

    The parameters have the names of transformers.
    """
    from mimo.check.steps import keep_fp64

    recipe = load_recipe(path)
    folder = Path(recipe.init_from or "")
    dataset = tiny.open_sources(recipe)
    (reader,) = dataset.readers
    processor = open_processor(folder)
    model = open_model(folder, dtype).train()
    examples = [
        (prepare(processor, sample), reader.sample(number))
        for number, sample in enumerate(samples_of(model.config.model_type))
    ]
    for number, (inputs, encoded) in enumerate(examples):
        assert_same_inputs(inputs, encoded, reader, number)
    loss_tokens = int(sum(encoded.loss_mask.sum() for _, encoded in examples))
    params = dict(model.named_parameters())
    reference = Reference([], {name: ReferenceParameter() for name in params})
    for _ in range(NUM_STEPS):
        loss = 0.0
        model.zero_grad(set_to_none=True)
        with keep_fp64("fp64" if dtype == "float64" else "fp32"):
            for inputs, encoded in examples:
                summed = loss_of(model, inputs, encoded) / loss_tokens
                summed.backward()
                loss += float(summed.detach())
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        norm = float(torch.stack([g.double().norm() for g in grads.values()]).norm())
        reference.steps.append({"loss": loss, "loss_tokens": loss_tokens, "grad_norm": norm})
        with torch.no_grad():
            for name, param in params.items():
                param -= RATE * grads[name]
                reference.parameters[name].gradients.append(grads[name].numpy().copy())
                reference.parameters[name].weights.append(param.numpy().copy())
    return reference


def open_model(folder: Path, dtype: str = "float32") -> Any:
    """Return the folder's model, as anyone loads it."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = getattr(torch, dtype)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=kind, local_files_only=True)


def open_processor(folder: Path) -> Any:
    """Return the folder's processor, as anyone loads it, with pillow for images."""
    from transformers import AutoImageProcessor, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    # Torchvision rounds differently.
    processor.image_processor = AutoImageProcessor.from_pretrained(
        folder, backend="pil", local_files_only=True
    )
    return processor


def with_pictures(sample: Sample) -> list[dict[str, Any]]:
    """Return the messages of a sample with its pictures, as transformers takes them."""
    pictures = iter(sample.items)
    return [
        {
            "role": message["role"],
            "content": [
                part if part["type"] == "text" else {"type": "image", "image": opened(pictures)}
                for part in message["content"]
            ],
        }
        for message in sample.messages
    ]


def opened(items: Any) -> Image.Image:
    """Return the next picture."""
    return Image.open(io.BytesIO(next(items).content))


def prepare(processor: Any, sample: Sample) -> dict[str, Tensor]:
    """Return the model's inputs."""
    is_cosmos = type(processor).__name__ == "Cosmos3EdgeProcessor"  # its model needs them
    inputs = processor.apply_chat_template(
        with_pictures(sample),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"return_mm_token_type_ids": True} if is_cosmos else {},
    )
    return dict(inputs)


def assert_same_inputs(
    inputs: Mapping[str, Tensor], encoded: EncodedSample, reader: SampleReader, number: int
) -> None:
    """Assert that tokens and pixels of a sample are those of the processor."""
    np.testing.assert_array_equal(encoded.input_ids, inputs["input_ids"][0].numpy())
    arrays = dict[str, list[Tensor]]()
    for item in reader.index.items_of_sample(number):
        media = reader.media(item)
        assert isinstance(media, TransformersMedia)
        values = torch.from_numpy(reader.patches(item))
        frames, height, width = map(int, reader.plan(item).grid)
        form = media.form((frames, height, width))
        for name, array in {**form.arrays, **form.content(values)}.items():
            arrays.setdefault(name, []).append(array)
    for name, parts in arrays.items():
        theirs = torch.as_tensor(inputs[name])
        joined = [join(parts, dim) for dim in range(min(2, parts[0].dim()))]
        assert any(same(ours, theirs) for ours in joined), name


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate, padding all other dimensions with zeros at the end as processors do."""
    sizes = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [(0, n - m) for n, m in zip(sizes, part.shape, strict=True)]
        missing[dim] = (0, 0)
        padded.append(pad(part, [n for pair in reversed(missing) for n in pair]))
    return torch.cat(padded, dim)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether arrays have the same elements in the same order."""
    return torch.equal(ours.flatten(), theirs.flatten().to(ours.dtype))


def loss_of(model: nn.Module, inputs: Mapping[str, Tensor], encoded: EncodedSample) -> Tensor:
    """Return the summed loss of a sample's answer."""
    dtype = next(model.parameters()).dtype
    cast = {
        n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
        for n, v in inputs.items()
    }
    logits = model(**cast, use_cache=False).logits[0]
    wide = logits if dtype == torch.float64 else logits.float()
    learned = torch.from_numpy(encoded.loss_mask).bool()
    labels = inputs["input_ids"][0].roll(-1)
    return nn.functional.cross_entropy(wide[learned], labels[learned], reduction="sum")


def in_our_names(plain: Reference, ranks: Sequence[RankSteps]) -> Reference:
    """Name the parameters as our ranks do; assert that these have all of them."""
    names = {shard.name.partition(".")[2]: shard.name for rank in ranks for shard in rank.shards}
    assert names.keys() == plain.parameters.keys()
    return Reference(plain.steps, {names[n]: p for n, p in plain.parameters.items()})
