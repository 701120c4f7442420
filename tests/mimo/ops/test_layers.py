"""Functions with backwards of their own: exact gradients, and the bits of the plain form.

Letters: M rows, K summed over, N columns of a product; T tokens, B batch, N heads, D head size, H
hidden, F inner size of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mimo.ops.layers import gate, gated_norm, linear, product, rms_norm, rotate
from tests.conftest import RunRanks
from tests.language_steps import Job, Trainer, microbatches
from tests.lone_module import noise

# ---------------------------------------------------------------------------- products

SIZES = [(0, 8, 3), (1, 8, 3), (5, 8, 3), (300, 96, 200)]
ONEDNN = "mkldnn::_linear_pointwise"


def operators(function: object) -> set[str]:
    """Names of the operators that it calls."""
    assert callable(function)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact(size: tuple[int, int, int], transposed: bool) -> None:
    """Also of transposed matrices, and into a part of a larger one."""
    m, k, n = size
    left = noise(0, k, m).T if transposed else noise(0, m, k)
    right = noise(1, k, n).T if transposed else noise(1, n, k)
    exact = left.double() @ right.double().T
    whole = torch.zeros(m + 2, n)
    for result in (product(left, right), product(left, right, out=whole[1 : m + 1])):
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=1e-5 * k**0.5)
    torch.testing.assert_close(whole[1 : m + 1].double(), exact, rtol=0, atol=1e-5 * k**0.5)
    assert not whole[0].any()
    assert not whole[-1].any()


def test_only_large_products_in_single_precision_are_onednns() -> None:
    m, k, n = SIZES[-1]
    large, small = (noise(0, m, k), noise(1, n, k)), (noise(0, 5, k), noise(1, n, k))
    assert ONEDNN in operators(lambda: product(*large))
    assert ONEDNN not in operators(lambda: product(*small))
    assert ONEDNN not in operators(lambda: product(*(matrix.double() for matrix in large)))


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_gradients_of_linears_are_exact(tokens: int) -> None:
    x, weight = torch.zeros(tokens, 2, 4, dtype=torch.float64), noise(1, 3, 4).double()
    x += noise(0, *x.shape)
    assert torch.autograd.gradcheck(linear, [x.requires_grad_(), weight.requires_grad_()])


def test_gradients_by_onednn_equal_those_in_double_precision() -> None:
    m, k, n = SIZES[-1]
    inputs, slope = (noise(0, m, 1, k), noise(1, n, k)), noise(2, m, 1, n)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weight = (tensor.to(dtype).requires_grad_() for tensor in inputs)
        return torch.autograd.grad(linear(x, weight), (x, weight), slope.to(dtype))

    for gradient, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=1e-5 * n**0.5)


def test_frozen_linear_keeps_no_input() -> None:
    x, weight = noise(0, 3, 4).requires_grad_(), noise(1, 5, 4)
    y = linear(x, weight)
    node: Any = y.grad_fn
    assert [tensor is weight for tensor in node.saved_tensors if tensor is not None] == [True]
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))


def test_layers_and_head_compute_large_products_by_onednn(run_ranks: RunRanks) -> None:
    """Nothing of a step with large enough sizes is left to `aten::mm`."""
    job = Job(settings={"hidden_size": 4096, "ffn_hidden_size": 128})
    (found,) = run_ranks(operators_of_a_step, 1, job)
    assert ONEDNN in found
    assert "aten::mm" not in found


# ------------------------------------------------------------- gates, norms, rotations

tanh_gelu = partial(functional.gelu, approximate="tanh")
TOKENS = [0, 1, 7]


def angles(tokens: int, size: int) -> Tensor:
    """(T, 1, 1, D) fp32."""
    half = 9 * noise(5, tokens, 1, 1, size // 2)
    return torch.cat((half, half), dim=-1)


def plain_rotation(x: Tensor, frequencies: Tensor) -> Tensor:
    """The rotation of Megatron's unfused embedding."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = frequencies.cos().to(x.dtype), frequencies.sin().to(x.dtype)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def plain_gate(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    opened, values = both.chunk(2, dim=-1)
    return activation(opened) * values


Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]


def cases(tokens: int, size: int) -> dict[str, Case]:
    """Ours, the plain form, and what both take, in fp64. Heads are cut from a larger tensor."""
    wide = torch.zeros(tokens, 1, 2, 2 * size, dtype=torch.float64)
    wide += noise(0, *wide.shape)
    weight, turns = noise(1, size), angles(tokens, size)
    by_name: dict[str, Case] = {
        "rotate": (
            lambda x: rotate(turns, x[..., :size])[0],
            lambda x: plain_rotation(x[..., :size], turns),
            [wide],
        ),
        "rotate a part": (
            lambda x: rotate(turns, x)[0],
            lambda x: torch.cat((plain_rotation(x[..., :size], turns), x[..., size:]), dim=-1),
            [wide],
        ),
        "gated norm": (
            lambda x, w: gated_norm(x[..., :size], x[..., size:], w, 1e-6),
            lambda x, w: (
                functional.rms_norm(x[..., :size], w.shape, w, 1e-6)
                * functional.silu(x[..., size:])
            ),
            [wide, weight.double()],
        ),
        "norm": (
            lambda x, w: rms_norm(x[..., :size], w, 1e-6),
            lambda x, w: functional.rms_norm(x[..., :size], w.shape, w, 1e-6),
            [wide, weight.double()],
        ),
    }
    for name, activation in {
        "SwiGLU": functional.silu,
        "GeGLU": functional.gelu,
        "GeGLU by tanh": tanh_gelu,
    }.items():
        by_name[name] = (
            partial(gate, activation=activation),
            partial(plain_gate, activation=activation),
            [wide],
        )
    return by_name


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", cases(1, 2))
def test_gradients_of_gates_norms_and_rotations_are_exact(name: str, tokens: int) -> None:
    ours, _, inputs = cases(tokens, 6)[name]
    assert torch.autograd.gradcheck(ours, [tensor.requires_grad_() for tensor in inputs])


# In 16 bits the norm is torch's.
BITS = [
    (name, dtype)
    for name in cases(1, 2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    if "norm" not in name or dtype != torch.bfloat16
]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("name", "dtype"), BITS, ids=str)
def test_bits_are_those_of_the_plain_form(name: str, dtype: torch.dtype, tokens: int) -> None:
    ours, plain, inputs = cases(tokens, 64)[name]
    results = []
    for function in (ours, plain):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        output = function(*leaves)
        gradients = torch.autograd.grad(output, leaves, noise(3, *output.shape).to(dtype))
        results.append((output, *gradients))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_layers_use_our_gates_norms_and_rotations(run_ranks: RunRanks) -> None:
    """No norm, activation or rotation leaves autograd more than one operation."""
    (found,) = run_ranks(operations, 1, Job(dense=True))
    assert {"_RotateBackward", "_GateBackward", "_RMSNormBackward"} <= found
    left = {"CatBackward0", "SiluBackward0", "PowBackward0", "RsqrtBackward0", "NegBackward0"}
    assert not left & found


# ------------------------------------------------------------- functions that run inside ranks


def operators_of_a_step(rank: int, job: Job) -> set[str]:
    trainer = Trainer(job)
    return operators(lambda: trainer.step(0))


def operations(rank: int, job: Job) -> set[str]:
    """Names of what autograd has to go back through from the losses of a microbatch."""
    trainer = Trainer(job)
    losses, _ = trainer._forward_step(iter([next(microbatches(0, 0, job.dense))]), trainer.raw[0])
    names: set[str] = set()
    seen, todo = set[Any](), [losses.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name().rpartition(".")[2])
            todo += [before for before, _ in node.next_functions]
    return names
