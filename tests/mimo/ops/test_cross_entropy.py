"""Losses under a sharded head equal PyTorch's on whole logits, which never exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import RunRanks
from tests.lone_module import noise

NUM_TOKENS = 301
HIDDEN = 4
COUNT = 15
VOCABULARY = 8192  # of the step whose memory is looked at
# Of losses up to about 200, relative; absolute for those and their gradients of about 1.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6}
# Slopes and gradients are rounded to bf16, and products of them summed over tokens or columns.
GRADIENT_TOLERANCES = TOLERANCES | {torch.bfloat16: 1.2e-2}


def head(width: int) -> Tensor:
    """Weights (width, 4) with a large logit; padding would win every maximum.

    Exact in bf16, and so are all logits with `states`: sums of few quarters.
    """
    weight = (noise(1, width, HIDDEN) * 2).round() / 4
    weight[2], weight[NUM_TOKENS:] = 0, 0
    weight[2, 0], weight[NUM_TOKENS:, 0] = 200, 2**13
    return weight.double()


def states() -> Tensor:
    """Hidden states (15, 4)."""
    hidden = noise(0, COUNT, HIDDEN).sign()
    hidden[:, 0] = 1
    return hidden.double()


def labels() -> Tensor:
    """(15,) int64: the first and the last token, and the one with the large logit, among them."""
    tokens = torch.arange(COUNT) * 23 % NUM_TOKENS
    tokens[:3] = torch.tensor([0, NUM_TOKENS - 1, 2])
    return tokens


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# ------------------------------------------------------- functions that run inside ranks


def losses_here(rank: int, width: int, count: int) -> dict[torch.dtype, tuple[Tensor, ...]]:
    """Losses of the first ``count`` tokens, and gradients of them and of this rank's weight."""
    from mimo.ops import cross_entropy

    cross_entropy.LOGITS_AT_ONCE = 1  # as small as blocks can be
    return {dtype: _losses(width, dtype, count) for dtype in TOLERANCES}


def _losses(width: int, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
    from mimo.ops import cross_entropy

    rank = dist.get_rank()
    hidden = states()[:count].to(dtype).requires_grad_()
    weight = head(width).to(dtype).chunk(world().size())[rank].clone().requires_grad_()
    loss = cross_entropy.linear_cross_entropy(hidden, weight, labels()[:count], NUM_TOKENS, world())
    weights = noise(2, COUNT)[:count].to(loss.dtype)
    gradients = torch.autograd.grad((loss * weights).sum(), (hidden, weight))
    return loss.detach(), *gradients


def loss_of_no_token(rank: int, label: int) -> Tensor:
    from mimo.ops.cross_entropy import linear_cross_entropy

    wrong = labels()
    wrong[4] = label
    weight = head(304).chunk(world().size())[rank]
    return linear_cross_entropy(states(), weight, wrong, NUM_TOKENS, world())


# ------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("ranks", "width"), [(1, 301), (2, 304), (4, 304), (4, 512)])
def test_losses_and_gradients_equal_those_of_whole_logits_without_padding(
    run_ranks: RunRanks, ranks: int, width: int
) -> None:
    of_dtypes = run_ranks(losses_here, ranks, width, COUNT)
    for dtype in TOLERANCES:
        check_losses([by_dtype[dtype] for by_dtype in of_dtypes], dtype, width)


def check_losses(by_rank: list[tuple[Tensor, ...]], dtype: torch.dtype, width: int) -> None:
    """Compare what the ranks got with PyTorch's on whole logits in fp64."""
    hidden, weight = states().requires_grad_(), head(width).requires_grad_()
    logits = hidden @ weight[:NUM_TOKENS].T
    assert torch.equal(logits.to(dtype).double(), logits), "logits are not exact"
    loss = functional.cross_entropy(logits, labels(), reduction="none")
    (loss * noise(2, COUNT)).sum().backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for got, *_ in by_rank:
        assert got.dtype == wide
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(got.double(), loss, rtol=tolerance, atol=tolerance)
    of_hidden = torch.stack([shares[1].double() for shares in by_rank]).sum(0)
    of_weight = torch.cat([shares[2] for shares in by_rank])
    assert of_weight.dtype == by_rank[0][1].dtype == dtype
    assert not of_weight[NUM_TOKENS:].any(), "padding got a gradient"
    assert hidden.grad is not None
    assert weight.grad is not None
    for got, expected in ((of_hidden, hidden.grad), (of_weight.double(), weight.grad)):
        tolerance = GRADIENT_TOLERANCES[dtype] * float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def test_without_loss_tokens_gradients_are_zeros_of_the_right_shape(run_ranks: RunRanks) -> None:
    for by_dtype in run_ranks(losses_here, 2, 304, 0):
        loss, of_hidden, of_weight = by_dtype[torch.float32]
        assert loss.shape == (0,)
        assert of_hidden.shape == (0, HIDDEN)
        assert torch.equal(of_weight, torch.zeros(152, HIDDEN))


@pytest.mark.parametrize("label", [-100, NUM_TOKENS])
def test_the_loss_of_a_label_that_is_no_token_is_not_a_number(
    run_ranks: RunRanks, label: int
) -> None:
    for losses in run_ranks(loss_of_no_token, 2, label):
        assert losses.isnan().nonzero().tolist() == [[4]]


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(
    run_ranks: RunRanks, frozen: str
) -> None:
    for both, partial in run_ranks(gradients_with_one_frozen, 1, frozen):
        assert partial[frozen] is None
        kept = "weight" if frozen == "hidden" else "hidden"
        assert torch.equal(partial[kept], both[kept])


def gradients_with_one_frozen(rank: int, frozen: str) -> list[dict[str, Tensor | None]]:
    """Inside a rank: the gradients with nothing frozen, then with one of the two."""
    from mimo.ops.cross_entropy import linear_cross_entropy

    gradients = []
    for fixed in ("", frozen):
        inputs = {"hidden": states(), "weight": head(304)}
        for name, tensor in inputs.items():
            tensor.requires_grad_(name != fixed)
        args = (inputs["hidden"], inputs["weight"], labels(), NUM_TOKENS, world())
        linear_cross_entropy(*args).sum().backward()
        gradients.append({name: tensor.grad for name, tensor in inputs.items()})
    return gradients


# -------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made, per dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor):
                size = max(self.elements.get(one.dtype, 0), one.numel())
                self.elements[one.dtype] = size
        return made


def largest_of_a_step(rank: int, at_once: int) -> tuple[dict[torch.dtype, int], list[int]]:
    """Inside a rank: the largest tensors of a forward and backward of a bf16 language model.

    Its vocabulary is far larger than everything else. Also V/tp, hidden size and loss tokens.
    """
    from mimo.ops import cross_entropy
    from tests import language_steps

    if at_once:
        cross_entropy.LOGITS_AT_ONCE = at_once
    language_steps.NUM_TOKENS = VOCABULARY
    job = language_steps.Job(
        grid={"tp": 2, "sp": True},
        settings={"num_layers": 1, "hidden_size": 16},
        dtype=torch.bfloat16,
    )
    trainer = language_steps.Trainer(job)
    with Largest() as largest:
        trainer.step(0)
    loss_tokens = [
        int(batch.loss_mask.sum())
        for lane in range(language_steps.NUM_LANES)
        for batch in language_steps.microbatches(0, lane, dense=False)
    ]
    return largest.elements, loss_tokens


def test_no_tensor_of_a_step_holds_the_logits_of_all_loss_tokens(run_ranks: RunRanks) -> None:
    columns = VOCABULARY // 2
    parameter = columns * 16
    for elements, loss_tokens in run_ranks(largest_of_a_step, 2, 40 * 256):
        # What is as large as the embedding: its weight and gradients, fp32 masters among them.
        assert max(elements.values()) <= 2 * parameter
        assert max(loss_tokens) * columns > 2 * parameter, "the workload would not show logits"
    # With the usual block everything fits into one: the test sees logits where there are any.
    for elements, loss_tokens in run_ranks(largest_of_a_step, 2, 0):
        assert elements[torch.float32] == max(loss_tokens) * columns


# ------------------------------------------------------------------- nothing to learn


def step_without_loss_tokens(rank: int, sp: bool) -> dict[str, float]:
    """Inside a rank: a step on two ranks in which no token of any microbatch counts."""
    from tests import language_steps

    drawn = language_steps.microbatches

    def without_loss(step: int, lane: int, dense: bool) -> Any:
        for batch in drawn(step, lane, dense):
            yield replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))

    language_steps.microbatches = without_loss
    job = language_steps.Job(grid={"tp": 2, "sp": sp})
    return language_steps.Trainer(job).step(0)


@pytest.mark.parametrize("sp", [False, True])
def test_a_step_without_loss_tokens_runs_backward_to_zero_gradients(
    run_ranks: RunRanks, sp: bool
) -> None:
    for found in run_ranks(step_without_loss_tokens, 2, sp):
        assert found == {"loss": 0.0, "squared_norm": 0.0}
