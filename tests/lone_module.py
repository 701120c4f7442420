"""One module without a recipe, a bridge or a schedule: what runs inside ranks, and how to compare.

Reference models run in the test's own process; ranks get their weights under our names. Nothing
here imports a reference library, so a rank is ready in a tenth of a second.

Letters: P patches, C numbers per patch, I images, N rows, T packed tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.mimo import tiny

Weights = dict[str, Tensor]

SEED = 7


# ------------------------------------------------------------------- weights and errors


def randomize(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew, norm weights and biases too, so that none hides behind 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.empty(param.shape).normal_(generator=generator)
            if param.dim() > 1:
                param.copy_(noise / param[0].numel() ** 0.5)
            elif name.endswith("bias"):
                param.copy_(0.3 * noise)
            else:
                param.copy_(1 + 0.3 * noise)


def gradients(model: nn.Module) -> Weights:
    """Gradients by parameter name; every parameter must have one."""
    missing = [name for name, param in model.named_parameters() if param.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {n: param.grad for n, param in model.named_parameters() if param.grad is not None}


def interleave_qkv(parts: Sequence[Tensor], num_groups: int) -> Tensor:
    """Projections (or biases) -> Megatron's: per group its queries, its key, its value."""
    grouped = [x.reshape(num_groups, -1, *x.shape[1:]) for x in parts]
    return torch.cat(grouped, 1).flatten(0, 1)


def worst_error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error of any gradient (measure: `tiny.errors`), and the name it has."""
    reference = {name: {"gradient": grad.numpy()} for name, grad in expected.items()}
    errors = tiny.errors({n: g.numpy() for n, g in got.items()}, reference, "gradient")
    return max((error, name) for name, error in errors.items())


def join_gradients(results: Sequence[Mapping[str, Any]]) -> Weights:
    """Whole gradients from the shards that all ranks of one module returned."""
    joined = tiny.assemble([{"shards": result["shards"]} for result in results], "gradient")
    return {name: torch.from_numpy(value) for name, value in joined.items()}


@dataclass(frozen=True)
class TowerOptions:
    """How `run_tower` runs a tower: its family, the grid (tp · pp ranks) and what is recomputed."""

    family: str = "qwen_vl"
    tp: int = 1
    sp: bool = False
    pp: int = 1
    recompute: str = "none"


# ------------------------------------------------------- functions that run inside ranks


def _context(tp: int, sp: bool, pp: int = 1, recompute: str = "none") -> Any:
    """A world of ``tp · pp`` ranks that holds one module in fp32."""
    from mimo.engines.megatron.config import ModuleContext
    from mimo.engines.megatron.parallel import prepare_engine
    from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
    from mimo.parallel.groups import build_topology

    prepare_engine(SEED)
    grid = GridSpec(LANGUAGE, tp=tp, sp=sp, pp=pp)
    layout = Layout(language=grid, encoders={}, world_size=grid.size)
    groups = build_topology(layout).modules[LANGUAGE]
    return ModuleContext(
        groups=groups, dtype=torch.float32, sequence_parallel=sp, recompute=recompute
    )


def tensor_parallel_slice(full: Tensor, rank: int, size: int, dim: int, stride: int) -> Tensor:
    """The part of ``full`` that tensor-parallel ``rank`` of ``size`` keeps, from the definition.

    ``stride`` 2 means that two matrices (gate and up) are stacked along ``dim`` and each is
    split separately.
    """
    parts = [block.chunk(size, dim)[rank] for block in full.chunk(stride, dim)]
    return torch.cat(parts, dim)


@torch.no_grad()
def _load(model: nn.Module, weights: Weights, ctx: Any) -> None:
    """Copy whole tensors into this rank's parameters, or the slices that it holds."""
    from mimo.engines.megatron.weights import global_name

    stage = ctx.groups.pp.rank()
    params = {
        global_name(name, model.config, stage, None): param
        for name, param in model.named_parameters()
    }
    missing = params.keys() - weights.keys()
    assert not missing, missing
    assert ctx.groups.pp.size() > 1 or params.keys() == weights.keys()
    tp = ctx.groups.tp
    for name, param in params.items():
        full = weights[name]
        if tp.size() > 1 and getattr(param, "tensor_model_parallel", False):
            dim, stride = param.partition_dim, param.partition_stride  # type: ignore[attr-defined]
            full = tensor_parallel_slice(full, tp.rank(), tp.size(), dim, stride)
        assert param.shape == full.shape, f"{name}: {param.shape} but got {full.shape}"
        param.copy_(full)


def run_tower(
    rank: int,
    settings: dict[str, Any],
    output_size: int,
    weights: Weights | None,
    calls: Sequence[tuple[Tensor, Tensor]],
    row_gradients: Tensor | None = None,
    options: TowerOptions = TowerOptions(),
) -> dict[str, Any]:
    """Vision tower on calls of (patches (P, C), grids (I, 3)): rows (N, H) of each call.

    Beside them, on the last stage, the "rows_per_item" of each call.

    weights: None leaves the freshly drawn ones.
    row_gradients: (N, H) of the last call; with them also this rank's gradients of every parameter
        ("gradients" by local name, "shards" for `join_gradients`), and on the first stage of that
        call's patches (P, C).
    Under sequence parallelism rows are this rank's part, and gradients complete all the same.
    """
    import importlib

    import torch.distributed as dist

    family = importlib.import_module(f"encoders.{options.family}")
    ctx = _context(options.tp, options.sp, options.pp, options.recompute)
    tower = family.build(family.Settings(**settings), ctx, output_size, SEED)
    if weights is not None:
        _load(tower, weights, ctx)
    rows, patches, before = torch.zeros(0), torch.zeros(0), None
    results: dict[str, Any] = {"rows": [], "rows_per_item": []}
    for patches, grids in calls:
        patches.requires_grad_()
        if not ctx.is_first_stage:
            before = _exchange(None, rank - options.tp).requires_grad_()
        tower.set_input_tensor([before])
        output = tower(patches if ctx.is_first_stage else None, grids)
        rows = output.values if ctx.is_last_stage else output
        if ctx.is_last_stage:
            results["rows_per_item"].append(output.rows_per_item)
        else:
            _exchange(rows.detach(), rank + options.tp)
        results["rows"].append(rows.detach())
    if row_gradients is None:
        return results
    if not ctx.is_last_stage:
        row_gradients = _exchange(None, rank + options.tp)
    elif options.sp:
        padded = nn.functional.pad(row_gradients, (0, 0, 0, -len(row_gradients) % options.tp))
        row_gradients = padded.chunk(options.tp)[ctx.groups.tp.rank()]
    rows.backward(row_gradients)
    if before is not None:
        assert before.grad is not None
        _exchange(before.grad, rank - options.tp)
    _sum_sequence_parallel(tower, ctx)
    if options.sp and ctx.is_first_stage:
        assert patches.grad is not None
        dist.all_reduce(patches.grad, group=ctx.groups.tp)
    results |= {"gradients": gradients(tower), "patch_gradients": patches.grad}
    results["shards"] = _gradient_shards(tower, ctx)
    return results


def _exchange(sent: Tensor | None, peer: int) -> Tensor:
    """Send a tensor to another rank, or receive one from it when there is none to send."""
    import torch.distributed as dist

    box = [sent]
    if sent is None:
        dist.recv_object_list(box, src=peer)
    else:
        dist.send_object_list(box, dst=peer)
    assert box[0] is not None
    return box[0]


def _sum_sequence_parallel(model: nn.Module, ctx: Any) -> None:
    """Sum gradients of parameters that see a part of the sequence, as the end of a step does."""
    import torch.distributed as dist

    for param in model.parameters():
        if ctx.sequence_parallel and getattr(param, "sequence_parallel", False):
            assert param.grad is not None
            dist.all_reduce(param.grad, group=ctx.groups.tp)


def _gradient_shards(model: nn.Module, ctx: Any) -> list[Any]:
    """This rank's part of every gradient, as `tiny.assemble` takes it."""
    import torch.distributed as dist

    from mimo.check.steps import WatchedSteps
    from mimo.engines.megatron.module import MegatronModule
    from mimo.engines.megatron.weights import gradient_pieces

    chunks: Any = [model]
    module = MegatronModule("", ctx.groups, chunks, chunks, (), True)
    watched = WatchedSteps({"": module}, dist.get_rank())
    watched.note_weights()
    for param in chunks[0].parameters():
        param.main_grad = param.grad
        param.requires_grad_(param.grad is not None)
    for piece in gradient_pieces("", chunks, ctx.groups):
        watched.note_gradient(piece)
    for shard in watched.shards:
        shard.name = shard.name.removeprefix(".")
    return watched.shards


def run_language(
    rank: int,
    settings: dict[str, Any],
    num_tokens: int,
    weights: Weights | None,
    ids: Tensor,
    positions: Tensor,
    lengths: Sequence[int],
    logit_gradients: Tensor | None = None,
    tp: int = 1,
    sp: bool = False,
    family: str = "qwen3",
    recompute: str = "none",
    levels: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Any]:
    """Language model of ``num_tokens`` tokens on ids (T,), positions (3, T) in packed segments.

    logit_gradients: (T, num_tokens); with them also this rank's gradients of every parameter
        ("gradients" by local name, "shards" for `join_gradients`).
    levels: (k, n, H), to add behind the first k layers at places (n,); with them also the gradients
        of the rows that this rank adds, (k, n', H), n' of the n under sequence parallelism, with
        their numbers (n',).

    Returns this rank's logits (T, V / tp); without gradients also those of a forward that gets the
    embedding's output as `decoder_input`, and the per-token losses (T,) of ``ids`` as labels.
    """
    import importlib

    from megatron.core.distributed import finalize_model_grads

    from mimo.engines.megatron import PackedSegments
    from mimo.engines.megatron.parallel import wrap_data_parallel

    languages = importlib.import_module(f"mimo.families.languages.{family}")
    ctx = _context(tp, sp, recompute=recompute)
    sizes = languages.Settings(**settings)
    vocab_size = sizes.padded_vocab_size(num_tokens)
    model = languages.build(sizes, ctx, num_tokens, len(ids), SEED)
    if weights is not None:
        _load(model, weights, ctx)
    inputs: dict[str, Any] = {
        "input_ids": ids[None],
        "position_ids": positions[:, None, :],
        "packed_seq_params": PackedSegments.from_lengths(lengths, ids.device),
    }
    results: dict[str, Any] = {}
    if levels is not None:
        rows, places = levels
        if sp:
            places = places - rank * (len(ids) // tp)
        results["rows"] = ((places >= 0) & (places < len(ids) // (tp if sp else 1))).nonzero()[:, 0]
        rows = rows[:, results["rows"]].clone().requires_grad_()
        inputs["levels"] = rows, places[results["rows"]]
    # Norms of queries and keys see a rank's heads alone: their gradients are summed behind it all.
    (wrapped,) = wrap_data_parallel([model], ctx.groups, False, False)
    logits = wrapped(**inputs)[0]
    results["logits"] = logits.detach()
    if logit_gradients is not None:
        padding = logit_gradients.new_zeros(len(ids), vocab_size - num_tokens)
        logits.backward(torch.cat((logit_gradients, padding), dim=1).chunk(tp, dim=1)[rank])
        finalize_model_grads([wrapped], num_tokens=None, pg_collection=ctx.groups)
        for param in model.parameters():
            param.grad = param.main_grad  # type: ignore[attr-defined]
        if levels is not None:
            results["row_gradients"] = inputs["levels"][0].grad
        return results | {"gradients": gradients(model), "shards": _gradient_shards(model, ctx)}
    with torch.no_grad():
        hidden = model.embedding(input_ids=ids[None], position_ids=inputs["position_ids"])
        results["embedded"] = model(**inputs, decoder_input=hidden)[0]
        results["losses"] = model(**inputs, labels=ids[None])[0]
    return results


def noise(seed: int, *shape: int) -> Tensor:
    """N(0, 1) numbers, fp32."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))
