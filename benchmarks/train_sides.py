"""Both sides of `benchmarks.train`: our training loop, and transformers as its users write a step.

Each is loaded in a process of its own. Letters: B samples of a batch, S tokens of the longest,
padding included.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from webdataset.compat import WebDataset

from benchmarks.data_rival import IGNORED, answer_labels
from benchmarks.harness import timed
from benchmarks.train import LENGTHS, OURS, THEIRS, Workload, batches_of, lengths_of
from data.modalities.transformers import load_processor
from mimo.checkpoint.hf.initial import initial_weights
from mimo.config.schema import Recipe, Train
from mimo.device import initialize_distributed, set_threads
from mimo.model.dataset import open_dataset
from mimo.model.step_plan import StepPlan
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology
from mimo.train.loop import Trainer
from mimo.train.step import StepObserver

_TIMEOUT_SECONDS = 1800.0


def our_side(workload: Workload, steps: int, threads: int) -> Callable[[str], Any]:
    """Return a function that lets a contestant do a step; call this in a process of its own."""
    set_threads(threads, 1)
    initialize_distributed(0, 1, HashStore(), _TIMEOUT_SECONDS)
    contestants = {
        name: OurSteps(workload.recipe(lengths_of(name), steps, threads)) for name in OURS
    }
    return lambda name: timed(contestants[name].step, until_idle=True)


class Counts(StepObserver):
    """What the plan of the last step says."""

    def planned(self, step: int, plan: StepPlan) -> None:
        """Count tokens, with and without padding."""
        computed = sum(int(m.samples.lane_tokens.sum()) for m in plan.microbatches)
        self.last: dict[str, float] = {"tokens": plan.num_tokens, "computed": computed}


class OurSteps:
    """`mimo train` on one rank, step by step, in a world of one that exists."""

    def __init__(self, recipe: Recipe) -> None:
        topology = build_topology(build_layout(recipe))
        trainer = Trainer(recipe, topology, Path(recipe.train.run_dir), initial_weights(recipe))
        dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
        assert dataset is not None, "the recipe has a source"
        self.counts = Counts()
        self._steps = trainer.train(dataset, None, self.counts)

    def step(self) -> dict[str, float]:
        """Do one step; return the loss per loss token, and what was counted."""
        return {"loss": next(self._steps)["loss"], **self.counts.last}


def their_side(workload: Workload, threads: int) -> Callable[[str], Any]:
    """Return a function that lets a contestant do a step; call this in a process of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    set_threads(threads, 1)
    collators = {name: Collator(workload.checkpoint, workload.shard(name)) for name in LENGTHS}
    train = workload.recipe("equal", 1, threads).train
    contestants = {}
    for name in THEIRS:
        collator = collators[lengths_of(name)]
        batches = batches_of(name, collator.lengths, workload.sizes.tokens)
        contestants[name] = TransformersSteps(workload.checkpoint, collator, batches, train)
    return lambda name: timed(contestants[name].step, until_idle=True)


class Collator:
    """Samples of a shard -> inputs of the model, labels on the answers.

    lengths: tokens of each sample.
    """

    def __init__(self, checkpoint: Path, shard: Path) -> None:
        self.processor = load_processor(checkpoint)
        self.tokenizer = self.processor.tokenizer
        self.tokenizer.padding_side = "right"
        self._samples: list[dict[str, Any]] = list(
            WebDataset(str(shard), shardshuffle=False, nodesplitter=None)
        )
        counted = [self([number]) for number in range(len(self._samples))]
        self.lengths = [inputs["input_ids"].shape[1] for inputs in counted]
        self.loss_tokens = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in counted]

    def __call__(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Inputs (B, S), labels (B, S) and the pixels of all images."""
        chosen = [self._samples[n] for n in samples]
        chats = [json.loads(sample["json"])["messages"] for sample in chosen]
        files = [
            sample[name] for sample in chosen for name in sorted(sample) if name.endswith("png")
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
        labels = torch.stack([answer_labels(self.tokenizer, ids, chat) for ids, chat in rows])
        return {**inputs, "labels": labels}


def adamw(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """As our recipe's; fused, as is the default of transformers' Trainer."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, fused=True)


class TransformersSteps:
    """Train a model of transformers with AdamW.

    batches: the samples of each forward pass of a step. train: settings of our recipe.
    """

    def __init__(
        self, checkpoint: Path, collator: Collator, batches: Sequence[Sequence[int]], train: Train
    ) -> None:
        from transformers import AutoModelForImageTextToText

        self.collator, self.batches, lengths = collator, batches, collator.lengths
        self.counts = {
            "tokens": sum(lengths),
            "computed": sum(len(batch) * max(lengths[n] for n in batch) for batch in batches),
        }
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            str(checkpoint), dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        ).train()
        assert train.clip_grad_norm is not None, "the recipe clips"
        self.clip, self.optimizer = train.clip_grad_norm, adamw(self.model, train)

    def step(self) -> dict[str, float]:
        """Run all batches and one update; return the loss per loss token, and the counts."""
        num_loss_tokens = torch.tensor(sum(self.collator.loss_tokens))
        loss = 0.0
        for batch in self.batches:
            inputs = self.collator(batch)
            output = self.model(**inputs, use_cache=False, num_items_in_batch=num_loss_tokens)
            output.loss.backward()
            loss += float(output.loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, **self.counts}
