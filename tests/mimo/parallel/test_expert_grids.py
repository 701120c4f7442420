"""Grids with experts: which ranks share them out, and what is refused by key."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from tests.conftest import RunRanks
from tests.mimo.check.cells import RECIPE, SPARSE


def groups_of(rank: int, axes: dict[str, Any]) -> dict[str, list[int]]:
    """The ranks of this rank's groups of experts."""
    from mimo.parallel.groups import build_topology

    grid = GridSpec(LANGUAGE, **axes)
    topology = build_topology(Layout(grid, {}, grid.size))
    groups: Any = topology.modules[LANGUAGE]
    names = ("ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp", "intra_expt_dp", "tp_dp_cp")
    ranks = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}
    topology.close()
    return ranks


def test_experts_see_the_ranks_of_a_stage_in_another_order(run_ranks: RunRanks) -> None:
    axes = {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "ep": 2, "etp": 2}
    first, *_, last = run_ranks(groups_of, 8, axes)
    assert first == {
        "ep": [0, 2],
        "expt_tp": [0, 1],
        "tp_ep": [0, 1, 2, 3],
        "tp_ep_pp": [0, 1, 2, 3, 4, 5, 6, 7],
        "expt_dp": [0],
        "intra_expt_dp": [0],
        "tp_dp_cp": [0, 1, 2, 3],
    }
    assert last["ep"] == [5, 7]
    assert last["tp_ep"] == [4, 5, 6, 7]


def test_ranks_with_the_same_experts_are_their_replicas(run_ranks: RunRanks) -> None:
    groups = run_ranks(groups_of, 8, {"tp": 2, "cp": 2, "dp": 2, "ep": 2})
    assert groups[5]["ep"] == groups[5]["tp_ep"] == [4, 5]
    assert groups[5]["expt_tp"] == [5]
    assert groups[5]["expt_dp"] == [1, 3, 5, 7]
    dense = run_ranks(groups_of, 4, {"tp": 2, "dp": 2})
    assert dense[1]["tp_ep"] == [1]
    assert dense[1]["expt_dp"] == [0, 1, 2, 3]


REFUSED = [
    (["language.grid={dp: 2, ep: 4}"], "grid.ep: got 4 with etp 1, but ep · etp must divide"),
    (["language.grid={tp: 2, etp: 4}"], "grid.ep: got 1 with etp 4, but ep · etp must divide"),
    (["language.grid={dp: 3, ep: 3}"], "grid.ep: got 3, but it must divide language.model.num_ex"),
    (["language.grid={cp: 5, etp: 5}"], "grid.etp: got 5, but it must divide language.model.ffn"),
    (["encoders.vision.grid={dp: 2, ep: 2}"], "vision.grid.ep: got 2, but expert parallelism in"),
    (
        ["language.model.balance_loss=0.1", "data.packing=false"],
        "model.balance_loss: got 0.1, which needs language.engine: megatron and data.packing: true",
    ),
    (
        ["language.grid={pp: 2, dp: 1}", "language.model.pool_layers=true"],
        "pp · vpp = 2 must be 1 for pool_layers",
    ),
    (["language.model.experts_per_token=17"], "17 must be at most num_experts 16"),
    (["language.grid={tp: 2, etp: 2}", "language.lora={}"], "grid.etp: got 2, but adapters of ex"),
    (["train.fp8=current", "train.precision=bf16"], "train.fp8: got current, but experts compute"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_grids_and_settings_that_do_not_fit_are_refused_by_key(
    overrides: list[str], message: str
) -> None:
    sizes = ["train.global_batch_size=48", "data.sequence_length=480"]
    with pytest.raises(RecipeError) as refusal:
        check_recipe(load_recipe(RECIPE, [*SPARSE, *sizes, *overrides]), None)
    assert message in "\n".join(refusal.value.problems)


def test_a_model_without_experts_has_no_axes_of_experts() -> None:
    recipe = load_recipe(RECIPE, ["language.grid={dp: 2, ep: 2}"])
    with pytest.raises(RecipeError, match=r"language\.grid\.ep: got 2, but this family has no ex"):
        check_recipe(recipe, None)
