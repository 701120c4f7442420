"""Experts of Hugging Face checkpoints, fused or one by one, into any layout and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import HFCheckpoint
from mimo.checkpoint.hf.recipes import architecture_of_folder, load_recipe
from mimo.families.keymap import Run
from mimo.parallel.build import build_layout
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.checkpoint.hf import folders
from tests.mimo.checkpoint.hf.test_convert import save_in_layout

GB = 10**9
LAYOUTS = {
    "ep2_tp2_sp_pp2": ["language.grid={tp: 2, sp: true, ep: 2, pp: 2}"],
    "ep2_etp2": ["language.grid={tp: 2, etp: 2, ep: 2, dp: 2}"],
}
# Of each text-only folder and its modules: the experts are stored one by one.
FUSED, ONE_BY_ONE = "qwen3_vl_moe", "qwen3_moe"


@pytest.fixture(scope="module", params=[FUSED, ONE_BY_ONE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.make(request.param, tmp_path_factory.mktemp(request.param) / "model")


def write_recipe(folder: Path, path: Path) -> Path:
    recipe = folders.write_recipe(folder, path)
    if folder.parent.name.startswith(ONE_BY_ONE):
        recipe.write_text(recipe.read_text().replace("{vision: {grid: {dp: 1}}}", "{}"))
    return recipe


@pytest.mark.parametrize("layout", quick(LAYOUTS, "ep2_etp2"))
def test_what_a_layout_with_experts_read_and_saved_is_exported_bit_for_bit(
    run_ranks: RunRanks, folder: Path, tmp_path: Path, layout: str
) -> None:
    recipe = write_recipe(folder, tmp_path / "recipe.yaml")
    world = build_layout(load_recipe(recipe, LAYOUTS[layout])).world_size
    run_ranks(save_in_layout, world, recipe, LAYOUTS[layout])
    convert_to_hf(tmp_path / "run", tmp_path / "exported", shard_bytes=GB)
    folders.assert_same_tensors(tmp_path / "exported", folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [FUSED, ONE_BY_ONE])
def test_a_round_trip_keeps_every_bit(tmp_path: Path, family: str, dtype: str) -> None:
    folder = folders.make(family, tmp_path / "model", dtype=dtype)
    stored = folders.tensors(folder)
    assert any("experts.7.gate_proj" in key for key in stored) == (family == ONE_BY_ONE)
    folders.assert_round_trip(folder, tmp_path, shard_bytes=10**6)


def test_a_rank_reads_its_own_experts_alone(folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(folder, tmp_path / "recipe.yaml"))
    architecture = architecture_of_folder(folder)
    weights = architecture.weights_of(recipe)
    checkpoint = HFCheckpoint(folder, architecture, weights)
    by_name = {weight.name: weight for weight in weights["language"]}
    weight = by_name["decoder.layers.1.mlp.experts.linear_fc1.weight"]
    (run,) = weight.runs
    whole = checkpoint.matrix(run)
    assert whole.shape == (8 * 96, 128)
    checkpoint.folder.bytes_read = 0
    # The second half of the third expert and all of the fourth, some columns of them.
    part = checkpoint.matrix(Run(run.source, 2 * 96 + 48, 48 + 96), slice(3, 50))
    assert torch.equal(part, whole[240:384, 3:50])
    assert checkpoint.folder.bytes_read == 2 * 96 * 128 * 4
