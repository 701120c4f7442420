"""A language model alone, trained for some steps on any grid: what runs inside ranks.

No recipe, no encoder, no bridge: engine, data parallelism, schedule and optimizer. One rank and
any grid see the same microbatches; whole sequences are drawn everywhere and each rank cuts out
what its place in the grid has to see.

Letters: T packed tokens of a lane, S sequence, B batch, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import mrope_position_ids
from tests.mimo import tiny

SEED = 11
NUM_TOKENS = 100
SETTINGS = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_size": 16,
    "rotary_base": 10_000.0,
    "mrope_section": (4, 2, 2),
    "tie_word_embeddings": True,
    "init_std": 0.1,
}
# Multiples of 2·cp·tp for every grid here; (offset, grid in rows) of the images in each segment.
LENGTHS = (24, 8, 16, 16)
IMAGES = ([(2, (1, 2, 3)), (12, (1, 3, 3))], [(0, (1, 1, 4))], [], [(5, (1, 4, 2))])
NUM_LANES = 2
NUM_MICROBATCHES = 4


@dataclass(frozen=True)
class Job:
    """What to train and how; grids differ, the rest is the same on one rank.

    grid: axes of a `GridSpec`. family: of language models. dense: a batch of two sequences instead
    of packed segments. distil: learn drawn logits by their squared errors instead of labels.
    """

    grid: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    family: str = "qwen3"
    dtype: torch.dtype = torch.float32
    steps: int = 1
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    dense: bool = False
    distil: bool = False
    recompute: str = "none"
    overlap: bool = False
    distributed: bool = False
    late: bool = False
    scatter_embedding: bool = True


@dataclass(frozen=True)
class Microbatch:
    """Whole: ids, labels, loss_mask (B, S), position_ids (3, B, S); B = 1 and S = T if packed."""

    ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    lengths: tuple[int, ...] | None
    teacher: Tensor


def microbatches(step: int, lane: int, dense: bool) -> Iterator[Microbatch]:
    """Those of one of NUM_LANES lanes in one step; lanes have other tokens and loss tokens."""
    for number in range(NUM_MICROBATCHES):
        rng = np.random.default_rng([SEED, step, lane, number])
        shape = (2, 32) if dense else (1, sum(LENGTHS))
        if dense:
            grids = [mrope_position_ids([32], [4], [(1, 2, 2 + b)]) for b in range(2)]
            positions = torch.from_numpy(np.stack(grids, 1))
        else:
            parts = [
                mrope_position_ids([n], [o for o, _ in images], [g for _, g in images])
                for n, images in zip(LENGTHS, IMAGES, strict=True)
            ]
            positions = torch.from_numpy(np.concatenate(parts, 1))[:, None]
        yield Microbatch(
            ids=torch.from_numpy(rng.integers(0, NUM_TOKENS, shape)),
            labels=torch.from_numpy(rng.integers(0, NUM_TOKENS, shape)),
            loss_mask=torch.from_numpy((rng.random(shape) < 0.2 + 0.3 * lane).astype(np.float32)),
            positions=positions,
            lengths=None if dense else LENGTHS,
            teacher=torch.from_numpy(2 * rng.standard_normal((*shape, 128))),
        )


def count_loss_tokens(job: Job, step: int) -> int:
    """N of the global batch."""
    batches = [b for lane in range(NUM_LANES) for b in microbatches(step, lane, job.dense)]
    return sum(int(batch.loss_mask.sum()) for batch in batches)


def share(whole: Tensor, lengths: Sequence[int], cp: dist.ProcessGroup) -> Tensor:
    """The zigzag share of dim 1, written out from the definition."""
    if cp.size() == 1:
        return whole
    rows, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * cp.size())
        rows += [chunks[cp.rank()], chunks[2 * cp.size() - 1 - cp.rank()]]
        start += length
    return whole[:, torch.cat(rows)]


def share_of_positions(whole: Tensor, lengths: Sequence[int], cp: dist.ProcessGroup) -> Tensor:
    """(3, B, S) -> (3, B, S/cp)."""
    return share(whole.flatten(0, 1), lengths, cp).unflatten(0, whole.shape[:2])


def losses_of(model: Any) -> tuple[Tensor, Tensor]:
    """All losses of a model on one rank for a packed microbatch, and the mask of loss tokens."""
    from mimo.ops.segments import PackedSegments

    batch = next(microbatches(0, 0, dense=False))
    segments = PackedSegments.from_lengths(LENGTHS, batch.ids.device)
    losses = model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        labels=batch.labels,
        packed_seq_params=segments,
    )
    return losses, batch.loss_mask


class Trainer:
    """One rank's model of a `Job`."""

    def __init__(self, job: Job) -> None:
        from mimo.engines.megatron.config import ModuleContext
        from mimo.engines.megatron.parallel import (
            build_optimizers,
            prepare_engine,
            wrap_data_parallel,
        )
        from mimo.engines.optimizer import OptimizerSettings
        from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
        from mimo.parallel.groups import build_topology

        self.job = job
        prepare_engine(SEED)
        grid = GridSpec(LANGUAGE, **job.grid)
        layout = Layout(language=grid, encoders={}, world_size=grid.size)
        self.groups = build_topology(layout).modules[LANGUAGE]
        self.raw = []
        family = importlib.import_module(f"mimo.families.languages.{job.family}")
        for number in range(grid.vpp):
            ctx = ModuleContext(
                groups=self.groups,
                dtype=job.dtype,
                sequence_parallel=grid.sp,
                num_chunks=grid.vpp,
                chunk=number if grid.vpp > 1 else None,
                recompute=job.recompute,
                scatter_embedding=job.scatter_embedding,
            )
            sizes = family.Settings(**{**SETTINGS, **job.settings})
            self.raw.append(family.build(sizes, ctx, NUM_TOKENS, 64, SEED))
        self.chunks = wrap_data_parallel(
            self.raw, self.groups, job.overlap, job.distributed, job.late
        )
        switches = [chunk.no_sync for chunk in self.chunks]
        for chunk in self.raw:
            chunk.config.no_sync_func = switches if grid.vpp > 1 else switches[0]
        self.optimizers = build_optimizers(
            self.chunks,
            OptimizerSettings(job.optimizer, 0.1, 0.9, 0.95, 1e-4, job.distributed),
            job.learning_rate,
            job.dtype,
            self.groups,
        )

    def step(self, step: int) -> dict[str, float]:
        """One step: the summed loss of this rank and its share of the squared gradient norm."""
        from mimo.engines.megatron.schedule import hidden_shapes, run_schedule

        module = self.module()
        tokens = 64 * NUM_LANES * NUM_MICROBATCHES
        module.begin_step(False, count_loss_tokens(self.job, step) / tokens)
        lanes = range(self.groups.dp.rank(), NUM_LANES, self.groups.dp.size())
        batches = [b for lane in lanes for b in microbatches(step, lane, self.job.dense)]
        config, cp = self.raw[0].config, self.groups.cp.size()
        sizes = [batch.ids.shape for batch in batches]
        shapes = [hidden_shapes(config, self.groups, s // cp, b) for b, s in sizes]
        logged = run_schedule(self._forward_step, batches, self.chunks, self.groups, shapes)
        module.finish_gradients(count_loss_tokens(self.job, step))
        norm = module.squared_norm()
        module.update(self.job.learning_rate, 1.0)
        first = self.groups.tp.rank() == 0
        return {"loss": float(sum(logged)) if first else 0.0, "squared_norm": float(norm)}

    def _forward_step(self, batches: Iterator[Microbatch], chunk: Any) -> tuple[Any, Any]:
        from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

        from mimo.engines.megatron.schedule import sum_losses
        from mimo.ops.segments import PackedSegments

        batch, cp, tp = next(batches), self.groups.cp, self.groups.tp
        lengths = batch.lengths or (batch.ids.shape[1],)
        packed = batch.lengths and PackedSegments.from_lengths(batch.lengths, batch.ids.device)
        inputs = {
            "input_ids": share(batch.ids, lengths, cp),
            "position_ids": share_of_positions(batch.positions, lengths, cp),
            "packed_seq_params": packed,
        }
        counted = share(batch.loss_mask, lengths, cp).t().flatten().nonzero()[:, 0]
        if not self.job.distil:
            labels = share(batch.labels, lengths, cp).t().flatten()[counted]
            return chunk(**inputs, labels=labels, loss_at=counted), sum_losses
        output = chunk(**inputs)
        if self.raw[-1].post_process:
            teacher = share(batch.teacher, lengths, cp).chunk(tp.size(), -1)[tp.rank()]
            squares = (output - teacher.to(output.dtype)).square().sum(-1)
            squares = reduce_from_tensor_model_parallel_region(squares, group=tp)
            output = squares.t().flatten()[counted]
        return output, sum_losses

    def module(self) -> Any:
        """The model as a `Module`."""
        from mimo.engines.megatron.module import MegatronModule

        chunks: list[torch.nn.Module] = [*self.chunks]
        return MegatronModule("language", self.groups, self.raw, chunks, self.optimizers, True)

    def waiting(self) -> int:
        """Gathers of updated weights that nobody has waited for."""
        groups = [group for chunk in self.chunks for group in chunk.bucket_groups]
        return sum(group.param_gather_handle is not None for group in groups)

    def shards(self) -> list[Any]:
        """Weights and gradients of this rank, for `tiny.assemble`."""
        from mimo.check.steps import WatchedSteps

        modules = {"language": self.module()}
        watched = WatchedSteps(modules, dist.get_rank())
        watched.note_weights()
        watched.gradients_complete(0, modules)
        return watched.shards


# ------------------------------------------------------- functions that run inside ranks


def train(
    rank: int, job: Job, directory: Path | None = None, saved_after: int | None = None
) -> dict[str, Any]:
    """All steps of a job: metrics of each, then weights and last gradients.

    directory: where to write a checkpoint after ``saved_after`` steps.
    """
    trainer, metrics = Trainer(job), []
    for step in range(job.steps):
        if directory is not None and step == saved_after:
            save(trainer, directory)
        metrics.append(trainer.step(step))
    return {"metrics": metrics, "shards": trainer.shards()}


def late_gathers(rank: int, job: Job) -> list[int]:
    """Gathers under way after a step, in the state of a checkpoint, after a step, a forward."""
    trainer = Trainer(job)
    trainer.step(0)
    counts = [trainer.waiting()]
    module = trainer.module()
    module.wait_param_gather()
    assert list(module.pieces("save", True))
    counts.append(trainer.waiting())
    trainer.step(1)
    counts.append(trainer.waiting())
    with torch.no_grad():
        lane = trainer.groups.dp.rank()
        trainer._forward_step(microbatches(2, lane, job.dense), trainer.chunks[0])
    return [*counts, trainer.waiting()]


def state_sizes(rank: int, job: Job) -> int:
    """Elements of this rank's optimizer state after a step, the count of steps left out."""
    trainer = Trainer(job)
    trainer.step(0)
    bases: Any = [optimizer.optimizer for optimizer in trainer.optimizers]
    states = [state for base in bases for state in base.state.values()]
    return sum(state[kind].numel() for state in states for kind in state if kind != "step")


def resume(rank: int, job: Job, directory: Path, saved_after: int) -> dict[str, Any]:
    """A fresh model that loads the checkpoint and does the remaining steps."""
    trainer = Trainer(job)
    load(trainer, directory)
    metrics = [trainer.step(step) for step in range(saved_after, job.steps)]
    return {"metrics": metrics, "shards": trainer.shards()}


def save(trainer: Trainer, directory: Path) -> None:
    from mimo.checkpoint.tensors import write_pieces
    from tests.mimo.checkpoint.manifests import finish

    pieces = list(trainer.module().pieces("save", with_optimizer=True))
    write_pieces(directory, dist.get_rank(), pieces)
    dist.barrier()
    if dist.get_rank() == 0:
        finish(directory, dist.get_world_size())
    dist.barrier()


def load(trainer: Trainer, directory: Path) -> None:
    from mimo.checkpoint.load import pieces_to_resume
    from mimo.checkpoint.reading import read_shared
    from mimo.checkpoint.tensors import read_index

    index = read_index(directory)
    module = trainer.module()
    pieces = pieces_to_resume(module.pieces("load", with_optimizer=True), index)
    read_shared(directory, index, pieces, module.replicas)


# ------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Outcome:
    """A job's results put together: by step the loss sum and gradient norm, whole tensors."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, dict[str, Any]]


def outcome(results: Sequence[dict[str, Any]], gradients: bool = True) -> Outcome:
    """Put the ranks' results together; a distributed optimizer has no whole ``gradients``."""
    steps = list(zip(*(result["metrics"] for result in results), strict=True))
    weights = tiny.assemble(results, "weight")
    whole = tiny.assemble(results, "gradient") if gradients else dict.fromkeys(weights)
    return Outcome(
        losses=[sum(rank["loss"] for rank in step) for step in steps],
        norms=[sum(rank["squared_norm"] for rank in step) ** 0.5 for step in steps],
        parameters={n: {"weight": weights[n], "gradient": whole[n]} for n in weights},
    )


def assert_same(got: Outcome, expected: Outcome, tolerance: float) -> None:
    """Losses, norms, gradients where there are any, and weights, as docs/parallelism.md says."""
    np.testing.assert_allclose(got.losses, expected.losses, rtol=tolerance)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=tolerance)
    reference = expected.parameters
    # The last stage's copy of a tied embedding has the name of a head that one rank lacks.
    head = "language.output_layer.weight"
    if head in got.parameters and head not in reference:
        embedding = "language.embedding.word_embeddings.weight"
        reference = reference | {head: reference[embedding]}
    for what in ("gradient", "weight"):
        values = {name: p[what] for name, p in got.parameters.items()}
        if any(value is None for value in values.values()):
            continue
        for name, error in tiny.errors(values, reference, what).items():
            assert error <= tolerance, f"{what} of {name}: error {error:.2e}"
