"""Ranks lie on the least nodes that hold their tensor-parallel groups."""

from pathlib import Path

from mimo.cluster.placement import Placement, place
from mimo.hf.recipes import load_phases
from mimo.layout.build import build_layout
from tests.mimo import tiny


def placed(directory: Path, *overrides: str, how=place, hetjob: bool = False) -> Placement:
    phased = load_phases(tiny.write_recipe(directory), overrides)
    return how(phased, phased.each(build_layout), hetjob)


def test_17_ranks_on_nodes_of_8_keep_their_tensor_parallel_groups_whole(tmp_path: Path) -> None:
    overrides = ("language.grid={tp: 4, dp: 4}", "train.global_batch_size=16")
    assert placed(tmp_path, *overrides).nodes == (
        (0,),
        (1, 2, 3, 4, 5, 6, 7, 8),
        (9, 10, 11, 12, 13, 14, 15, 16),
    )
