"""Losses on sharded logits equal PyTorch's on whole ones, without the padding columns."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.conftest import RunRanks
from tests.lone_module import noise

NUM_TOKENS = 37
# Padding in the last shard only; on four ranks a shard of nothing but padding too.
WIDTHS = [37, 40, 64]
SHAPE = (5, 3)
# Absolute, for losses of about 5 and gradients of about 1.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6}
# One rounding of a gradient of at most 2 to bf16, relative.
GRADIENT_TOLERANCES = TOLERANCES | {torch.bfloat16: 4e-3}


def whole(seed: int, width: int, dtype: torch.dtype) -> Tensor:
    """Logits (5, 3, width), large ones included; padding would win every maximum."""
    logits = 4 * noise(seed, *SHAPE, width).to(dtype)
    logits[..., 2] += 200
    logits[..., NUM_TOKENS:] = 1e4
    return logits


def labels() -> Tensor:
    """(5, 3) int64, the first and the last token among them."""
    found = torch.arange(15).view(SHAPE) * 5 % NUM_TOKENS
    found[0, 0], found[0, 1] = 0, NUM_TOKENS - 1
    return found


# ------------------------------------------------------- functions that run inside ranks


def losses_here(rank: int, width: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Both losses and the gradients of this rank's columns."""
    from mimo.engines.megatron.layers.cross_entropy import (
        vocab_parallel_cross_entropy,
        vocab_parallel_kl,
    )

    group = dist.group.WORLD
    assert group is not None
    student = whole(0, width, dtype).chunk(group.size(), -1)[rank].clone().requires_grad_()
    teacher = whole(1, width, dtype).chunk(group.size(), -1)[rank].clone().requires_grad_()
    weights = noise(2, *SHAPE)
    found = {}
    for name, loss in (
        ("cross entropy", vocab_parallel_cross_entropy(student, labels(), NUM_TOKENS, group)),
        ("kl", vocab_parallel_kl(student, teacher, NUM_TOKENS, group)),
    ):
        (gradient,) = torch.autograd.grad((loss * weights.to(loss.dtype)).sum(), student)
        found[name] = [loss.detach(), gradient]
    assert teacher.grad is None
    return found


# ------------------------------------------------------------------------------- tests


def expected(name: str, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the whole logits, in fp64."""
    student = whole(0, width, dtype).double().requires_grad_()
    tokens = student[..., :NUM_TOKENS].flatten(0, 1)
    if name == "kl":
        teacher = whole(1, width, dtype).double()[..., :NUM_TOKENS].flatten(0, 1)
        loss = functional.kl_div(
            tokens.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
    else:
        loss = functional.cross_entropy(tokens, labels().flatten(), reduction="none")
    (loss * noise(2, *SHAPE).flatten()).sum().backward()
    assert student.grad is not None
    return loss.detach().view(SHAPE), student.grad


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("ranks", "width"), [(1, 37), (1, 40), (2, 40), (4, 40), (4, 64)])
def test_losses_and_gradients_equal_those_of_whole_logits_without_padding(
    run_ranks: RunRanks, ranks: int, width: int, dtype: torch.dtype
) -> None:
    found = run_ranks(losses_here, ranks, width, dtype)
    for name in ("cross entropy", "kl"):
        loss, gradient = expected(name, width, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for one in found:
            assert one[name][0].dtype == wide
            torch.testing.assert_close(
                one[name][0].double(), loss, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
            )
        got = torch.cat([one[name][1] for one in found], dim=-1)
        assert got.dtype == dtype
        tolerance = GRADIENT_TOLERANCES[dtype]
        torch.testing.assert_close(got.double(), gradient, rtol=tolerance, atol=tolerance)
        assert not got[..., NUM_TOKENS:].any(), "padding got a gradient"


def loss_of_no_token(rank: int, label: int) -> Tensor:
    from mimo.engines.megatron.layers.cross_entropy import vocab_parallel_cross_entropy

    group = dist.group.WORLD
    assert group is not None
    logits = whole(0, 40, torch.float32).chunk(group.size(), -1)[rank]
    wrong = labels()
    wrong[1, 1] = label
    return vocab_parallel_cross_entropy(logits, wrong, NUM_TOKENS, group)


@pytest.mark.parametrize("label", [-100, NUM_TOKENS])
def test_the_loss_of_a_label_that_is_no_token_is_not_a_number(
    run_ranks: RunRanks, label: int
) -> None:
    for losses in run_ranks(loss_of_no_token, 2, label):
        assert losses.isnan().nonzero().tolist() == [[1, 1]]
