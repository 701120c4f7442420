"""A step may call Megatron's schedule several times, once for each group of microbatches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunRanks
from tests.mimo import tiny

# Three microbatches: a group of two and a group of one, for encoder and language model.
GROUPS = [
    "encoders.vision.placement=colocated",
    "encoders.vision.grid={tp: 1}",
    "encoders.vision.encode_group=2",
]


def steps_with_overwriting_linears(rank: int, path: Path, overrides: list[str]) -> dict[str, Any]:
    """Inside a rank: `tiny.run_layout_steps`, with the flag and the linears of 8-bit training."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from mimo.check.steps import WatchedSteps, open_trainer, train_watched
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.parallel.build import build_layout

    class Linear(torch.autograd.Function):
        """Like Transformer Engine's linear: a step's first gradient overwrites DDP's sum."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, is_first: bool) -> Any:
            ctx.x, ctx.weight, ctx.is_first = x, weight, is_first
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
            of_weight = gradient.flatten(0, -2).t() @ ctx.x.flatten(0, -2)
            total = ctx.weight.main_grad
            total.copy_(of_weight if ctx.is_first else total + of_weight)
            ctx.weight.grad_added_to_main_grad = True
            return gradient @ ctx.weight, torch.zeros_like(of_weight), None

    def overwrite(linear: Any) -> None:
        linear.is_first_microbatch = True

        def forward(x: Any, *unused: Any, **options: Any) -> Any:
            is_first, linear.is_first_microbatch = linear.is_first_microbatch, False
            output = Linear.apply(x, linear.weight, is_first)
            return output if linear.bias is None else output + linear.bias, None

        linear.forward = forward

    recipe = load_recipe(path, overrides)
    trainer, dataset = open_trainer(recipe, build_layout(recipe))
    num_linears = 0
    for module in trainer.model.modules.values():
        for chunk in module.chunks:  # type: ignore[attr-defined]
            chunk.config = copy.copy(chunk.config)
            chunk.config.fp8 = "hybrid"
            for name, linear in chunk.named_modules():
                if ".layers." in name and isinstance(
                    linear, (ColumnParallelLinear, RowParallelLinear)
                ):
                    overwrite(linear)
                    num_linears += 1
    assert num_linears == 4 * (2 + 2), "four linears in each of two layers of both modules"
    watched = WatchedSteps(trainer.model.modules, dist.get_rank())
    steps = train_watched(trainer, dataset, watched, tiny.NUM_STEPS)
    return {"metrics": steps.metrics, "shards": steps.shards}


def test_in_8_bits_every_group_of_a_step_adds_to_the_weight_gradients(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    plain, fake = (
        tiny.assemble(run_ranks(steps, 1, path, GROUPS), "gradient")
        for steps in (tiny.run_layout_steps, steps_with_overwriting_linears)
    )
    expected = {name: {"gradient": gradient} for name, gradient in plain.items()}
    for name, error in tiny.errors(fake, expected, "gradient").items():
        assert error == pytest.approx(0, abs=1e-5), name
