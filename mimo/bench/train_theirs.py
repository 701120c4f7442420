"""transformers on the samples of `mimo bench train`, as its users write a training step.

Letters: B samples of a batch, S tokens of the longest, padding included.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mimo.bench.train_result import PADDED_BATCH, Contestant
from mimo.hf.transformers_processor import load_processor

_IGNORED = -100  # what transformers leaves out of the loss
_END = "<|im_end|>"


class Collator:
    """Samples of a shard -> inputs of the model, labels on the answers.

    lengths: tokens of each sample.
    """

    def __init__(self, checkpoint: Path, shard: Path) -> None:
        self.processor = load_processor(checkpoint)
        self.tokenizer = self.processor.tokenizer
        self.tokenizer.padding_side = "right"
        self._end = self.tokenizer.convert_tokens_to_ids(_END)
        with tarfile.open(shard) as tar:
            files = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
            self._files = {name: file.read() for name, file in files.items() if file is not None}
        keys = sorted({name.split(".")[0] for name in self._files})
        self._messages = [json.loads(self._files[f"{key}.json"])["messages"] for key in keys]
        self._images = [
            sorted(n for n in self._files if n.startswith(f"{key}.") and not n.endswith("json"))
            for key in keys
        ]
        counted = [self([number]) for number in range(len(keys))]
        self.lengths = [inputs["input_ids"].shape[1] for inputs in counted]
        self.loss_tokens = [int((one["labels"][:, 1:] != _IGNORED).sum()) for one in counted]

    def __call__(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Inputs (B, S), labels (B, S) and the pixels of all images."""
        chats = [self._messages[n] for n in samples]
        names = [name for n in samples for name in self._images[n]]
        images = [Image.open(io.BytesIO(self._files[name])).convert("RGB") for name in names]
        text = self.processor.apply_chat_template(chats, tokenize=False)
        given: dict[str, Any] = {"images": images} if images else {}
        inputs = self.processor(
            text=text, padding=True, return_tensors="pt", add_special_tokens=False, **given
        )
        ids = inputs["input_ids"]
        labels = torch.full_like(ids, _IGNORED)
        for row, chat in enumerate(chats):
            answer = chat[-1]["content"][0]["text"]
            end = int((ids[row] == self._end).nonzero().max())
            first = end - len(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
            labels[row, first : end + 1] = ids[row, first : end + 1]
        return {**inputs, "labels": labels}


def batches_of(contestant: Contestant, lengths: Sequence[int], tokens: int) -> list[list[int]]:
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


class TransformersSteps:
    """A model of transformers with AdamW. learning_rate, weight_decay, clip: as of our recipe."""

    def __init__(
        self,
        checkpoint: Path,
        collator: Collator,
        batches: Sequence[Sequence[int]],
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
        clip: float,
    ) -> None:
        from transformers import AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            str(checkpoint), dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        ).train()
        self.collator, self.batches, self.clip = collator, batches, clip
        params = list(self.model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]
        # Fused, as is the default of its Trainer.
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    @property
    def computed_tokens(self) -> int:
        """Of a step, padding included."""
        lengths = self.collator.lengths
        return sum(len(batch) * max(lengths[n] for n in batch) for batch in self.batches)

    def step(self) -> float:
        """All batches, one update; returns the loss per loss token."""
        count = sum(self.collator.loss_tokens)
        loss = 0.0
        for batch in self.batches:
            output = self.model(
                **self.collator(batch), use_cache=False, num_items_in_batch=torch.tensor(count)
            )
            output.loss.backward()
            loss += float(output.loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
