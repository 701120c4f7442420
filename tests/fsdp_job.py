"""Training steps of a small language model under the fsdp engine, and of plain transformers.

The wrapper here is the least that the engine wants; tensor parallelism of its linear layers leaves
the norms of queries and keys with the local heads only.

Letters: B sequences of S tokens, V vocabulary, n tokens with a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from mimo.engines.optimizer import OptimizerSettings

LAYERS = 2
PREFIX = "model."


OPTIMIZER = OptimizerSettings("adam", 0.1, 0.9, 0.95, 1e-4)


@dataclass(frozen=True)
class Job:
    """A mesh and what is trained on it.

    frozen: parts of names. plant: a mistake that a test wants found.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    steps: int = 2
    microbatches: int = 3
    dtype: torch.dtype = torch.float64
    vocabulary: int = 99
    tied: bool = True
    biases: bool = True
    frozen: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    reduce_gradients: Literal["step", "microbatch"] = "step"
    plant: str = ""

    @property
    def stored(self) -> torch.dtype:
        """Of the weights."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def lanes(self) -> int:
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return self.lanes * self.tp


def plain_model(job: Job) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=job.vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=job.tied,
        attention_bias=job.biases,
    )
    return Qwen3ForCausalLM._from_config(config, dtype=job.stored, attn_implementation="eager")


def seed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter drawn by its name."""
    drawn = {}
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.1
        drawn[name] = (noise + (1.0 if "norm" in name else 0.0)).to(param.dtype)
    return drawn


class Wrapper(nn.Module):
    """transformers' Qwen3 as the engine wants it."""

    def __init__(self, model: Any, tp: Any, sums_heads: bool = True) -> None:
        super().__init__()
        self.model = model
        self.units, self.ends = list(model.model.layers), ()
        self.asked: Any = None
        if tp is not None:
            self._cut(tp, sums_heads)
        self.hf_names = {n: n.removeprefix(PREFIX) for n, _ in self.named_parameters()}

    def _cut(self, tp: Any, sums_heads: bool) -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        column = (*column, "mlp.gate_proj", "mlp.up_proj")
        plan: Any = {name: ColwiseParallel() for name in column}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        if sums_heads:  # norms of (B, S, heads, D), of which a rank sees its own heads
            norm = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
        for layer in self.units:
            parallelize_module(layer, tp, plan)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        labels: Tensor,
        loss_at: Tensor,
        place: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = None,
        levels: None = None,
        emit: None = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        model = self.model.model
        hidden = model.embed_tokens(input_ids)
        if place is not None:
            hidden = place(hidden, {})
        logits = self.model(inputs_embeds=hidden, position_ids=position_ids[0]).logits
        return losses(logits, labels, loss_at)


def losses(logits: Tensor, labels: Tensor, loss_at: Tensor) -> Tensor:
    """logits (B, S, V) -> (n,), where s·B + b is token s of sequence b."""
    return F.cross_entropy(
        logits.transpose(0, 1).flatten(0, 1)[loss_at].double(), labels, reduction="none"
    )


@dataclass(frozen=True)
class Microbatch:
    ids: Tensor
    labels: Tensor
    loss_at: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        batch, length = self.ids.shape
        positions = torch.arange(length).expand(3, batch, length)
        return {
            "input_ids": self.ids,
            "position_ids": positions,
            "labels": self.labels,
            "loss_at": self.loss_at,
        }


def microbatches(job: Job, step: int, lane: int) -> list[Microbatch]:
    """Of different sizes and numbers of losses; lane 1 has one without any."""
    drawn = []
    for number in range(job.microbatches):
        generator = torch.Generator().manual_seed(1000 * step + 10 * lane + number)
        length = 5 + 2 * lane + number
        ids = torch.randint(0, job.vocabulary, (2, length), generator=generator)
        count = 0 if (lane, number) == (1, job.microbatches - 1) else 3 + lane + number
        at = torch.randperm(2 * length, generator=generator)[:count].sort().values
        labels = torch.randint(0, job.vocabulary, (count,), generator=generator)
        drawn.append(Microbatch(ids, labels, at))
    return drawn


def num_loss_tokens(job: Job, step: int, lanes: int) -> int:
    return sum(m.labels.numel() for lane in range(lanes) for m in microbatches(job, step, lane))


# --------------------------------------------------------------------------- plain PyTorch


@dataclass
class Outcome:
    """Gradients of the last step, weights after it, by transformers' names; norms, losses."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def reference(job: Job) -> Outcome:
    """One rank, plain transformers and torch's own optimizer, all lanes' microbatches."""
    model = plain_model(job)
    drawn = seed_weights(model)
    for name, param in model.named_parameters():
        param.data.copy_(drawn[name])
        param.requires_grad_(not any(part in name for part in job.frozen))
    params = [p for p in model.parameters() if p.requires_grad]
    settings = OPTIMIZER
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    outcome = Outcome()
    for step in range(job.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for lane in range(job.lanes):
            for batch in microbatches(job, step, lane):
                logits = model(input_ids=batch.ids).logits
                total = total + losses(logits, batch.labels, batch.loss_at).sum()
        (total / num_loss_tokens(job, step, job.lanes)).backward()
        outcome.losses.append(total.item())
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))  # type: ignore[union-attr]
        outcome.norms.append(norm)
        outcome.gradients = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    outcome.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome
