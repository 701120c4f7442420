"""Adapters are low-rank updates of the weights: what they compute, their checkpoints, bad recipes.

The reference for what they compute is the same model without adapters whose weights are
W' = W + scale · B A. Its gradient by W' gives those by A and B: scale · Bᵀ dW' and scale · dW' Aᵀ.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from encoders.qwen_vl import PROJECTOR
from mimo.check.compare import Reference
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.modules import LoRA
from mimo.errors import RecipeError
from mimo.families.keymap import is_adapter, merged_weight
from tests import language_steps
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.lone_module import noise, tensor_parallel_slice
from tests.mimo import tiny
from tests.mimo.engines.megatron.test_delta_net import HYBRID
from tests.mimo.train.test_train import metrics
from tests.mimo.train.test_train import run as train_recipe

DECODER = {k: v for k, v in language_steps.SETTINGS.items() if k != "mrope_section"}
TOWER = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2}
OUTPUT_SIZE = 20
# (package, family): settings, without what makes weights large.
FAMILIES: dict[tuple[str, str], dict[str, Any]] = {
    ("mimo.families.languages", "qwen2_5"): language_steps.SETTINGS,
    ("mimo.families.languages", "qwen3"): language_steps.SETTINGS,
    ("mimo.families.languages", "qwen3_5"): language_steps.SETTINGS | HYBRID,
    ("mimo.families.languages", "gemma3"): DECODER
    | {"sliding_window": 8, "sliding_window_pattern": 2},
    ("encoders", "qwen_vl"): TOWER | {"window_size": 56, "full_attention_layers": (1,)},
    ("encoders", "qwen3_vl"): TOWER | {"deepstack_visual_indexes": (0,), "num_grid_per_side": 5},
    ("encoders", "gemma3"): TOWER | {"image_size": 56, "mm_tokens_per_image": 4},
}
RANK, ALPHA = 3, 7.0
TARGETS = ("qkv", "proj", "fc1", "fc2")


# ------------------------------------------------------------------------- what it computes


@dataclass(frozen=True)
class Linear:
    """One adapted linear: its adapter, the gradients of that, and the merged weight's gradient."""

    lora_a: Tensor
    lora_b: Tensor
    gradient_a: Tensor
    gradient_b: Tensor
    gradient_merged: Tensor


@dataclass(frozen=True)
class Adapted:
    """A model with adapters beside the same one with merged weights."""

    loss: float
    merged_loss: float
    linears: dict[str, Linear]


def adapted_and_merged(
    rank: int, package: str, name: str, settings: dict[str, Any], targets: Any, recompute: str
) -> Adapted:
    """Both models of a family on one rank in fp64, after a forward and backward."""
    from mimo.engines.megatron.config import LoRA, ModuleContext
    from mimo.engines.megatron.parallel import prepare_engine
    from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
    from mimo.parallel.groups import build_topology

    prepare_engine(language_steps.SEED)
    family = importlib.import_module(f"{package}.{name}")
    layout = Layout(language=GridSpec(LANGUAGE), encoders={}, world_size=1)
    groups = build_topology(layout).modules[LANGUAGE]
    ctx = ModuleContext(groups=groups, dtype=torch.float64, recompute=recompute)
    lora = LoRA(RANK, ALPHA / RANK, targets)
    sizes = family.Settings(**settings, **({} if "init_std" in settings else {"init_std": 0.2}))
    rest: tuple = (OUTPUT_SIZE, language_steps.SEED)
    if package == "mimo.families.languages":
        rest = (language_steps.NUM_TOKENS, 64, language_steps.SEED)
    model, merged = (family.build(sizes, c, *rest) for c in (replace(ctx, lora=lora), ctx))
    params = dict(model.named_parameters())
    for number, (key, param) in enumerate(params.items()):
        param.requires_grad_(is_adapter(key))
        if key.endswith("lora_b"):
            assert not param.any(), "an adapter begins without effect"
            param.data.copy_(0.1 * noise(number, *param.shape))
    with torch.no_grad():
        for key, param in merged.named_parameters():
            assert (param == params[key]).all(), "an adapter changes how weights are drawn"
            linear = key.removesuffix(".weight")
            if f"{linear}.lora_a" in params:
                a, b = params[f"{linear}.lora_a"], params[f"{linear}.lora_b"]
                param.copy_(merged_weight(param, a, b, ALPHA / RANK))
    losses = []
    for built in (model, merged):
        losses.append(_loss(built, sizes, package))
        losses[-1].backward()
    weights = dict(merged.named_parameters())
    linears = {}
    for key in params:
        if key.endswith(".lora_a"):
            linear = key.removesuffix(".lora_a")
            a, b, w = params[key], params[f"{linear}.lora_b"], weights[f"{linear}.weight"]
            assert a.grad is not None, key
            assert b.grad is not None
            assert w.grad is not None
            linears[linear] = Linear(a.detach(), b.detach(), a.grad, b.grad, w.grad)
    return Adapted(float(losses[0]), float(losses[1]), linears)


def _loss(model: nn.Module, sizes: Any, package: str) -> Tensor:
    if package == "encoders":
        side = sizes.image_size // sizes.patch_size if hasattr(sizes, "image_size") else None
        grids = [[1, side, side]] * 2 if side else [[1, 6, 4], [1, 2, 2]]
        frames = getattr(sizes, "temporal_patch_size", 1)
        numbers = 3 * frames * sizes.patch_size**2
        patches = noise(1, sum(h * w for _, h, w in grids), numbers).double()
        rows = model(patches, torch.tensor(grids)).values
        return (rows * noise(2, *rows.shape)).sum()
    losses, loss_mask = language_steps.losses_of(model)
    return (losses * loss_mask).sum()


def check_linear(name: str, linear: Linear) -> None:
    scale = ALPHA / RANK
    expected_a = scale * linear.lora_b.T @ linear.gradient_merged
    expected_b = scale * linear.gradient_merged @ linear.lora_a.T
    for got, expected in ((linear.gradient_a, expected_a), (linear.gradient_b, expected_b)):
        error = float((got - expected).abs().max() / expected.abs().max())
        assert error < 1e-9, f"{name}: {error:.1e}"


BY_NAME = {
    f"{'.'.join(family)}-{recompute}": (family, recompute)
    for family in FAMILIES
    for recompute in ("none", "full")
}
# Each family once, and language models and towers with and without recomputation.
QUICK = [name for number, name in enumerate(BY_NAME) if number % 4 in (0, 3)]


@pytest.mark.parametrize("case", quick_values(BY_NAME, *QUICK))
def test_an_adapter_is_a_low_rank_update_of_the_weight(
    run_ranks: RunRanks, case: tuple[tuple[str, str], str]
) -> None:
    family, recompute = case
    # Nothing but adapters learns, so recomputed layers stand behind what needs no gradient.
    args = (*family, FAMILIES[family], frozenset(TARGETS), recompute)
    (found,) = run_ranks(adapted_and_merged, 1, *args)
    assert found.loss == pytest.approx(found.merged_loss, rel=1e-12)
    assert len(found.linears) == 4 * FAMILIES[family]["num_layers"]
    for name, linear in found.linears.items():
        check_linear(name, linear)


def test_only_the_targets_have_adapters(run_ranks: RunRanks) -> None:
    family = ("mimo.families.languages", "qwen3")
    args = (*family, FAMILIES[family], frozenset(["proj", "fc1"]), "full")
    (found,) = run_ranks(adapted_and_merged, 1, *args)
    assert {name.rpartition(".")[2] for name in found.linears} == {"linear_proj", "linear_fc1"}
    for name, linear in found.linears.items():
        check_linear(name, linear)


@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (0, 2), (1, 1)])
def test_parts_of_a_weight_are_merged_without_the_others(dim: int, stride: int) -> None:
    weight, a, b = noise(1, 24, 16), noise(2, 3, 16), noise(3, 24, 3)
    whole = merged_weight(weight, a, b, 0.5)
    torch.testing.assert_close(whole, weight + 0.5 * b @ a)
    for rank in range(2):
        weight_part = tensor_parallel_slice(weight, rank, 2, dim, stride)
        a_part = a if dim == 0 else tensor_parallel_slice(a, rank, 2, 1, 1)
        b_part = b if dim == 1 else tensor_parallel_slice(b, rank, 2, 0, stride)
        part = tensor_parallel_slice(whole, rank, 2, dim, stride)
        torch.testing.assert_close(merged_weight(weight_part, a_part, b_part, 0.5), part)


def test_a_bf16_weight_is_rounded_once_when_it_is_merged() -> None:
    weight, a, b = (noise(n, *s).bfloat16() for n, s in enumerate([(24, 16), (3, 16), (24, 3)]))
    got = merged_weight(weight, a, b, 2.0)
    assert got.dtype == torch.bfloat16
    exact = weight.double() + 2.0 * b.double() @ a.double()
    assert (got == exact.bfloat16()).float().mean() > 0.99


# ------------------------------------------------------------------------------ checkpoints

TRAINED = [
    "language.lora={rank: 3, alpha: 6}",
    "encoders.vision.lora={rank: 2, alpha: 6}",
    "train.optimizer=adam",
    "train.adam_eps=1e-2",
    "train.learning_rate=0.05",
    "train.warmup_steps=0",
    "train.min_learning_rate_ratio=1.0",  # so that steps do not depend on how many there are
    "train.micro_batch_size=3",
    "language.model.num_layers=4",
]
SHARED = "train.distributed_optimizer=true"
TP2_SP_PP2 = [
    "language.grid={tp: 2, sp: true, pp: 2}",
    "encoders.vision.grid={tp: 2, dp: 1}",
]
# Of one step each; all but the first continue from the checkpoint of the one before.
LAYOUTS = {
    "one_rank_each": [],
    "tp2_sp_pp2": TP2_SP_PP2,
    "dp2_cp2_shared": [SHARED, "language.grid={dp: 2, cp: 2}"],
    "pp2_vpp2": ["language.grid={pp: 2, vpp: 2}", "encoders.vision.grid={pp: 2, dp: 1}"],
    "tp2_dp2_shared": [SHARED, "language.grid={tp: 2, dp: 2}"],
}
STEPS = len(LAYOUTS)


def one_rank_steps(rank: int, path: Path, overrides: list[str]) -> Reference:
    from mimo.check.steps import reference_steps

    return reference_steps(load_recipe(path, overrides), STEPS)


def loaded_weights(rank: int, path: Path, run: str) -> dict[str, np.ndarray]:
    """A run's last checkpoint, loaded on one rank."""
    from mimo.generate.answer import Generator

    local = Generator(path.parent / "runs" / run).model
    return {
        f"{module}.{name}": param.detach().numpy()
        for module, part in local.model.modules.items()
        for name, param in part.whole.named_parameters()
    }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny_lora_runs")
    tiny.write_samples(directory)
    return tiny.write_recipe(directory)


@pytest.fixture(scope="module")
def expected(run_ranks: RunRanks, recipe: Path) -> Reference:
    """The steps on one rank."""
    (found,) = run_ranks(one_rank_steps, 1, recipe, TRAINED)
    return found


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(
    run_ranks: RunRanks, recipe: Path, expected: Reference
) -> None:
    checkpoint = None
    for step, (name, layout) in enumerate(LAYOUTS.items()):
        args = (*TRAINED, *layout, f"name={name}", f"train.steps={step + 1}")
        train_recipe(run_ranks, recipe, *args, resume_from=checkpoint)
        checkpoint = recipe.parent / "runs" / name / "checkpoints" / f"step_{step + 1}"
        (got,) = metrics(recipe, name)
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(expected.steps[step][key], rel=1e-5), (name, key)
    (weights,) = run_ranks(loaded_weights, 1, recipe, name)
    assert weights.keys() == expected.parameters.keys()
    for name, value in weights.items():
        one_rank = expected.parameters[name].weights[-1]
        learns = is_adapter(name) or name.removeprefix("vision.").startswith(PROJECTOR)
        tolerance = 1e-5 * np.abs(one_rank).max() if learns else 0
        np.testing.assert_allclose(value, one_rank, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.slow
def test_bf16_steps_follow_those_in_fp32(
    run_ranks: RunRanks, recipe: Path, expected: Reference
) -> None:
    args = [*TRAINED, *TP2_SP_PP2, SHARED, "train.steps=3"]
    train_recipe(run_ranks, recipe, *args, "train.precision=bf16", "name=rounded")
    rounded = metrics(recipe, "rounded")
    for key in ("loss", "grad_norm"):
        exact = [step[key] for step in expected.steps[:3]]
        assert [m[key] for m in rounded] == pytest.approx(exact, rel=0.05)
    assert rounded[-1]["loss"] < rounded[0]["loss"]


# ---------------------------------------------------------------------------- bad recipes


@pytest.mark.parametrize("module", ["language", "encoders.vision"])
def test_adapters_have_defaults_and_take_what_is_given(recipe: Path, module: str) -> None:
    def read(*overrides: str) -> LoRA | None:
        parsed = load_recipe(recipe, overrides)
        return (parsed.language if module == "language" else parsed.encoders["vision"]).lora

    assert read() is None
    assert read(f"{module}.lora={{}}") == LoRA(rank=16, alpha=32.0, targets=TARGETS)
    assert read(f"{module}.lora={{rank: 4, alpha: 4, targets: [fc2]}}") == LoRA(
        rank=4, alpha=4.0, targets=("fc2",)
    )


@pytest.mark.parametrize("module", ["language", "encoders.vision"])
@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{rank: 0}", ".lora.rank: should be greater than or equal to 1; got 0"),
        ("{rank: 1.5}", ".lora.rank: should be a valid integer; got 1.5"),
        ("{alpha: 0}", ".lora.alpha: should be greater than 0; got 0"),
        ("{alfa: 8}", ".lora.alfa: unknown key; did you mean 'alpha'?"),
        ("{targets: []}", ".lora.targets: needs one or more of qkv, proj, fc1, fc2, or patterns"),
        ("{targets: [fc1, fc1]}", ".lora.targets: needs one or more of qkv, proj, fc1, fc2"),
        (
            "{targets: [q_proj]}",
            ".lora.targets: needs one or more of qkv, proj, fc1, fc2, or patterns",
        ),
        ("true", ".lora: should be a valid dictionary or instance of LoRA; got True"),
    ],
)
def test_wrong_adapters_are_refused_by_key(
    recipe: Path, module: str, lora: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [f"{module}.lora={lora}"])
    (line,) = caught.value.problems
    assert f"{module}{message}" in line


@pytest.mark.parametrize("module", ["language", "encoders.vision"])
def test_adapters_of_a_frozen_module_are_refused_with_both_keys(recipe: Path, module: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [f"{module}.lora={{rank: 4}}", f"{module}.freeze=true"])
    (line,) = caught.value.problems
    assert f"{module}: freeze: true trains nothing, but lora adds adapters" in line
