"""Products of matrices and linears are exact whichever library computes them.

Letters: M rows, K summed over, N columns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.ops.products import linear, product
from tests.conftest import RunRanks
from tests.language_steps import Job, Trainer
from tests.lone_module import noise

SIZES = [(0, 8, 3), (1, 8, 3), (5, 8, 3), (300, 96, 200)]
ONEDNN = "mkldnn::_linear_pointwise"


def operators(function: object) -> set[str]:
    """Names of the operators that it calls."""
    assert callable(function)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {one.key for one in profile.key_averages()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact(size: tuple[int, int, int], transposed: bool) -> None:
    """Also of transposed matrices, and into a part of a larger one."""
    m, k, n = size
    left = noise(0, k, m).T if transposed else noise(0, m, k)
    right = noise(1, k, n).T if transposed else noise(1, n, k)
    exact = left.double() @ right.double().T
    whole = torch.zeros(m + 2, n)
    for found in (product(left, right), product(left, right, out=whole[1 : m + 1])):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5 * k**0.5)
    torch.testing.assert_close(whole[1 : m + 1].double(), exact, rtol=0, atol=1e-5 * k**0.5)
    assert not whole[0].any()
    assert not whole[-1].any()


def test_only_large_products_in_single_precision_are_onednns() -> None:
    m, k, n = SIZES[-1]
    large, small = (noise(0, m, k), noise(1, n, k)), (noise(0, 5, k), noise(1, n, k))
    assert ONEDNN in operators(lambda: product(*large))
    assert ONEDNN not in operators(lambda: product(*small))
    assert ONEDNN not in operators(lambda: product(*(one.double() for one in large)))


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_gradients_of_linears_are_exact(tokens: int) -> None:
    x, weight = torch.zeros(tokens, 2, 4, dtype=torch.float64), noise(1, 3, 4).double()
    x += noise(0, *x.shape)
    assert torch.autograd.gradcheck(linear, [x.requires_grad_(), weight.requires_grad_()])


def test_gradients_by_onednn_equal_those_in_double_precision() -> None:
    m, k, n = SIZES[-1]
    given, slope = (noise(0, m, 1, k), noise(1, n, k)), noise(2, m, 1, n)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weight = (one.to(dtype).requires_grad_() for one in given)
        return torch.autograd.grad(linear(x, weight), (x, weight), slope.to(dtype))

    for found, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5 * n**0.5)


def test_frozen_linear_keeps_no_input() -> None:
    x, weight = noise(0, 3, 4).requires_grad_(), noise(1, 5, 4)
    y = linear(x, weight)
    node: Any = y.grad_fn
    assert [one is weight for one in node.saved_tensors if one is not None] == [True]
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))


def test_layers_and_head_use_them(run_ranks: RunRanks) -> None:
    """Nothing of a step with large enough sizes is left to `aten::mm`."""
    job = Job(settings={"hidden_size": 4096, "ffn_hidden_size": 128})
    (found,) = run_ranks(operators_of_a_step, 1, job)
    assert ONEDNN in found
    assert "aten::mm" not in found


# ------------------------------------------------------- functions that run inside ranks


def operators_of_a_step(rank: int, job: Job) -> set[str]:
    trainer = Trainer(job)
    return operators(lambda: trainer.step(0))
