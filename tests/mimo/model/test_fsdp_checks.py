"""What `engine: fsdp` cannot run is refused before any rank starts: exit code 2, key and reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.cli.main import app
from mimo.engines.fsdp.models import model_problems
from mimo.engines.fsdp.plans import tp_problems
from mimo.errors import RecipeError
from mimo.model.memory import parameters_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.build import build_layout
from tests.conftest import RunRanks
from tests.mimo import tiny

RECIPE = """
name: run
init_from: {directory}/base
language: {{engine: fsdp, grid: {{dp: 4}}}}
encoders: {{vision: {{engine: fsdp, placement: colocated, grid: {{dp: 4}}}}}}
data: {{sources: [{{path: "{directory}/train-*.tar"}}], sequence_length: 240}}
train: {{steps: 1, global_batch_size: 12, run_dir: "{directory}/runs", optimizer: adam}}
"""
OTHER = (
    "encoders.other={family: qwen_vl, engine: fsdp, media: video, placeholder: '<|video_pad|>', "
    "placement: colocated, grid: {dp: 4}, model: {num_layers: 1, hidden_size: 16, "
    "ffn_hidden_size: 16, num_attention_heads: 2}}"
)
THREE = "language.grid={tp: 3, dp: 1}"
REFUSED = {
    "heads": ([THREE, "encoders.vision.grid.dp=3"], "language.grid.tp", "num_attention_heads = 4"),
    "groups": (["language.grid={tp: 4, dp: 1}"], "language.grid.tp", "num_key_value_heads = 2"),
    "tower": (["encoders.vision.grid={tp: 2, dp: 2}"], "encoders.vision.grid.tp", "raise dp"),
    "stages": (["language.grid={pp: 2, dp: 2}"], "language.grid.pp", "raise dp or tp"),
    "other tower": (
        ["encoders.vision.other_media={}", OTHER],
        "encoders.other.engine",
        "encoders.vision",
    ),
    "size": (["language.model.num_layers=3"], "language.model.num_layers", "says, 4; remove"),
    "tower size": (["encoders.vision.model.norm_eps=0.1"], "encoders.vision.model.norm_eps", "0.1"),
    "reductions": (
        ["language.engine=megatron", "language.reduce_gradients=microbatch"],
        "language.reduce_gradients",
        "a setting of engine: fsdp",
    ),
    "precision": (
        ["train.fp8=current", "train.precision=bf16"],
        "train.fp8",
        "language.engine: megatron",
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("checks")
    for name, family in (("base", "qwen3_vl"), ("gemma", "gemma3")):
        write_tiny(TinyCheckpoint(family), found / name)
    tiny.write_samples(found)
    (found / "recipe.yaml").write_text(RECIPE.format(directory=found))
    return found


def refused(directory: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(directory / "recipe.yaml", overrides), None)
    return list(caught.value.problems)


@pytest.mark.parametrize(("overrides", "key", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_no_fsdp_module_computes_is_refused_by_name(
    directory: Path, overrides: list[str], key: str, reason: str
) -> None:
    found = [line for line in refused(directory, *overrides) if f" {key}: " in f" {line}"]
    assert any(reason in line for line in found), refused(directory, *overrides)


def test_image_limits_may_differ_from_the_folder(directory: Path) -> None:
    check_recipe(
        load_recipe(directory / "recipe.yaml", ["encoders.vision.model.max_pixels=8100"]), None
    )
    problem = refused(
        directory, f"init_from={directory}/gemma", "encoders.vision.recompute=selective"
    )
    assert "encoders.vision.recompute: got selective" in problem[0]


def test_a_model_with_its_own_code_and_a_missing_folder_are_refused(
    directory: Path, tmp_path: Path
) -> None:
    write_tiny(TinyCheckpoint("qwen3_vl"), tmp_path / "code")
    config = tmp_path / "code" / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "auto_map": {"AutoModel": "modeling.Model"}}))
    arguments = ["check", str(directory / "recipe.yaml"), f"init_from={tmp_path}/code"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    text = " ".join(done.output.split())
    assert "init_from: " in text
    assert "config.json has auto_map" in text
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(load_recipe(directory / "recipe.yaml").to_yaml())
    with pytest.raises(RecipeError, match="init_from: .* no such folder, but engine: fsdp"):
        check_recipe(load_recipe(resolved, [f"init_from={tmp_path}/gone"]), None)


def test_models_without_a_table_or_a_kernel_are_refused() -> None:
    from transformers import AutoConfig

    opt = AutoConfig.for_model("gpt2")
    assert "no table for model_type 'gpt2'" in next(tp_problems(opt, 2))
    assert [*tp_problems(opt, 1), *model_problems(opt)] == []
    capped: Any = AutoConfig.for_model("gemma2", num_attention_heads=4, num_key_value_heads=4)
    assert any("soft cap on attention" in one for one in model_problems(capped))


AUTO_MAP = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
FEW = {"num_attention_heads": 4, "num_key_value_heads": 4}
TEXT = """
name: text
init_from: {folder}
language: {{engine: fsdp, grid: {{dp: 1}}}}
encoders: {{}}
data: {{sources: [{{path: "{folder}/*.tar"}}], sequence_length: 64}}
train: {{steps: 1, global_batch_size: 1, run_dir: "{folder}/runs"}}
"""


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        ({"model_type": "llava"}, "encoders", "trains with its tower"),
        ({"model_type": "vit"}, "init_from", "every causal language model and"),
        ({"model_type": "own", "auto_map": AUTO_MAP}, "init_from", "which is not run"),
        ({"model_type": "phi"}, "init_from", "model.norm"),
        ({"model_type": "mamba"}, "init_from", "is missing"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "language.engine", "a scale of logits"),
        ({"model_type": "llama"}, "language.engine", "set it to fsdp"),
        ({"model_type": "mistral", "num_attention_heads": 8}, "language.grid.tp", "no table"),
        ({"model_type": "olmo2", **FEW}, "language.lora", "got qkv among its targets"),
    ],
)
def test_a_causal_model_that_cannot_run_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], key: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT.format(folder=tmp_path))
    overrides = {
        "llama": ["language.engine=megatron"],
        "mistral": ["language.grid.tp=2"],
        "olmo2": ["language.lora={rank: 2}"],
    }
    done = CliRunner().invoke(app, ["check", str(path), *overrides.get(config["model_type"], [])])
    text = " ".join(done.output.split())
    assert done.exit_code == 2, text
    assert f"{key}: " in text
    assert reason in text


MEMORY = {
    "hybrid": ["language.grid.dp_replicate=2", "train.global_batch_size=4"],
    "tp, bf16": [
        "language.grid={tp: 2, sp: true, dp: 2}",
        "train.precision=bf16",
        "train.global_batch_size=2",
    ],
    "frozen": ["language.freeze=true", "encoders.vision.freeze=tower", "train.ema_decay=0.9"],
}


@pytest.mark.slow  # `test_fsdp_memory.py` counts the formula's bytes by hand
@pytest.mark.parametrize("overrides", MEMORY.values(), ids=MEMORY)
def test_each_role_holds_what_the_formula_says(
    run_ranks: RunRanks, directory: Path, overrides: list[str]
) -> None:
    found = run_ranks(held, 4, directory / "recipe.yaml", overrides)
    recipe = load_recipe(directory / "recipe.yaml", overrides)
    for one in parameters_by_role(recipe, build_layout(recipe)):
        for number, expected in enumerate((one.weights, one.gradients, one.optimizer)):
            measured = sum(rank[one.module][number] for rank in found)
            # What is gathered at a time comes on top of the weights that a rank keeps.
            gathered = 0 if number else sum(rank[one.module][3] for rank in found)
            assert measured + gathered == pytest.approx(4 * expected), (one.module, number)


def held(rank: int, path: Path, overrides: list[str]) -> dict[str, tuple[int, ...]]:
    """Bytes of weights, gradients, optimizer, and of what a rank gathers at a time, by module."""
    from mimo.checkpoint.hf.initial import initial_weights
    from mimo.engines.optimizer import fill_state, state_tensors
    from mimo.families.wire import DTYPES
    from mimo.model.build import build_model
    from mimo.parallel.groups import build_topology

    recipe = load_recipe(path, overrides)
    topology = build_topology(build_layout(recipe))
    modules: Any = build_model(recipe, topology, 60, initial_weights(recipe)).modules
    found = {}
    for name, module in modules.items():
        own = [(one, one.part.values) for one in module._parameters]
        learnt = [values for one, values in own if one.local is not None]
        weights = sum(values.nbytes for _, values in own)
        gradients = sum(values.nbytes for values in learnt)
        mesh = topology.meshes[name]
        whole = {}
        for (parameter, _), (key, _) in zip(own, module.whole.named_parameters(), strict=True):
            parts = mesh["tp"].size() if parameter.part.copies == mesh["dp_replicate"].size() else 1
            whole[key] = math.prod(parameter.part.shape) // parts
        layer = [key for key in whole if "layers." in key or "blocks." in key]
        first = [key for key in layer if "s.0." in key]
        size = DTYPES[recipe.train.precision].itemsize
        gathered = sum(n for key, n in whole.items() if key not in layer or key in first) * size
        state, optimizer = 0, module._optimizer
        if optimizer is not None:
            fill_state(optimizer)
            locals_ = [one.local for one, _ in own if one.local is not None]
            state = sum(
                t.nbytes for param in locals_ for t in state_tensors(optimizer, param).values()
            )
        found[name] = (weights, gradients, state, gathered)
    return found
