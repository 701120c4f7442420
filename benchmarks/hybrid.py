"""The contest of hybrid layers' gated delta rule with transformers' form in plain PyTorch.

A part of `python -m benchmarks.experts`.
Both compute outputs and gradients of a layer on one core, each in a process of its own.
transformers knows no packed segments: it is called once for each.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from benchmarks import harness
from benchmarks.harness import Bound, Contest, Run
from mimo.ops.delta_rule import gated_delta_rule

OURS, THEIRS = "ours", "transformers"
SIZES = (16, 32, 128)  # key heads, value heads and head size of Qwen3.5
CASES = (2048,), (1024, 512, 256, 128, 64, 64), (32,) * 64


def theirs(*inputs: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Call transformers' function once for each segment."""
    rule = partial(torch_chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True)
    segments = (x[None].split(lengths, dim=1) for x in inputs)
    return torch.cat([rule(*parts)[0][0] for parts in zip(*segments, strict=True)])


def make(sizes: tuple[int, int, int], lengths: tuple[int, ...], name: str) -> Any:
    """Draw inputs in a contestant's process; return its forward and backward."""
    (keys, values, size), total = sizes, sum(lengths)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    inputs = [draw(total, heads, size) for heads in (keys, keys, values)]
    inputs += [-draw(total, values).square(), draw(total, values).sigmoid()]
    inputs, gradient = [x.requires_grad_() for x in inputs], draw(total, values, size)
    function = partial(gated_delta_rule if name == OURS else theirs, lengths=lengths)
    before = psutil.Process().memory_info().rss

    def run() -> Run:
        timed = harness.timed(
            lambda: [output := function(*inputs), *torch.autograd.grad(output, inputs, gradient)]
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        result = {"peak": peak, "norms": [float(x.detach().norm()) for x in timed.result]}
        return Run(timed.seconds, timed.processor_seconds, result)

    return run


def judge(contests: Sequence[Contest], speed: bool) -> Iterator[Bound]:
    """Yield all bounds, held or missed."""
    for contest in contests:
        pairs = zip(*(runs[-1].result["norms"] for runs in contest.runs.values()), strict=True)
        error = max(abs(ours - norm) / norm for ours, norm in pairs)
        yield Bound(f"{contest.name}: difference of norms, as a share", error, 1e-4, True)
        if speed:
            time, peak = (contest.ratio(THEIRS, figure) for figure in ("seconds", "peak"))
            yield Bound(f"{contest.name}: time of {THEIRS}, times ours", time, 1.5, False)
            yield Bound(f"{contest.name}: peak memory, times {THEIRS}", 1 / peak, 0.6, True)


def contests(rounds: int, quick: bool) -> list[Contest]:
    """Let both compute every case in turns."""
    sizes, cases, results = SIZES, CASES, list[Contest]()
    if quick:
        sizes, cases, rounds = (1, 2, 16), ((100,), (50, 30, 1)), 1
    for lengths in cases:
        sides = [harness.workers(partial(make, sizes, lengths, name)) for name in (OURS, THEIRS)]
        with sides[0] as ours, sides[1] as other:
            runs = harness.take_turns({OURS: ours, THEIRS: other}, 1 + rounds)
        timed = {name: of_name[1:] for name, of_name in runs.items()}
        name = f"delta rule, {len(lengths)} of at most {max(lengths)} tokens"
        results.append(Contest(name, timed))
    return results
