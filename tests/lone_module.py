"""One module without a recipe, a bridge or a schedule: what runs inside ranks, and how to compare.

Reference models run in the test's own process; ranks get their weights under our names. Nothing
here imports a reference library, so a rank is ready in a tenth of a second.

Letters: P patches, C numbers per patch, I images, N rows, T packed tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    found = {name: param.grad for name, param in model.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: grad for name, grad in found.items() if grad is not None}


def interleave_qkv(parts: Sequence[Tensor], num_groups: int) -> Tensor:
    """Projections (or biases) -> Megatron's: per group its queries, its key, its value."""
    grouped = [x.reshape(num_groups, -1, *x.shape[1:]) for x in parts]
    return torch.cat(grouped, 1).flatten(0, 1)


def worst_error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error of any gradient (measure: `tiny.errors`), and the name it has."""
    reference = {name: {"gradient": grad.numpy()} for name, grad in expected.items()}
    found = tiny.errors({n: g.numpy() for n, g in got.items()}, reference, "gradient")
    name = max(found, key=lambda n: found[n])
    return found[name], name


# ------------------------------------------------------- functions that run inside ranks


def _context(tp: int, sp: bool) -> Any:
    """A world of ``tp`` ranks that holds one module in fp32."""
    from mimo.layout import LANGUAGE, GridSpec, Layout
    from mimo.megatron.config import ModuleContext
    from mimo.megatron.parallel import prepare_engine
    from mimo.topology import build_topology

    prepare_engine(SEED)
    layout = Layout(language=GridSpec(LANGUAGE, tp=tp, sp=sp), encoders={}, world_size=tp)
    groups = build_topology(layout).modules[LANGUAGE]
    return ModuleContext(groups=groups, dtype=torch.float32, sequence_parallel=sp)


@torch.no_grad()
def _load(model: nn.Module, weights: Weights, ctx: Any) -> None:
    """Copy whole tensors into this rank's parameters, or the slices that it holds."""
    from mimo.megatron.initialize import tensor_parallel_slice

    params = dict(model.named_parameters())
    assert params.keys() == weights.keys(), params.keys() ^ weights.keys()
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
    tp: int = 1,
    sp: bool = False,
) -> dict[str, Any]:
    """Vision tower on calls of (patches (P, C), grids (I, 3)): rows (N, H) of each call.

    weights: None leaves the freshly drawn ones.
    row_gradients: (N, H) of the last call; with them also the gradients of every parameter, and
        of that call's patches (P, C).
    """
    from encoders import qwen_vl

    ctx = _context(tp, sp)
    tower = qwen_vl.build(qwen_vl.Settings(**settings), ctx, output_size, SEED)
    if weights is not None:
        _load(tower, weights, ctx)
    rows, patches = torch.zeros(0), torch.zeros(0)
    found: dict[str, Any] = {"rows": []}
    for patches, grids in calls:
        patches.requires_grad_()
        rows = tower(patches, grids)
        found["rows"].append(rows.detach())
    if row_gradients is not None:
        rows.backward(row_gradients)
        found |= {"gradients": gradients(tower), "patch_gradients": patches.grad}
    return found


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
) -> dict[str, Any]:
    """Language model of ``num_tokens`` tokens on ids (T,), positions (3, T) in packed segments.

    logit_gradients: (T, num_tokens); with them also the gradients of every parameter.

    Returns this rank's logits (T, V / tp); without gradients also those of a forward that gets the
    embedding's output as `decoder_input`, and the per-token losses (T,) of ``ids`` as labels.
    """
    from mimo.languages import qwen3
    from mimo.megatron import PackedSegments

    ctx = _context(tp, sp)
    sizes = qwen3.Settings(**settings)
    vocab_size = sizes.padded_vocab_size(num_tokens)
    model = qwen3.build(sizes, ctx, num_tokens, len(ids), SEED)
    if weights is not None:
        _load(model, weights, ctx)
    inputs: dict[str, Any] = {
        "input_ids": ids[None],
        "position_ids": positions[:, None, :],
        "attention_mask": None,
        "packed_seq_params": PackedSegments.from_lengths(lengths, ids.device),
    }
    logits = model(**inputs)[0]
    found: dict[str, Any] = {"logits": logits.detach()}
    if logit_gradients is not None:
        padding = logit_gradients.new_zeros(len(ids), vocab_size - num_tokens)
        logits.backward(torch.cat((logit_gradients, padding), dim=1))
        return found | {"gradients": gradients(model)}
    with torch.no_grad():
        hidden = model.embedding(input_ids=ids[None], position_ids=inputs["position_ids"])
        found["embedded"] = model(**inputs, decoder_input=hidden)[0]
        found["losses"] = model(**inputs, labels=ids[None])[0]
    return found


def noise(seed: int, *shape: int) -> Tensor:
    """N(0, 1) numbers, fp32."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))
