"""Training steps of a small language model on ranks of the fsdp engine, and what they held."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fsdp_job import (
    OPTIMIZER,
    Job,
    Outcome,
    Wrapper,
    microbatches,
    num_loss_tokens,
    plain_model,
    seed_weights,
)


def make_topology(job: Job) -> Any:
    from mimo.parallel.grids import GridSpec, Layout
    from mimo.parallel.groups import build_topology

    grid = GridSpec("language", tp=job.tp, dp=job.lanes, engine="fsdp", dp_replicate=job.replicate)
    return build_topology(Layout(grid, {}, job.world))


def context(job: Job, mesh: Any) -> Any:
    from mimo.engines.fsdp.context import FsdpContext

    return FsdpContext(
        mesh,
        job.dtype,
        reshard_after_forward=job.reshard_after_forward,
        reduce_gradients=job.reduce_gradients,
    )


def same_names(shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Names of transformers itself."""
    from mimo.engines.fsdp.sharding import Names, Rows

    return Names.of((key, shape, [Rows(key, 0, shape[0])]) for key, shape in shapes.items())


def build(job: Job, topology: Any, names: Any = None, plain: bool = False) -> Any:
    """The model as an `FsdpModule`, built on meta and loaded slice by slice.

    plain: without a mesh. What was read is ``whole.asked``.
    """
    from mimo.engines.fsdp.models import on_meta
    from mimo.engines.fsdp.module import FsdpModule
    from mimo.engines.fsdp.sharding import load, shard

    ctx = context(job, None if plain else topology.meshes["language"])
    reference = plain_model(job)
    drawn = seed_weights(reference)
    model = on_meta(reference.config, "eager", job.stored)
    wrapper = Wrapper(model, ctx.tp, sums_heads=job.plant != "no sum over tp")
    for name, param in wrapper.named_parameters():
        param.requires_grad_(not any(part in name for part in job.frozen))
    shard(wrapper, ctx)
    wrapper.asked = Asked(drawn)
    load(wrapper, ctx, torch.device("cpu"), wrapper.asked)
    names = names or same_names({key: tuple(weight.shape) for key, weight in drawn.items()})
    groups = topology.modules["language"]
    return FsdpModule("language", groups, wrapper, ctx, names, OPTIMIZER, 1e-2)


class Asked:
    """A reader that answers from memory, and notes how much it was asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.elements: dict[str, int] = {}

    def __call__(self, key: str, rows: slice, columns: slice) -> Tensor:
        tensor = self.tensors[key][rows]
        if columns != slice(None):
            tensor = tensor[:, columns]
        assert key not in self.elements, f"{key} is read twice"
        self.elements[key] = tensor.numel()
        return tensor


def train_step(module: Any, job: Job, step: int, lane: int, lanes: int) -> float:
    """Forward, backward, gradients complete, norm over all ranks; the update is left out."""
    batches = [b for n in range(lane, job.lanes, lanes) for b in microbatches(job, step, n)]
    module.begin_step(forward_only=False)
    sizes = [(batch.ids.shape[1], batch.ids.shape[0]) for batch in batches]

    def forward(number: int, chunk: Any) -> Tensor:
        return chunk.run(**batches[number].inputs)

    losses = module.run_language(forward, range(len(batches)), sizes, False)
    module.finish_gradients(num_loss_tokens(job, step, job.lanes))
    return float(torch.stack(losses).sum())


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
    for sent_by_rank in ranks:
        for key, shape, row, column, values in sent_by_rank:
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
        held = {kind: sum(t.numel() for t in tensors) for kind, tensors in module.tensors().items()}
        assert held["gradients"] == sum(values.numel() for *_, values in gradients)
        assert held["parameters"] >= held["gradients"], "frozen weights have none"
        weights = sent(module.pieces("save", with_optimizer=False))
        topology.close()
    tensors = {"gradients": gradients, "weights": weights}
    return tensors | {"norms": norms, "losses": totals, "reductions": reductions}


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


@contextmanager
def planted(mistake: str) -> Iterator[None]:
    """Inside it the engine makes a mistake; others are made by `build`."""
    from torch.distributed.fsdp import FSDPModule

    from mimo.engines.fsdp import module

    reduce = module.reduce_gradients
    changes = {
        "average": (FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
        "always reduce": (module, "reduce_gradients", lambda whole, **_: reduce(whole, now=True)),
    }
    with mock.patch.object(*changes[mistake]) if mistake in changes else nullcontext():
        yield


def outcome(ranks: Sequence[dict[str, Any]]) -> Outcome:
    """Of one job, from what its ranks have."""

    def join(kind: str) -> dict[str, Tensor]:
        whole = assembled([rank[kind] for rank in ranks], once=kind == "weights")
        return {key.removeprefix("language."): tensor for key, tensor in whole.items()}

    norms = ranks[0]["norms"]
    assert all(rank["norms"] == norms for rank in ranks)
    totals = [math.fsum(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return Outcome(join("gradients"), join("weights"), norms, totals)


def worst(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error of a tensor, by the project's measure, and its name."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    total = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    errors = []
    for name, value in expected.items():
        difference = got[name].double().view(value.shape) - value.double()
        floor = max(float(value.abs().max()), 1e-6 * total)
        errors.append((float(difference.abs().max()) / floor, name))
    return max(errors)
