"""Every recipe passes `mimo check`, in every layout that its header documents.

Recipes of published models start from a folder; here it has their configuration and processor
files, with the sizes that they are published with, and no weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_phases
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.model.memory import memory_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout, num_microbatches
from tests.conftest import RunRanks
from tests.mimo.checkpoint.hf import folders

RECIPES = Path(__file__).parent.parent / "recipes"
_LAYOUT = re.compile(r"^#\s+(\d+) GPUs:\s+(.*)$", re.MULTILINE)


# ------------------------------------------------------------------- published sizes


QWEN3_TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 5000000,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
QWEN3_VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "deepstack_visual_indexes": [8, 16, 24],
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 896,
    "vision_use_head": False,
}
GEMMA_TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "vocab_size": 262208,
}


def qwen3_vl(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "text_config": {
            **QWEN3_TEXT,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": ffn,
        },
        "vision_config": {**QWEN3_VISION, "out_hidden_size": hidden},
        "tie_word_embeddings": False,
    }


def qwen3_5(model_type: str, **text: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    of_all = {"head_dim": 256, "vocab_size": 248320, "full_attention_interval": 4}
    of_all |= {"model_type": f"{model_type}_text", "attn_output_gate": True}
    tower = {k: v for k, v in QWEN3_VISION.items() if k != "deepstack_visual_indexes"}
    tower |= {"model_type": model_type, "out_hidden_size": text["hidden_size"]}
    return {
        "model_type": model_type,
        "text_config": {**of_all, "rope_parameters": rope, **text},
        "vision_config": tower,
        "tie_word_embeddings": False,
    }


def gemma3(**text: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma3",
        "text_config": {**GEMMA_TEXT, **text},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 256,
    }


def qwen3_vl_moe(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    config = qwen3_vl(hidden, layers, heads, 3 * hidden)
    config["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    config["vision_config"]["model_type"] = "qwen3_vl_moe"
    return config | {"model_type": "qwen3_vl_moe"}


# By the folder that a recipe starts from; in the form of the published `config.json`.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "hidden_act": "silu",
        },
    },
    "Qwen3-VL-8B-Instruct": qwen3_vl(4096, 36, 32, 12288),
    "Qwen3-VL-32B-Instruct": qwen3_vl(5120, 64, 64, 25600),
    "Qwen3-VL-30B-A3B-Instruct": qwen3_vl_moe(2048, 48, 32, 768),
    "Qwen3.5-27B": qwen3_5(
        "qwen3_5",
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        intermediate_size=17408,
        linear_num_value_heads=48,
    ),
    "Qwen3.5-35B-A3B": qwen3_5(
        "qwen3_5_moe",
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "gemma-3-4b-it": gemma3(
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=10240,
        query_pre_attn_scalar=256,
    ),
    "gemma-3-27b-it": gemma3(
        hidden_size=5376,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        intermediate_size=21504,
        query_pre_attn_scalar=168,
    ),
}

_HALF = [0.5, 0.5, 0.5]
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 12845056},
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": _HALF,
        "image_std": _HALF,
    },
    "gemma3": {"size": {"height": 896, "width": 896}, "image_mean": _HALF, "image_std": _HALF},
}
PROCESSORS["qwen3_5"] = PROCESSORS["qwen3_vl"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the published models, without weights."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        processor = PROCESSORS[config["model_type"].removesuffix("_moe")]
        (root / name / "preprocessor_config.json").write_text(json.dumps(processor))
    return root


@pytest.fixture(scope="module")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for family in folders.FAMILIES:
        write_tiny(TinyCheckpoint(family), root / f"{family}_tiny")
    return root


# ------------------------------------------------------------------------- the recipes


@dataclass(frozen=True)
class Documented:
    """A layout that a recipe's header names."""

    path: Path
    gpus: int
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.path.stem, str(self.gpus), *self.overrides))


def documented(path: Path) -> list[Documented]:
    """The layouts of a header; overrides may go on in the next lines."""
    text = re.sub(r"\n#\s{8,}(?=\S+=)", " ", path.read_text())
    return [
        Documented(path, int(gpus), tuple(word for word in words.split() if "=" in word))
        for gpus, words in _LAYOUT.findall(text)
    ]


LARGE = sorted(path for path in RECIPES.glob("*.yaml") if documented(path))
TINY = sorted(RECIPES.glob("*_tiny.yaml"))


def check(path: Path, init_from: Path, gpus: int | None, *overrides: str) -> list[Layout]:
    """`mimo check` of every phase."""
    phased = load_phases(path, [*overrides, f"init_from={init_from}"])
    layouts = phased.each(lambda recipe: check_recipe(recipe, gpus))
    for phase, layout in zip(phased.phases, layouts, strict=True):
        assert num_microbatches(phase.recipe, layout) >= layout.language.pp
    return layouts


def init_from_of(path: Path) -> Path:
    match = re.search(r"^init_from: (\S+)$", path.read_text(), re.MULTILINE)
    assert match is not None
    return Path(match[1])


@pytest.mark.parametrize(
    "layout", [layout for path in LARGE for layout in documented(path)], ids=str
)
def test_documented_layouts_of_published_models_pass_the_check(
    layout: Documented, models: Path
) -> None:
    folder = init_from_of(layout.path)
    assert folder.parent == Path("/models")
    for checked in check(layout.path, models / folder.name, layout.gpus, *layout.overrides):
        assert checked.world_size == layout.gpus
        assert layout.gpus % 8 == 0 or str(layout) == "qwen3_5_27b_sft 17", "nodes have 8 GPUs"


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_recipe_of_a_published_model_documents_disjoint_and_colocated_layouts(
    path: Path, models: Path
) -> None:
    folder = models / init_from_of(path).name
    kinds = {
        bool(checked.colocated)
        for layout in documented(path)
        for checked in check(path, folder, layout.gpus, *layout.overrides)
    }
    assert kinds == {True, False}
    assert "not measured" in path.read_text()


MEMORY = (
    "# Memory of a GPU in GiB  weights gradients optimizer inputs activations logits buffers in all"
)


def memory_table(path: Path, folder: Path) -> str:
    """What the header of a recipe says of its first layout, by the formula of `mimo check`."""
    gpus = documented(path)[0].gpus
    phased = load_phases(path, [f"init_from={folder}"])
    layouts = phased.each(lambda recipe: check_recipe(recipe, gpus))
    lines = [MEMORY]
    for phase, layout in zip(phased.phases, layouts, strict=True):
        if phase.title:
            lines.append(f"#   {phase.title}")
        for role in memory_by_role(phase.recipe, layout):
            state = (role.weights, role.gradients, role.optimizer, role.inputs)
            parts = (*state, role.activations, role.logits, role.buffers, role.total)
            numbers = [f"{part / 2**30:.1f}" for part in parts]
            columns = zip((10, 10, 10, 7, 12, 7, 8, 7), numbers, strict=True)
            lines.append(f"#   {role.role:<21}" + "".join(f"{n:>{width}}" for width, n in columns))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_recipe_states_the_memory_of_each_role_that_the_formula_gives(
    path: Path, models: Path
) -> None:
    expected = memory_table(path, models / init_from_of(path).name)
    assert expected in path.read_text(), f"the header should say\n{expected}"


def formula_beside_dry_run(_: int, path: Path, folder: Path) -> list[tuple[str, float, float]]:
    """Each role of a recipe's first layout under Megatron, its formula and its dry run."""
    import torch.distributed as dist

    from mimo.plan.dry_run_verdict import run_roles

    dist.destroy_process_group()
    phased = load_phases(path, [f"init_from={folder}"])
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    phases = zip(phased.phases, layouts, strict=True)
    runs = [run for phase, layout in phases for run in run_roles(phase.recipe, layout, None)[0]]
    return [(run.formula.role, run.formula.total, run.total) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in LARGE if "fsdp" not in path.stem], ids=lambda path: path.stem
)
def test_the_formula_agrees_with_a_dry_run(path: Path, models: Path, run_ranks: RunRanks) -> None:
    folder = models / init_from_of(path).name
    (roles,) = run_ranks(formula_beside_dry_run, 1, path, folder)
    for role, formula, dry_run in roles:
        assert formula == pytest.approx(dry_run, rel=0.05), role


def test_there_is_a_recipe_for_each_published_model_and_each_family() -> None:
    assert {path.stem for path in LARGE} == {
        "qwen2_5_vl_7b_sft",
        "qwen3_vl_8b_pretrain",
        "qwen3_vl_32b_sft",
        "qwen3_5_27b_sft",
        "qwen3_5_35b_a3b_sft",
        "qwen3_vl_30b_a3b_sft",
        "gemma3_4b_sft",
        "gemma3_27b_sft",
        "qwen3_vl_8b_fsdp",
        "gemma3_4b_fsdp",
    }
    assert {path.stem.removesuffix("_tiny") for path in TINY} == set(folders.FAMILIES)


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "override",
    [
        "language.grid.dp=2",
        "language.grid.tp=2",
        "language.grid={tp: 2, sp: true, pp: 2, dp: 1}",
        "encoders.vision={placement: colocated, grid: {}}",
    ],
)
def test_recipes_of_tiny_checkpoints_pass_the_check_in_several_layouts(
    path: Path, override: str, tiny_checkpoints: Path
) -> None:
    assert init_from_of(path) == Path("checkpoints") / path.stem
    check(path, tiny_checkpoints / path.stem, None, override)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_says_its_command_hardware_and_result(path: Path) -> None:
    header = path.read_text().partition("\nname:")[0]
    assert f"name: {path.stem}\n" in path.read_text()
    for needed in ("# Command", "# Hardware:", "# Result:"):
        assert needed in header


ANY_CLASS = {
    "qwen3_5_9b_fsdp": "qwen3_5",
    "gemma4_31b_fsdp": "gemma4",
    "internvl3_5_8b_fsdp": "internvl",
}


@pytest.mark.parametrize("stem", ANY_CLASS)
def test_recipes_of_any_class_pass_the_check_with_a_tiny_folder(stem: str, tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint(ANY_CLASS[stem]), tmp_path / "model")
    path = RECIPES / f"{stem}.yaml"
    (layout,) = check(path, tmp_path / "model", None)
    assert layout.world_size % 8 == 0, "nodes have 8 GPUs"
    assert "not measured" in path.read_text()
