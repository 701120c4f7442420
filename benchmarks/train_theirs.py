"""transformers on the samples of `benchmarks.train`, as its users write a step.

Letters: B samples of a batch, S tokens of the longest, padding included.
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
from webdataset.compat import WebDataset

from benchmarks.harness import timed
from benchmarks.train_workload import THEIRS, Lengths, Workload, lengths_of
from mimo.checkpoint.hf.recipes import load_processor
from mimo.config.schema import Train
from mimo.device import set_threads

PADDED_BATCH = 8
_IGNORED = -100  # what transformers leaves out of the loss
_END = "<|im_end|>"


def their_side(workload: Workload, threads: int) -> Callable[[str], Any]:
    """For a process of its own: a function that lets a contestant do a step.

    It also tells the mean number of tokens of a sample, by the kind of lengths.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    set_threads(threads, 1)
    collators: dict[Lengths, Collator] = {
        lengths: Collator(workload.checkpoint, workload.shard(lengths))
        for lengths in ("long-tailed", "equal")
    }
    means = {name: sum(one.lengths) / len(one.lengths) for name, one in collators.items()}
    train = workload.recipe("equal", 1, means["equal"], threads).train
    contestants = {}
    for name in THEIRS:
        collator = collators[lengths_of(name)]
        batches = batches_of(name, collator.lengths, workload.sizes.tokens)
        contestants[name] = TransformersSteps(workload.checkpoint, collator, batches, train)

    def answer(what: str) -> Any:
        return means if what == "mean tokens" else timed(contestants[what].step, until_idle=True)

    return answer


def answer_labels(tokenizer: Any, ids: Tensor, messages: Sequence[dict[str, Any]]) -> Tensor:
    """(S,) token ids of a chat -> (S,) labels on its answer and the end of it."""
    labels = torch.full_like(ids, _IGNORED)
    answer = messages[-1]["content"][0]["text"]
    end = int((ids == tokenizer.convert_tokens_to_ids(_END)).nonzero().max())
    first = end - len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    labels[first : end + 1] = ids[first : end + 1]
    return labels


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
        self.loss_tokens = [int((one["labels"][:, 1:] != _IGNORED).sum()) for one in counted]

    def __call__(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Inputs (B, S), labels (B, S) and the pixels of all images."""
        own = [self._samples[n] for n in samples]
        chats = [json.loads(sample["json"])["messages"] for sample in own]
        files = [sample[name] for sample in own for name in sorted(sample) if name.endswith("png")]
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        text = self.processor.apply_chat_template(chats, tokenize=False)
        given: dict[str, Any] = {"images": images} if images else {}
        inputs = self.processor(
            text=text, padding=True, return_tensors="pt", add_special_tokens=False, **given
        )
        rows = zip(inputs["input_ids"], chats, strict=True)
        labels = torch.stack([answer_labels(self.tokenizer, ids, chat) for ids, chat in rows])
        return {**inputs, "labels": labels}


def batches_of(contestant: str, lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples of each forward pass. tokens: most of a batch, padding included."""
    order = list(range(len(lengths)))
    if contestant == "batched equal":
        return [order]
    if contestant == "padded":
        return [order[at : at + PADDED_BATCH] for at in range(0, len(order), PADDED_BATCH)]
    batches: list[list[int]] = []
    for sample in sorted(order, key=lambda n: (lengths[n], n)):
        if batches and (len(batches[-1]) + 1) * lengths[sample] <= tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


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
            "batches": len(batches),
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
