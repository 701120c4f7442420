"""Bytes of a step between ranks, against what is counted by hand.

The tiny recipe: 3 microbatches of 4 samples of 128 tokens, all of which may be rows; H is 32, the
language model has 2 layers and 2 groups of keys of 8; the tower has width 16 and 2 layers, and an
item's patches are 4 for each row. Numbers are of 4 bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.roles import parameters_by_role
from mimo.parallel.build import build_layout
from mimo.slurm.traffic import Bridge, Pairs, traffic
from tests.mimo import tiny

TOKENS = 3 * 4 * 128
HIDDEN = TOKENS * 32 * 4  # bytes of all hidden states between two layers
ROWS = HIDDEN  # bytes of all rows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_recipe(tmp_path_factory.mktemp("traffic"))


def flows(path: Path, *overrides: str) -> dict[str, Pairs | Bridge]:
    recipe = load_recipe(path, overrides)
    found = traffic(recipe, build_layout(recipe))
    return {f"{one.kind} {one.name}": one for one in found}


def totals(path: Path, *overrides: str) -> dict[str, float]:
    return {name: one.total() for name, one in flows(path, *overrides).items()}


def gradients(path: Path, *overrides: str) -> float:
    recipe = load_recipe(path, overrides)
    (role,) = (r for r in parameters_by_role(recipe, build_layout(recipe)) if r.module == "vision")
    return role.gradients


def test_one_rank_each_exchanges_rows_and_their_gradients_alone(path: Path) -> None:
    assert totals(path) == {"bridge vision": 2 * ROWS}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # 4 all-reduces a layer; in all a ring of n moves 2(n-1) times what one rank has.
        (("language.grid.tp=4",), 2 * 4 * 2 * 3 * HIDDEN),
        (("language.grid={tp: 4, sp: true}",), 2 * 4 * 2 * 3 * HIDDEN),
        (("language.grid.tp=2",), 2 * 4 * 2 * 1 * HIDDEN),
        (("language.grid.tp=2", "language.recompute=full"), 2 * 6 * 2 * 1 * HIDDEN),
        (("language.grid={tp: 2, dp: 3}",), 2 * 4 * 2 * 1 * HIDDEN),
    ],
)
def test_tensor_parallel_ranks_reduce_hidden_states(
    path: Path, overrides: tuple[str, ...], expected: float
) -> None:
    assert totals(path, *overrides)["tp language"] == expected


def test_a_tower_reduces_its_patches_and_only_forward_if_it_is_frozen(path: Path) -> None:
    patches = 4 * TOKENS * 16 * 4
    split = "encoders.vision.grid.tp=2"
    assert totals(path, split)["tp vision"] == 2 * 4 * 2 * patches
    assert totals(path, split, "encoders.vision.freeze=tower")["tp vision"] == 2 * 2 * 2 * patches


def test_context_parallel_ranks_pass_keys_and_values_on(path: Path) -> None:
    keys = TOKENS * 2 * (2 * 8) * 4  # of all tokens, in one layer
    # Each rank's share goes to 3 others, three times.
    assert totals(path, "language.grid.cp=4")["cp language"] == 2 * 3 * 3 * keys
    assert totals(path, "language.grid={cp: 4, tp: 2}")["cp language"] == 2 * 3 * 3 * keys


def test_stages_pass_hidden_states_on_and_gradients_back(path: Path) -> None:
    # Whole without sequence parallelism; and the gradients of tied embeddings, twice.
    tied = 2 * 64 * 32 * 4
    assert totals(path, "language.grid.pp=2")["pp language"] == 2 * HIDDEN + tied
    assert totals(path, "language.grid={pp: 2, tp: 2}")["pp language"] == 2 * 2 * HIDDEN + tied
    shared = totals(path, "language.grid={pp: 2, tp: 2, sp: true}")["pp language"]
    assert shared == 2 * HIDDEN + tied
    # Chunks: two from the first stage to the last and one back; without tied embeddings.
    untied = ("language.model.tie_word_embeddings=false", "train.micro_batch_size=2")
    chunks = totals(path, "language.grid={pp: 2, vpp: 2}", *untied)["pp language"]
    assert chunks == 2 * HIDDEN * (2 + 1)


def test_lanes_sum_gradients(path: Path) -> None:
    lanes = ("encoders.vision.grid.dp=4", "train.optimizer=adam")
    own = gradients(path, *lanes)
    assert totals(path, *lanes)["dp vision"] == 2 * 3 * own
    shared = (*lanes, "train.distributed_optimizer=true")
    assert totals(path, *shared)["dp vision"] == 2 * 3 * own
    halved = totals(path, *shared, "train.precision=bf16")["dp vision"]
    assert halved == 1.5 * 3 * own  # weights of 2 bytes, gradients of 4


def test_what_is_frozen_sums_nothing(path: Path) -> None:
    found = totals(path, "encoders.vision.grid.dp=4", "encoders.vision.freeze=true")
    assert found == {"bridge vision": ROWS}


def test_neighbours_of_a_ring_exchange_and_no_others(path: Path) -> None:
    ring = flows(path, "encoders.vision.grid.dp=4")["dp vision"]
    assert isinstance(ring, Pairs)
    assert ring.pairs.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert ring.across(np.array([0, 0, 1, 1, 1])) == ring.total() / 2


def test_every_sender_has_rows_for_every_receiver(path: Path) -> None:
    overrides = ("encoders.vision.grid={tp: 2, dp: 2}", "language.grid={tp: 2, cp: 2, pp: 2}")
    bridge = flows(path, *overrides)["bridge vision"]
    assert isinstance(bridge, Bridge)
    ((senders, receivers),) = bridge.ends
    assert senders.tolist() == [0, 1, 2, 3]
    assert receivers.tolist() == [4, 5, 6, 7]  # not the second stage
    assert bridge.total() == 2 * ROWS
    assert bridge.across(np.array([0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1])) == ROWS
    copies = totals(path, *overrides, "bridge.delivery=replicated")["bridge vision"]
    assert copies == (4 + 1) * ROWS


def test_a_sender_has_rows_for_the_receivers_of_its_block_alone(path: Path) -> None:
    overrides = ("encoders.vision.grid.dp=4", "language.grid={tp: 2, dp: 2}")
    overrides += ("train.micro_batch_size=2", "bridge.block_ranks=2")
    bridge = flows(path, *overrides)["bridge vision"]
    assert isinstance(bridge, Bridge)
    ends = [[ranks.tolist() for ranks in block] for block in bridge.ends]
    assert ends == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert bridge.total() == 2 * ROWS
    assert bridge.across(np.array([0, 0, 1, 1, 0, 0, 1, 1])) == 0, "a block fits a node"


def test_rows_that_stay_on_a_rank_are_not_sent(path: Path) -> None:
    overrides = ("encoders.vision.placement=colocated", "language.grid.dp=3")
    found = totals(path, *overrides, "encoders.vision.grid={dp: 3}")
    assert found["bridge vision"] == pytest.approx(2 * ROWS * 6 / 9)


def test_a_limit_of_rows_and_a_smaller_wire_send_less(path: Path) -> None:
    packed = (
        "train.micro_batch_size=1",
        "data.tokens_per_microbatch=128",
        "bridge.wire_dtype=bf16",
    )
    found = totals(path, *packed, "data.rows_per_microbatch=32")
    assert found == {"bridge vision": 2 * 12 * 32 * 32 * 2}


def test_levels_go_to_the_stages_that_own_their_layers(path: Path) -> None:
    tower: dict[str, Any] = {"num_grid_per_side": 5, "deepstack_visual_indexes": [0, 1]}
    more = [f"encoders.vision.model.{key}={value}" for key, value in tower.items()]
    found = totals(path, "encoders.vision.family=qwen3_vl", *more, "language.grid.pp=2")
    # Embeddings and the first level, and the second level.
    assert found["bridge vision (levels 0, 1)"] == 2 * 2 * ROWS
    assert found["bridge vision (levels 2)"] == 2 * ROWS


@pytest.mark.parametrize(
    ("reshard", "reduce", "gathers", "reductions"),
    [
        (True, "step", 3 + 1, 1),
        (False, "step", 1, 1),
        (True, "microbatch", 2 * 3, 3),
        (False, "microbatch", 3, 3),
    ],
)
def test_lanes_that_share_weights_gather_them_for_each_pass(
    path: Path, reshard: bool, reduce: str, gathers: int, reductions: int
) -> None:
    known = "language.model.vocab_size=64"
    alone = load_recipe(path, [known])
    (whole,) = (r for r in parameters_by_role(alone, build_layout(alone)) if r.module == "language")
    recipe = load_recipe(path, ["language.grid.dp=4", "train.micro_batch_size=1", known])
    layout = build_layout(recipe)
    # Without a folder of transformers, no recipe says so itself.
    own = recipe.language.model_copy(
        update={"reshard_after_forward": reshard, "reduce_gradients": reduce}
    )
    cut = replace(layout.language, engine="fsdp", dp_replicate=2)
    found = traffic(recipe.model_copy(update={"language": own}), replace(layout, language=cut))
    total = sum(one.total() for one in found if (one.kind, one.name) == ("dp", "language"))
    # 12 samples on 4 lanes are 3 microbatches. Half of the weights come from the other lane of a
    # copy, half of the gradients go there; the share that a lane then has is summed over 2 copies.
    shared = 4 * (gathers * whole.weights + reductions * whole.gradients) / 2
    assert total == shared + 4 * whole.gradients / 2
