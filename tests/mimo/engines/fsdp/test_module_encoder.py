"""An encoder under fsdp: run-ahead, colocated groups, lanes without items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.conftest import RunRanks
from tests.fsdp_job import OPTIMIZER, Job
from tests.fsdp_ranks import Counted, assembled, context, make_topology, same_names, sent, worst

WIDTH, ROWS = 6, 5


class Tower(nn.Module):
    """Items (n, WIDTH) -> rows (n, WIDTH); without items it encodes a blank one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.entry = nn.Linear(WIDTH, WIDTH, bias=False)
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.ends = ()
        self.tiny = nn.Parameter(torch.ones(1))  # fewer rows than ranks
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator))
        self.hf_names = {name: name for name, _ in self.named_parameters()}

    def forward(self, patches: Tensor, items: int) -> Tensor:
        hidden = self.entry(patches if items else patches.new_zeros(1, WIDTH))
        for unit in self.units:
            hidden = torch.tanh(unit(hidden))
        return (hidden * self.tiny)[:items].clone()


def patches(lane: int, number: int) -> Tensor:
    """A microbatch of a lane; lane 1 has no items."""
    generator = torch.Generator().manual_seed(10 * lane + number)
    return torch.randn(0 if lane == 1 else ROWS + number, WIDTH, generator=generator)


@dataclass(frozen=True)
class Case:
    """colocated: encoded in one go per group, and the caller runs backward."""

    shard: int
    colocated: bool
    run_ahead: int = 1
    reshard_after_forward: bool = True
    reduce_gradients: Literal["step", "microbatch"] = "step"
    microbatches: int = 4


def make(case: Case, topology: Any) -> Any:
    from mimo.engines.fsdp.module import FsdpModule
    from mimo.engines.fsdp.sharding import shard

    tower = Tower()
    shapes = {name: tuple(param.shape) for name, param in tower.named_parameters()}
    job = Job(
        dtype=torch.float32,
        reshard_after_forward=case.reshard_after_forward,
        reduce_gradients=case.reduce_gradients,
    )
    ctx = context(job, None if topology is None else topology.meshes["language"])
    shard(tower, ctx)
    groups: Any = None if topology is None else topology.modules["language"]
    names = same_names(shapes)
    return FsdpModule(
        "vision", groups, tower, ctx, names, OPTIMIZER, 1e-2, run_ahead=case.run_ahead
    )


def run(module: Any, case: Case, lanes: range) -> None:
    """Gradients of the sum of squared rows of these lanes, summed."""
    batches = [patches(lane, n) for n in range(case.microbatches) for lane in lanes]
    module.begin_step(forward_only=False)
    if not case.colocated:
        module.run_encoder(
            lambda batch, tower: tower(batch, len(batch)).square().sum(), batches, batches, False
        )
        return
    half = len(batches) // 2
    with module.accumulate_only():
        encode(module, torch.cat(batches[:half]))
    encode(module, torch.cat(batches[half:]))


def encode(module: Any, batch: Tensor) -> None:
    rows = module.encode(batch, len(batch))
    torch.autograd.backward([rows], [2 * rows.detach()])


def of_ranks(rank: int, cases: list[Case]) -> list[Any]:
    results = []
    for case in cases:
        topology = make_topology(Job(shard=case.shard))
        module = make(case, topology)
        with Counted() as counted:
            run(module, case, range(rank, rank + 1))
        module.finish_gradients(7)
        results.append((counted.reductions, sent(module.gradients())))
        topology.close()
    return results


CASES = [
    Case(2, colocated=False),
    Case(2, colocated=False, run_ahead=2, reshard_after_forward=False),
    Case(2, colocated=True),
    Case(2, colocated=False, reduce_gradients="microbatch"),
    Case(2, colocated=True, reduce_gradients="microbatch"),
]


def test_lanes_without_items_take_part_and_gradients_equal_one_ranks(run_ranks: RunRanks) -> None:
    results = run_ranks(of_ranks, 2, CASES)
    for number, case in enumerate(CASES):
        module = make(case, None)
        run(module, case, range(2))
        module.finish_gradients(7)
        expected = assembled([sent(module.gradients())], once=True)
        got = assembled([rank_results[number][1] for rank_results in results], once=False)
        assert worst(got, expected)[0] < 1e-5, case
        # Two layers and the root, once or in each backward.
        backwards = 2 if case.colocated else case.microbatches
        reductions = 3 if case.reduce_gradients == "step" else 3 * backwards
        assert [rank_results[number][0] for rank_results in results] == [reductions] * 2, case


def test_run_ahead_is_one_forward_and_one_backward_in_turns() -> None:
    events: list[str] = []

    def forward(number: int, tower: nn.Module) -> Tensor:
        events.append(f"F{number}")
        token = next(tower.parameters()).sum()
        token.register_hook(lambda gradient: events.append(f"B{number}"))
        return token

    module = make(Case(1, colocated=False, run_ahead=2), None)
    module.run_encoder(forward, range(5), range(5), False)
    assert " ".join(events) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    events.clear()
    module.run_encoder(forward, range(1), range(1), False)
    assert events == ["F0", "B0"]
    module.run_encoder(forward, range(2), range(2), True)
    assert events[2:] == ["F0", "F1"]
