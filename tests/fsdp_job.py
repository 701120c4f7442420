"""Training steps of a small language model under the fsdp engine, and of plain transformers.

The wrapper here is the least that the engine wants; tensor parallelism of its linear layers leaves
the norms of queries and keys with the local heads only.

Letters: B sequences of S tokens, V vocabulary, n tokens with a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

LAYERS = 2
PREFIX = "model."


@dataclass(frozen=True)
class _Optimizer:
    """As Megatron's `OptimizerSettings`, without importing it."""

    name: str = "adam"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-4


OPTIMIZER: Any = _Optimizer()


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

    def __init__(self, model: Any, tp: Any) -> None:
        super().__init__()
        self.model = model
        self.units = list(model.model.layers)
        self.asked: Any = None
        self.sums_over_tp: frozenset[str] = frozenset()
        if tp is not None:
            self._cut(tp)
        self.hf_names = {n: n.removeprefix(PREFIX) for n, _ in self.named_parameters()}

    def _cut(self, tp: Any) -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        column = (*column, "mlp.gate_proj", "mlp.up_proj")
        plan: Any = {name: ColwiseParallel() for name in column}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        for layer in self.units:
            parallelize_module(layer, tp, plan)
        norms = ("q_norm.weight", "k_norm.weight")
        self.sums_over_tp = frozenset(n for n, _ in self.named_parameters() if n.endswith(norms))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        labels: Tensor,
        loss_at: Tensor,
        place: Callable[[Tensor], Tensor] | None = None,
        levels: None = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        model = self.model.model
        hidden = model.embed_tokens(input_ids)
        if place is not None:
            hidden = place(hidden)
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
    found = []
    for number in range(job.microbatches):
        generator = torch.Generator().manual_seed(1000 * step + 10 * lane + number)
        length = 5 + 2 * lane + number
        ids = torch.randint(0, job.vocabulary, (2, length), generator=generator)
        count = 0 if (lane, number) == (1, job.microbatches - 1) else 3 + lane + number
        at = torch.randperm(2 * length, generator=generator)[:count].sort().values
        labels = torch.randint(0, job.vocabulary, (count,), generator=generator)
        found.append(Microbatch(ids, labels, at))
    return found


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
    found = Outcome()
    for step in range(job.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for lane in range(job.lanes):
            for one in microbatches(job, step, lane):
                logits = model(input_ids=one.ids).logits
                total = total + losses(logits, one.labels, one.loss_at).sum()
        (total / num_loss_tokens(job, step, job.lanes)).backward()
        found.losses.append(total.item())
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))  # type: ignore[union-attr]
        found.norms.append(norm)
        found.gradients = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    found.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


# ------------------------------------------------------------------------------- the engine


def make_topology(job: Job) -> Any:
    from mimo.layout.grids import GridSpec, Layout
    from mimo.layout.groups import build_topology

    grid = GridSpec("language", tp=job.tp, dp=job.lanes, engine="fsdp", dp_replicate=job.replicate)
    return build_topology(Layout(grid, {}, job.world))


def context(job: Job, mesh: Any) -> Any:
    from mimo.engines.fsdp.context import FsdpContext

    return FsdpContext(mesh, job.dtype, reshard_after_forward=job.reshard_after_forward)


def same_names(shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Names of transformers itself."""
    from mimo.engines.fsdp.pieces import Names, Rows

    return Names.of((key, shape, [Rows(key, 0, shape[0])]) for key, shape in shapes.items())


def build(job: Job, topology: Any, names: Any = None, plain: bool = False) -> Any:
    """The model as an `FsdpModule`, built on meta and loaded slice by slice.

    plain: without a mesh. What was read is ``whole.asked``.
    """
    from mimo.engines.fsdp.load import load
    from mimo.engines.fsdp.meta import restore_buffers
    from mimo.engines.fsdp.module import FsdpModule
    from mimo.engines.fsdp.sharding import shard

    ctx = context(job, None if plain else topology.meshes["language"])
    drawn = seed_weights(plain_model(job))
    with torch.device("meta"):
        model = plain_model(job)
    restore_buffers(model.model)
    wrapper = Wrapper(model, ctx.tp)
    for name, param in wrapper.named_parameters():
        param.requires_grad_(not any(part in name for part in job.frozen))
    shard(wrapper, ctx)
    wrapper.asked = Asked(drawn)
    load(wrapper, ctx, torch.device("cpu"), wrapper.asked)
    names = names or same_names({key: tuple(one.shape) for key, one in drawn.items()})
    if job.plant == "no sum over tp":
        wrapper.sums_over_tp = frozenset()
    module = FsdpModule(
        "language", topology.modules["language"], wrapper, ctx, names, OPTIMIZER, 1e-2
    )
    return module


class Asked:
    """A reader that answers from memory, and notes how much it was asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.elements: dict[str, int] = {}

    def __call__(self, key: str, rows: slice, columns: slice) -> Tensor:
        found = self.tensors[key][rows]
        if columns != slice(None):
            found = found[:, columns]
        assert key not in self.elements, f"{key} is read twice"
        self.elements[key] = found.numel()
        return found


def train_step(module: Any, job: Job, step: int, lane: int, lanes: int) -> float:
    """Forward, backward, gradients complete, norm over all ranks; the update is left out."""
    own = [one for n in range(lane, job.lanes, lanes) for one in microbatches(job, step, n)]
    module.begin_step(forward_only=False)
    sizes = [(one.ids.shape[1], one.ids.shape[0]) for one in own]
    found = module.run_language(
        lambda number, chunk: chunk.run(**own[number].inputs), range(len(own)), sizes, False
    )
    module.finish_gradients(num_loss_tokens(job, step, job.lanes))
    return float(torch.stack(found).sum())


def norm_of(module: Any) -> float:
    square = module.squared_norm()
    dist.all_reduce(square)
    return math.sqrt(float(square))


Found = list[tuple[str, tuple[int, ...], int, int, Tensor]]


def sent(pieces: Iterator[Any]) -> Found:
    return [(p.key, p.shape, p.row, p.column, p.values.clone().contiguous()) for p in pieces]


def assembled(ranks: Sequence[Found], *, once: bool) -> dict[str, Tensor]:
    """Whole tensors by key; with ``once``, every element came from one rank."""
    whole: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for found in ranks:
        for key, shape, row, column, values in found:
            rows, columns = shape[0], math.prod(shape[1:])
            target = whole.setdefault(key, torch.full((rows, columns), torch.nan).to(values.dtype))
            area = (slice(row, row + values.shape[0]), slice(column, column + values.shape[1]))
            target[area] = values
            count.setdefault(key, torch.zeros(rows, columns))[area] += 1
    for key, number in count.items():
        least, most = float(number.min()), float(number.max())
        assert least >= 1, f"{key} has gaps"
        assert most == 1 or not once, f"{key}: some of it comes {most} times"
    return whole


def train(rank: int, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What one rank has after the steps of each job, one after the other in one world."""
    return [_train(rank, job) for job in jobs]


def _train(rank: int, job: Job) -> dict[str, Any]:
    with planted(job.plant), Counted() as counted:
        topology = make_topology(job)
        module = build(job, topology)
        lane = rank // job.tp
        norms, totals, reductions = [], [], []
        for step in range(job.steps):
            before = counted.reductions
            total = train_step(module, job, step, lane, job.lanes)
            reductions.append(counted.reductions - before)
            totals.append(total if rank % job.tp == 0 else 0.0)
            norms.append(norm_of(module))
            gradients = sent(module.gradients())
            module.update(1e-2, 1.0)
        found = {
            "gradients": gradients,
            "weights": sent(module.pieces("save", with_optimizer=False)),
            "norms": norms,
            "losses": totals,
            "reductions": reductions,
        }
        topology.close()
    return found


class Counted:
    """Counts collectives that reduce gradients over the lanes."""

    def __enter__(self) -> Counted:
        self.reductions, self._real = 0, dist.reduce_scatter_single

        def count(*args: Any, **kwargs: Any) -> Any:
            self.reductions += 1
            return self._real(*args, **kwargs)

        dist.reduce_scatter_single = count
        return self

    def __exit__(self, *_: object) -> None:
        dist.reduce_scatter_single = self._real


class planted:  # noqa: N801
    """Inside it the engine makes a mistake."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def __enter__(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        from mimo.engines.fsdp import module

        self._restore: Callable[[], None] = lambda: None
        match self.mistake:
            case "average":
                real = FSDPModule.set_gradient_divide_factor
                FSDPModule.set_gradient_divide_factor = lambda self, factor: None
                self._restore = lambda: setattr(FSDPModule, "set_gradient_divide_factor", real)
            case "always reduce":
                real_reduce = module.reduce_gradients
                module.reduce_gradients = lambda whole, *, now: real_reduce(whole, now=True)
                self._restore = lambda: setattr(module, "reduce_gradients", real_reduce)

    def __exit__(self, *_: object) -> None:
        self._restore()


def outcome(ranks: Sequence[dict[str, Any]]) -> Outcome:
    """Of one job, from what its ranks have."""
    gradients = assembled([one["gradients"] for one in ranks], once=False)
    weights = assembled([one["weights"] for one in ranks], once=True)
    norms = ranks[0]["norms"]
    assert all(one["norms"] == norms for one in ranks)
    totals = [math.fsum(step) for step in zip(*(one["losses"] for one in ranks), strict=True)]
    return Outcome(_named(gradients), _named(weights), norms, totals)


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("language."): one for key, one in tensors.items()}


def worst(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error of a tensor, by the project's measure, and its name."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    total = math.sqrt(sum(float(one.double().square().sum()) for one in expected.values()))
    errors = []
    for name, want in expected.items():
        have = got[name].double().view(want.shape)
        floor = max(float(want.abs().max()), 1e-6 * total)
        errors.append((float((have - want.double()).abs().max()) / floor, name))
    return max(errors)
