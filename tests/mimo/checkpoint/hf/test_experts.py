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
# Experts are stored in one tensor, or one by one; the last has linear attention as well, and its
# experts one by one.
FUSED, ONE_BY_ONE, HYBRID = "qwen3_vl_moe", "qwen3_moe", "qwen3_5_moe"
TEXT_ONLY = ONE_BY_ONE


@pytest.fixture(scope="module", params=quick([FUSED, ONE_BY_ONE, HYBRID], FUSED, HYBRID))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folders.make(request.param, tmp_path_factory.mktemp(request.param) / "model")
    if request.param == HYBRID:
        # Heads that predict several tokens, which the model is trained without.
        heads = {"mtp.fc.weight": torch.randn(128, 256), "mtp.norm.weight": torch.randn(128)}
        folders.rewrite(folder, lambda tensors: tensors | heads)
    return folder


def write_recipe(folder: Path, path: Path) -> Path:
    recipe = folders.write_recipe(folder, path)
    if folder.parent.name.startswith(TEXT_ONLY):
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
@pytest.mark.parametrize("family", [FUSED, ONE_BY_ONE, HYBRID])
def test_a_round_trip_keeps_every_bit(tmp_path: Path, family: str, dtype: str) -> None:
    folder = folders.make(family, tmp_path / "model", dtype=dtype)
    stored = folders.tensors(folder)
    assert any("experts.7.gate_proj" in key for key in stored) == (family != FUSED)
    folders.assert_round_trip(folder, tmp_path, shard_bytes=10**6)


def test_a_hybrid_model_whose_experts_are_fused_keeps_every_bit(tmp_path: Path) -> None:
    folder = folders.make(HYBRID, tmp_path / "model")
    folders.rewrite(folder, fuse_experts)
    assert {
        key.rsplit(".experts.")[1] for key in folders.tensors(folder) if ".experts." in key
    } == {
        "gate_up_proj",
        "down_proj",
    }
    folders.assert_round_trip(folder, tmp_path)


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the experts of each layer, as transformers has them in memory."""
    fused = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    for layer in {key.partition(".experts.")[0] for key in tensors.keys() - fused.keys()}:
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{n}.{which}_proj.weight"] for n in range(8)])
            for which in ("gate", "up", "down")
        )
        fused[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        fused[f"{layer}.experts.down_proj"] = down
    return fused


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


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_vl_moe_text", "qwen3_5_moe_text"])
def test_only_routers_of_qwen3_moe_may_leave_weights_as_they_are(model_type: str) -> None:
    from mimo.families.languages._experts import expert_sizes

    text = {"model_type": model_type, "norm_topk_prob": False, "moe_intermediate_size": 8}
    text |= {"num_experts": 4, "num_experts_per_tok": 2}
    sizes = expert_sizes({"text_config": text | {"mlp_only_layers": [], "decoder_sparse_step": 1}})
    assert sizes["normalize_weights"] == (model_type != "qwen3_moe")
