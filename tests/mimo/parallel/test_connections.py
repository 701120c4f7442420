"""Which ranks connect when a topology is built, and how long its groups are patient."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from tests.conftest import RunRanks
from tests.device_model import nccl
from tests.device_model.nccl import behave_like_nccl
from tests.mimo.tiny import write_recipe, write_samples

# 128 encoder ranks, and 896 of a language model on four stages.
LARGE = Layout(
    GridSpec(LANGUAGE, tp=8, sp=True, pp=4, dp=28, rank_offset=128),
    {"vision": GridSpec("vision", dp=128)},
    1024,
)


# ------------------------------------------------------- functions that run inside ranks


def join_large_world(layout: Layout, rank: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = str(layout.world_size)  # Megatron's grids look there
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)


def first_messages(_: int, layout: Layout, rank: int) -> dict[str, int]:
    """How many messages one rank of a large world starts, by group."""
    import torch.distributed as dist

    from mimo.parallel.groups import build_topology

    join_large_world(layout, rank)
    batch, counts = dist.batch_isend_irecv, Counter()

    def count(operations: Any) -> Any:
        (group,) = {one.group.group_desc for one in operations}
        assert group not in counts, "one batch in a group"
        counts[group] = len(operations)
        return batch(operations)

    dist.batch_isend_irecv = count
    build_topology(layout)
    return dict(counts)


def groups_of_a_rank(_: int, layout: Layout, rank: int) -> tuple[list[int], int]:
    """Sizes of the groups that one rank of a large world is in, and how many were asked for."""
    import torch.distributed as dist

    from mimo.parallel.groups import build_topology

    join_large_world(layout, rank)
    new_group, requests = dist.new_group, list[object]()

    def count(ranks: list[int], **options: Any) -> Any:
        requests.append(ranks)
        return new_group(ranks, **options)

    dist.new_group = count
    sizes = [group.size() for group in build_topology(layout).groups]
    return sorted(size for size in sizes if size > 1), len(requests)


def connect_under_the_rules_of_nccl(_: int, layout: Layout) -> bool:
    from mimo.parallel.groups import build_topology

    behave_like_nccl()
    return build_topology(layout).owns(LANGUAGE)


def groups_of_a_step(_: int, recipe: Path, overrides: list[str]) -> tuple[set[str], set[str]]:
    """Groups whose first collective is at set-up, as with NCCL, and in the first step."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from mimo.check.steps import WatchedSteps, open_trainer, train_watched
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.parallel import connections
    from mimo.parallel.build import build_layout

    class Collectives(TorchDispatchMode):
        groups: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "c10d" and not func._opname.startswith(("send", "recv")):
                boxed = next(one for one in args if isinstance(one, torch.ScriptObject))
                group = dist.ProcessGroup.unbox(boxed)
                if group.size() > 1:
                    self.groups.add(group.group_desc)
            return func(*args, **(kwargs or {}))

    connections.has_gpu = lambda: True
    loaded = load_recipe(recipe, overrides)
    with Collectives() as collectives:
        trainer, dataset = open_trainer(loaded, build_layout(loaded))
        at_set_up = set(collectives.groups)
        train_watched(trainer, dataset, WatchedSteps(trainer.model.modules, dist.get_rank()), 1)
    return at_set_up, collectives.groups - at_set_up


def sums_at_set_up(_: int, layout: Layout) -> list[str]:
    """Groups over which a rank with NCCL sums a word when its groups are made, in order."""
    import torch.distributed as dist

    from mimo.parallel import connections
    from mimo.parallel.groups import build_topology

    connections.has_gpu = lambda: True
    all_reduce, found = dist.all_reduce, list[str]()

    def recorded(tensor: Any, group: Any) -> None:
        found.append(group.group_desc)
        all_reduce(tensor, group=group)

    dist.all_reduce = recorded
    build_topology(layout)
    return found


def connect_a_ring(rank: int, cp: int) -> list[tuple[str, int]]:
    """First messages of a context-parallel rank where Transformer Engine is installed."""
    from mimo.ops.acceleration import TRANSFORMER_ENGINE, Machine
    from mimo.parallel import groups

    groups.this_machine = lambda: Machine((9, 0), frozenset({TRANSFORMER_ENGINE}))
    found, start = list[tuple[str, int]](), nccl._Device.start

    def recorded(self: Any, calls: Any, single: bool = False) -> Any:
        found.extend(("single" if single else "batch", call.peer) for call in calls)
        return start(self, calls, single)

    nccl._Device.start = recorded  # type: ignore[method-assign]
    behave_like_nccl()
    groups.build_topology(Layout(GridSpec(LANGUAGE, cp=cp), {}, cp))
    return found


def patience_of_a_run(rank: int, folder: Path) -> list[float]:
    """Seconds that each group of a training run waits for a collective call, the world's last."""
    import torch
    import torch.distributed as dist

    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.checkpoint.resume import FromScratch
    from mimo.parallel.build import build_layout
    from mimo.train import rank as run

    recipe = load_recipe(folder / "tiny.yaml", ["bridge.timeout_seconds=22", "language.grid.pp=2"])
    found = []

    def train(recipe: Any, topology: Any, *rest: Any) -> None:
        for group in topology.groups:
            backend = group._get_backend(torch.device("cpu"))
            found.append(backend.options._timeout.total_seconds())

    run._train = train
    (folder / f"run {rank}").mkdir()
    run.train_in_world(recipe, build_layout(recipe), folder / f"run {rank}", FromScratch())
    assert dist.is_initialized()
    return found


# ------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        # Every receiver of the first stage, which has 8 · 28 ranks.
        (0, {"bridge.vision.0.forward": 224, "bridge.vision.0.backward": 224}),
        # Every sender, and the second stage, to and from.
        (130, {"bridge.vision.0.forward": 128, "bridge.vision.0.backward": 128, "language.pp": 2}),
        (600, {"language.pp": 4}),
    ],
)
def test_first_messages_are_bounded_by_the_pairs_of_a_layout(
    run_ranks: RunRanks, rank: int, expected: dict[str, int]
) -> None:
    assert run_ranks(first_messages, 1, LARGE, rank) == [expected]


def test_a_rank_connects_to_its_own_block_of_lanes_alone(run_ranks: RunRanks) -> None:
    layout = replace(LARGE, blocks=4)
    assert run_ranks(first_messages, 1, layout, 0) == [
        {"bridge.vision.0.forward": 56, "bridge.vision.0.backward": 56}
    ]
    ((sizes, num_asked),) = run_ranks(groups_of_a_rank, 1, layout, 0)
    assert sizes == [32 + 56, 32 + 56, 128]
    assert num_asked == 1652 + 2 * 3


@pytest.mark.parametrize(
    ("rank", "sizes"),
    [
        # All encoder lanes; each way of the bridge.
        (0, [128, 352, 352]),
        # Ends of the stages, stages, tp, lanes, one lane, one stage, each way of the bridge, all.
        (130, [2, 4, 8, 28, 32, 224, 352, 352, 896]),
        (600, [4, 8, 28, 32, 224, 896]),
    ],
)
def test_a_rank_of_a_large_job_has_few_groups(
    run_ranks: RunRanks, rank: int, sizes: list[int]
) -> None:
    ((found, num_asked),) = run_ranks(groups_of_a_rank, 1, LARGE, rank)
    assert found == sizes
    assert num_asked == 1652  # most of single ranks, which cost microseconds


def test_ranks_of_a_lane_that_share_out_rows_connect_with_each_other(run_ranks: RunRanks) -> None:
    shared = replace(LARGE, language=replace(LARGE.language, sp=False))
    (found,) = run_ranks(first_messages, 1, shared, 130)
    assert found["language.tp"] == 2 * 7


@pytest.mark.parametrize(
    "language",
    [
        GridSpec(LANGUAGE, pp=4, vpp=2),
        GridSpec(LANGUAGE, pp=2, vpp=2, tp=2),
        GridSpec(LANGUAGE, pp=4),
    ],
    ids=str,
)
def test_connecting_closes_no_circle_of_waiting_ranks(
    run_ranks: RunRanks, language: GridSpec
) -> None:
    layout = Layout(replace(language, rank_offset=3), {"vision": GridSpec("vision", dp=3)}, 7)
    assert run_ranks(connect_under_the_rules_of_nccl, 7, layout) == [False] * 3 + [True] * 4


@pytest.mark.parametrize(
    ("ranks", "overrides", "expected"),
    [
        (
            6,
            ["encoders.vision.grid.tp=2", "language.grid={tp: 2, pp: 2, dp: 1}"],
            {"language.tp", "language.pp"},  # with two stages the ends are all of them
        ),
        (
            5,
            ["language.grid={cp: 2, dp: 2}", "train.micro_batch_size=2"],
            {"language.cp", "language.dp_cp"},
        ),
    ],
    ids=["pp2 tp2", "cp2 dp2"],
)
def test_no_group_has_its_first_collective_inside_a_step(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, overrides: list[str], expected: set[str]
) -> None:
    write_samples(tmp_path)
    found = run_ranks(groups_of_a_step, ranks, write_recipe(tmp_path), overrides)
    assert [late for _, late in found] == [set()] * ranks
    at_set_up = set().union(*(early for early, _ in found))
    assert {one for one in at_set_up if one.startswith("language")} == expected


def test_a_module_on_fsdp_connects_only_the_groups_of_its_mesh(run_ranks: RunRanks) -> None:
    layout = Layout(GridSpec(LANGUAGE, dp=4, dp_replicate=2, engine="fsdp"), {}, 4)
    expected = ["default_pg", "dp_replicate", "dp_shard"]
    assert run_ranks(sums_at_set_up, 4, layout) == [expected] * 4


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_the_ring_of_transformer_engine_is_connected(run_ranks: RunRanks, cp: int) -> None:
    for rank, found in enumerate(run_ranks(connect_a_ring, cp, cp)):
        kind = "batch" if cp == 2 else "single"
        assert set(found) == {(kind, (rank + 1) % cp), (kind, (rank - 1) % cp)}


def test_every_group_of_a_run_has_the_recipes_timeout(run_ranks: RunRanks, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    for found in run_ranks(patience_of_a_run, 3, tmp_path):
        assert found
        assert set(found) == {33.0}  # half as long again as a bridge transfer
