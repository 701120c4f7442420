"""A token's row goes to a rank once, its results come back as one row, and nothing else changes.

Letters: n tokens of a rank, k experts of a token, E experts, G ranks, H hidden, F inner size.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.cases import quick
from tests.conftest import RunRanks

E, K, H, F = 12, 3, 16, 8
GRIDS = {"ep2": (2, 1), "ep4": (4, 1), "ep2 etp2": (2, 2), "etp2": (1, 2)}
ROUTINGS = ("random", "one rank's experts", "a rank without tokens", "padding", "no tokens")


def draw(routing: str, ranks: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Return each rank's tokens (n, H), weights and experts (n, k), and its real tokens."""
    random = torch.Generator().manual_seed(5)
    drawn = []
    for rank in range(ranks):
        is_empty = routing == "no tokens" or (routing == "a rank without tokens" and rank == 0)
        n = 0 if is_empty else 20 + 7 * rank
        order = torch.rand(n, E, generator=random).argsort(1)
        # With all its experts on one rank, and with none there.
        order[:2] = torch.arange(E)
        order[2:4] = torch.arange(E).flip(0)
        if routing == "one rank's experts":
            order[:] = torch.arange(E)
        tokens = torch.randn(n, H, generator=random).to(dtype)
        weights = torch.rand(n, K, generator=random).to(dtype)
        real = torch.arange(n)[:: 2 if routing == "padding" else 1]
        drawn.append((tokens, weights, order[:, :K], real))
    return drawn


def plain(tokens: Tensor, weights: Tensor, experts: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """Compute all experts for all tokens. fc1: (E, 2 · F, H). fc2: (E, H, F)."""
    output = torch.zeros_like(tokens)
    for expert in range(E):
        first, second = (tokens @ fc1[expert].T).chunk(2, dim=1)
        share = (weights * (experts == expert)).sum(1, keepdim=True)
        output = output + share * ((functional.silu(first) * second) @ fc2[expert].T)
    return output


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


# ------------------------------------------------------- functions that run inside ranks


def run_layer(rank: int, grid: str, routing: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run a layer's forward and backward, and the plain form of all ranks' tokens.

    Returns errors, each direction's rows to other ranks, and (token, other rank) pairs.
    """
    from mimo.engines.megatron import dispatch
    from mimo.engines.megatron.experts import Experts, SparseMLP

    (ep, etp), ranks = GRIDS[grid], dist.get_world_size()
    part, slice_ = rank // etp, rank % etp
    single: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups: Any = SimpleNamespace(tp=single, cp=single, tp_cp=single, tp_ep=dist.group.WORLD)
    groups.ep, groups.expt_tp = (SimpleNamespace(size=lambda n=n: n) for n in (ep, etp))
    config: Any = SimpleNamespace(params_dtype=dtype, hidden_size=H, num_layers=1)
    config.activation_func, config.sequence_parallel = functional.silu, False
    layer = SparseMLP(config, groups, Experts(E, K, F), shared=torch.nn.Identity)
    random = torch.Generator().manual_seed(6)
    fc1 = torch.randn(E, 2, F, H, generator=random).div(4).to(dtype)
    fc2 = torch.randn(E, H, F, generator=random).div(3).to(dtype)

    def cut_1(whole: Tensor) -> Tensor:
        return whole.view(E, 2, F, H).chunk(ep)[part].chunk(etp, 2)[slice_].reshape(-1, H)

    def cut_2(whole: Tensor) -> Tensor:
        return whole.view(E, H, F).chunk(ep)[part].chunk(etp, 2)[slice_].reshape(-1, F // etp)

    layer.experts.linear_fc1.weight.data.copy_(cut_1(fc1))
    layer.experts.linear_fc2.weight.data.copy_(cut_2(fc2))
    drawn = draw(routing, ranks, dtype)

    # The plain form, in fp64.
    wide = [x.double().requires_grad_() for x in (fc1.view(E, -1, H), fc2)]
    losses, every = [], []
    for tokens, weights, experts, real in drawn:
        tokens, weights = (x.double().clone().requires_grad_() for x in (tokens, weights))
        output = torch.zeros_like(tokens)
        output = output.index_copy(0, real, plain(tokens, weights, experts, *wide)[real])
        losses.append(output.square().sum())
        every.append((output, tokens, weights))
    gradients = torch.autograd.grad(
        torch.stack(losses).sum(), [*wide, *every[rank][1:]], allow_unused=True
    )
    gradients = [torch.zeros(()) if g is None else g for g in gradients]

    sent: list[int] = []
    exchanged = dispatch._exchanged

    def count_rows(rows: Tensor, counts: dispatch.Counts, *others: Any) -> Tensor:
        if rows.is_floating_point() and rows.shape[1:] == (H,):
            assert len(rows) == sum(counts.sent)
            sent.append(len(rows) - counts.sent[rank])
        return exchanged(rows, counts, *others)

    dispatch._exchanged = count_rows
    tokens, weights, experts, real = drawn[rank]
    tokens.requires_grad_()
    weights.requires_grad_()
    output = layer._run((tokens, weights, experts), real if routing == "padding" else None)
    output.square().sum().backward()
    dispatch._exchanged = exchanged
    ours = {
        "output": (output, every[rank][0]),
        "tokens": (tokens.grad, gradients[2]),
        "weights": (weights.grad, gradients[3]),
        "fc1": (layer.experts.linear_fc1.weight.grad, cut_1(gradients[0])),
        "fc2": (layer.experts.linear_fc2.weight.grad, cut_2(gradients[1])),
    }
    errors = {}
    for name, (tensor, expected) in ours.items():
        assert tensor is not None, name
        scale = max(largest(expected), 1e-3)
        errors[name] = largest(tensor.detach().double() - expected) / scale
    parts = {
        (token, expert * ep // E) for token in real.tolist() for expert in experts[token].tolist()
    }
    pairs = [(t, p * etp + n) for t, p in parts for n in range(etp) if p * etp + n != rank]
    return {"errors": errors, "sent": sent, "pairs": len(pairs)}


# ---------------------------------------------------------------------------- tests


@pytest.mark.parametrize("routing", quick(ROUTINGS, "random", "padding"))
@pytest.mark.parametrize("grid", quick(GRIDS, "ep2", "ep2 etp2"))
def test_a_row_goes_to_a_rank_once_in_each_direction_and_results_are_those_of_one_rank(
    run_ranks: RunRanks, grid: str, routing: str
) -> None:
    ep, etp = GRIDS[grid]
    results = run_ranks(run_layer, ep * etp, grid, routing, torch.float64)
    for result in results:
        assert max(result["errors"].values()) < 1e-12, result["errors"]
    pairs = [result["pairs"] for result in results]
    # Gradients of sums go the way of the rows; those of the rows go back.
    rows, sums, gradients, gradients_back = zip(*(r["sent"] for r in results), strict=True)
    assert [*rows] == [*gradients] == pairs
    assert [*sums] == [*gradients_back]
    assert sum(sums) == sum(pairs)


@pytest.mark.parametrize("routing", quick(ROUTINGS, "padding"))
def test_in_bf16_sums_are_rounded_once_on_each_rank(run_ranks: RunRanks, routing: str) -> None:
    for result in run_ranks(run_layer, 4, "ep2 etp2", routing, torch.bfloat16):
        assert max(result["errors"].values()) < 0.02, result["errors"]
