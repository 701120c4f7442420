"""Both sides of `benchmarks.train`: our training loop, and transformers as its users write a step.

Each is loaded in a process of its own. Letters: B samples of a batch, S tokens of the longest,
padding included.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from webdataset.compat import WebDataset

from benchmarks.harness import timed
from benchmarks.train import GOALS, IGNORED, Workload, answer_labels
from data.modalities.transformers import load_processor
from mimo.checkpoint.hf.initial import initial_weights
from mimo.config.schema import Train
from mimo.device import initialize_distributed, set_threads
from mimo.model.dataset import open_dataset
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology
from mimo.train.loop import Trainer
from mimo.train.step import StepObserver

_TIMEOUT_SECONDS = 1800.0
_PADDED_BATCH = 8


def our_side(workload: Workload, steps: int) -> Callable[[str], Any]:
    """Return a function that does a step of `mimo train`; call this in a process of its own."""
    set_threads(None, 1)
    initialize_distributed(0, 1, HashStore(), _TIMEOUT_SECONDS)
    trainings = {}
    for lengths in GOALS:
        recipe = workload.recipe(lengths, steps)
        topology = build_topology(build_layout(recipe))
        trainer = Trainer(recipe, topology, Path(recipe.train.run_dir), initial_weights(recipe))
        dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
        assert dataset is not None, "the recipe has a source"
        trainings[lengths] = trainer.train(dataset, None, StepObserver())
    return lambda lengths: timed(partial(next, trainings[lengths]))


def their_side(workload: Workload) -> Callable[[str], Any]:
    """Return a function that does a step; call this in a process of its own."""
    set_threads(None, 1)
    train = workload.recipe("equal", 1).train
    trainings = {lengths: TransformersSteps(workload, lengths, train) for lengths in GOALS}
    return lambda lengths: timed(trainings[lengths].step)


class TransformersSteps:
    """Train a model of transformers with AdamW. train: settings of our recipe."""

    def __init__(self, workload: Workload, lengths: str, train: Train) -> None:
        from transformers import AutoModelForImageTextToText

        self.processor = load_processor(workload.checkpoint)
        self.processor.tokenizer.padding_side = "right"
        shard = str(workload.shard(lengths))
        samples = [*WebDataset(shard, shardshuffle=False, nodesplitter=None)]
        size = _PADDED_BATCH if lengths == "long-tailed" else len(samples)
        self.batches = [samples[at : at + size] for at in range(0, len(samples), size)]
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            str(workload.checkpoint),
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation="sdpa",
        ).train()
        assert train.clip_grad_norm is not None, "the recipe clips"
        self.clip = train.clip_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,  # as is the default of transformers' Trainer
        )

    def step(self) -> dict[str, float]:
        """Run all batches and one update; return the loss per loss token, and the real tokens."""
        batches = [self.collate(samples) for samples in self.batches]
        num_loss_tokens = sum((inputs["labels"][:, 1:] != IGNORED).sum() for inputs in batches)
        loss = 0.0
        for inputs in batches:
            output = self.model(**inputs, use_cache=False, num_items_in_batch=num_loss_tokens)
            output.loss.backward()
            loss += float(output.loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = sum(int(inputs["attention_mask"].sum()) for inputs in batches)
        return {"loss": loss, "tokens": tokens}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return inputs (B, S), labels (B, S) on the answers, and the pixels of all images."""
        chats = [json.loads(sample["json"])["messages"] for sample in samples]
        files = [
            sample[name] for sample in samples for name in sorted(sample) if name.endswith("png")
        ]
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        text = self.processor.apply_chat_template(chats, tokenize=False)
        inputs = self.processor(
            images=images or None,
            text=text,
            padding=True,
            return_tensors="pt",
            add_special_tokens=False,
        )
        rows = zip(inputs["input_ids"], chats, strict=True)
        labels = [answer_labels(self.processor.tokenizer, ids, chat) for ids, chat in rows]
        return {**inputs, "labels": torch.stack(labels)}
