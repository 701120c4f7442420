"""Defaults for speed follow from layout and device; the recipe's own choice comes first."""

from __future__ import annotations

from typing import Any

import pytest

from mimo.config.schema import Train
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, overlap_of, variables_of

SHARED = {"distributed_optimizer": True}


@pytest.mark.parametrize(
    ("given", "on_gpu", "on_cpu"),
    [
        ({}, (True, False), (False, False)),
        (SHARED, (True, True), (False, False)),
        (SHARED | {"overlap_param_gather": False}, (True, False), (False, False)),
        (SHARED | {"overlap_param_gather": True}, (True, True), (True, True)),
        (SHARED | {"overlap_grad_reduce": False}, (False, False), (False, False)),
        ({"overlap_grad_reduce": True}, (True, False), (True, False)),
    ],
)
def test_auto_overlaps_on_gpus_and_a_choice_holds_everywhere(
    given: dict[str, Any], on_gpu: tuple[bool, bool], on_cpu: tuple[bool, bool]
) -> None:
    train = Train(steps=1, global_batch_size=1, **given)
    assert overlap_of(train, on_gpu=True) == on_gpu
    assert overlap_of(train, on_gpu=False) == on_cpu


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overlap_param_gather": True}, "needs distributed_optimizer: true"),
        (
            SHARED | {"overlap_param_gather": True, "overlap_grad_reduce": False},
            "needs overlap_grad_reduce",
        ),
    ],
)
def test_late_gathers_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Train(steps=1, global_batch_size=1, **given)


def ranks_with(layout: Layout, name: str, value: str) -> list[int]:
    """The ranks that get this value of an environment variable from their layout."""
    return [
        rank
        for rank in range(layout.world_size)
        if (name, value) in [(v.name, v.value) for v in variables_of(layout, rank)]
    ]


ONE_QUEUE = ("CUDA_DEVICE_MAX_CONNECTIONS", "1")
EAGER = ("CUDA_MODULE_LOADING", "EAGER")


def test_tensor_parallel_ranks_launch_in_order_unless_they_post_transfers_ahead() -> None:
    vision = GridSpec("vision", tp=2)
    language = GridSpec(LANGUAGE, tp=2, pp=2, rank_offset=2)
    layout = Layout(language, {"vision": vision}, 6)
    # The encoder and the first stage exchange rows, the second stage does not.
    assert ranks_with(layout, *ONE_QUEUE) == [4, 5]


def test_colocated_encoders_post_nothing_ahead_and_context_parallel_ranks_do() -> None:
    vision = GridSpec("vision", dp=2)
    together = {"vision": vision}
    colocated = frozenset(together)
    language = GridSpec(LANGUAGE, tp=2)
    assert ranks_with(Layout(language, together, 2, colocated), *ONE_QUEUE) == [0, 1]
    lanes = Layout(GridSpec(LANGUAGE, dp=2), together, 2, colocated)
    for layout in (Layout(GridSpec(LANGUAGE, tp=2, cp=2), {}, 4), lanes):
        assert ranks_with(layout, *ONE_QUEUE) == []


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_kernels_load_at_the_start_only_at_the_ends_of_a_bridge(engine: Any) -> None:
    vision = {"vision": GridSpec("vision", dp=2, engine=engine)}
    language = GridSpec(LANGUAGE, tp=2, pp=2, rank_offset=2)
    assert ranks_with(Layout(language, vision, 6), *EAGER) == [0, 1, 2, 3]
    language = GridSpec(LANGUAGE, dp=2, engine=engine)
    colocated = frozenset(vision)
    assert ranks_with(Layout(language, vision, 2, colocated), *EAGER) == []
