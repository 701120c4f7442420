"""Functions with backwards of their own: exact gradients, and the bits of the plain form.

Letters: T tokens, B batch, N heads, D head size, H hidden, F inner size of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mimo.ops.gate import gate
from mimo.ops.norms import rms_norm
from mimo.ops.rope import rotate
from tests.conftest import RunRanks
from tests.language_steps import Job, Trainer, microbatches
from tests.lone_module import noise

tanh_gelu = partial(functional.gelu, approximate="tanh")
TOKENS = [0, 1, 7]


def angles(tokens: int, size: int) -> Tensor:
    """(T, 1, 1, D) fp32."""
    half = 9 * noise(5, tokens, 1, 1, size // 2)
    return torch.cat((half, half), dim=-1)


def plain_rotation(x: Tensor, frequencies: Tensor) -> Tensor:
    """As Megatron's unfused embedding."""
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
    found: dict[str, Case] = {
        "rotate": (
            lambda x: rotate(turns, x[..., :size])[0],
            lambda x: plain_rotation(x[..., :size], turns),
            [wide],
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
        found[name] = (
            partial(gate, activation=activation),
            partial(plain_gate, activation=activation),
            [wide],
        )
    return found


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", cases(1, 2))
def test_gradients_are_exact(name: str, tokens: int) -> None:
    ours, _, given = cases(tokens, 6)[name]
    assert torch.autograd.gradcheck(ours, [one.requires_grad_() for one in given])


# In 16 bits the norm is torch's.
BITS = [
    (name, dtype)
    for name in cases(1, 2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    if name != "norm" or dtype != torch.bfloat16
]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("name", "dtype"), BITS, ids=str)
def test_bits_are_those_of_the_plain_form(name: str, dtype: torch.dtype, tokens: int) -> None:
    ours, plain, given = cases(tokens, 64)[name]
    found = []
    for function in (ours, plain):
        leaves = [one.to(dtype).requires_grad_() for one in given]
        output = function(*leaves)
        gradients = torch.autograd.grad(output, leaves, noise(3, *output.shape).to(dtype))
        found.append((output, *gradients))
    for own, expected in zip(*found, strict=True):
        assert torch.equal(own, expected)


def test_frozen_norm_has_no_gradient_of_its_weight() -> None:
    x, weight = noise(0, 3, 8).requires_grad_(), noise(1, 8)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_layers_use_them(run_ranks: RunRanks) -> None:
    """No norm, activation or rotation leaves autograd more than one operation."""
    (found,) = run_ranks(operations, 1, Job(dense=True))
    assert {"_RotateBackward", "_GateBackward", "_RMSNormBackward"} <= found
    left = {"CatBackward0", "SiluBackward0", "PowBackward0", "RsqrtBackward0", "NegBackward0"}
    assert not left & found


# ------------------------------------------------------- functions that run inside ranks


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
