"""transformers under FSDP2 on the samples of `mimo bench engines`, as its users write it.

A layer of the language model and of the tower are a unit each, and so is the whole model. Every
rank takes every n-th sample, in padded batches; attention and loss are those of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mimo.bench.train_theirs import Collator, adamw
from mimo.bench.train_workload import Workload
from mimo.device import local_device
from mimo.recipe.schema import Train


def batches_of_rank(num_samples: int, rank: int, ranks: int, batch: int) -> list[list[int]]:
    """The samples of each forward pass of a rank."""
    own = list(range(rank, num_samples, ranks))
    return [own[at : at + batch] for at in range(0, len(own), batch)]


class FullyShardedSteps:
    """A model of transformers on all ranks of an initialised world. train: of our recipe."""

    def __init__(self, workload: Workload, train: Train, batch: int) -> None:
        """batch: samples of a forward pass. Raises RuntimeError for a batch without images."""
        from transformers import AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.collator = Collator(workload.checkpoint, workload.shard("long-tailed"))
        everyone = [
            batches_of_rank(len(self.collator.lengths), r, self.ranks, batch)
            for r in range(self.ranks)
        ]
        self.batches, lengths = everyone[rank], self.collator.lengths
        if not all("pixel_values" in self.collator(own) for own in self.batches):
            raise RuntimeError("a batch has no images: the ranks would wait for each other's tower")
        self.counts = {
            "tokens": sum(lengths),
            "computed": sum(len(b) * max(lengths[n] for n in b) for own in everyone for b in own),
            "batches": sum(map(len, everyone)),
        }
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            str(workload.checkpoint),
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation="sdpa",
        ).train()
        mesh = init_device_mesh(local_device().type, (self.ranks,))
        inner = self.model.model
        for layer in (*inner.visual.blocks, *inner.language_model.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        assert train.clip_grad_norm is not None, "the recipe clips"
        self.clip, self.optimizer = train.clip_grad_norm, adamw(self.model, train)

    def step(self) -> dict[str, float]:
        """All batches, one update: the loss per loss token, and what was counted, of all ranks."""
        count = torch.tensor(sum(self.collator.loss_tokens))
        loss = torch.zeros(())
        for batch in self.batches:
            self.model.set_requires_gradient_sync(batch is self.batches[-1])
            output = self.model(**self.collator(batch), use_cache=False, num_items_in_batch=count)
            (output.loss * self.ranks).backward()  # FSDP2 averages over the ranks
            loss += output.loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        return {"loss": float(loss), **self.counts}
