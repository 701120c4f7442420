"""Any class of transformers trains with its tower on ranks of its own as the whole model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.gate import compare_halves
from mimo.model.recipe_checks import check_recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.model.any_class import (
    Microbatches,
    take_steps,
    take_wide_steps,
)
from tests.mimo.model.test_any_folder import COMPARED
from tests.mimo.model.tiny_classes import (
    CLASSES,
    REFUSALS,
    tiny_config,
    widest_precision,
    write_recipe,
)

QUICK = ["qwen3_5"]
ACCEPTED = [name for name in CLASSES if name not in REFUSALS]
PAGE = Path("docs/models.md")

LANES: list[str] = []
"""The recipe as it is: a tower, and two lanes of the language model."""
TP = ["language.grid={tp: 2, dp: 1}"]
EXPERTS_TP = [*TP, "train.precision=fp32"]  # no kernel of experts over tp has fp64
REPLICAS = ["language.grid={dp: 2, dp_replicate: 2}"]
COLOCATED = ["encoders.vision.placement=colocated", "encoders.vision.grid={dp: 2}"]
BF16 = ["train.precision=bf16"]
FULL = ["language.recompute=full", "encoders.vision.recompute=full"]
SELECTIVE = ["language.recompute=selective"]
REDUCE = ["language.reduce_gradients=microbatch", "encoders.vision.reduce_gradients=microbatch"]


def differences(
    run_ranks: RunRanks,
    folder: Path,
    model_type: str,
    cases: Sequence[Sequence[str]],
    microbatches: Microbatches | None = None,
    num_ranks: int = 3,
    steps: Callable[..., list[str]] = take_steps,
) -> list[str]:
    """Return by case how training differs from the whole model, or ""."""
    config = tiny_config(model_type)
    if microbatches is not None:
        config.get_text_config().output_router_logits = True
        config.get_text_config().router_aux_loss_coef = 0.5
    verdict = compare_halves(config)
    assert not verdict.problem
    precision, verdict = widest_precision(config, verdict)
    write_recipe(config, folder, precision, verdict.outputs)
    options = () if microbatches is None else (microbatches,)
    (of_cases, *others) = run_ranks(steps, num_ranks, folder, verdict, cases, *options)
    assert all(other == of_cases for other in others)
    return of_cases


@pytest.mark.parametrize(
    "model_type",
    # `test_any_folder.py` compares the others, from their folders on disk.
    quick([name for name in ACCEPTED if name not in {*COMPARED} - {*QUICK}], *QUICK),
)
def test_three_ranks_take_the_steps_of_the_whole_model(
    model_type: str, run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert differences(run_ranks, tmp_path, model_type, [LANES]) == [""]


@pytest.mark.slow
def test_a_model_with_more_levels_than_its_tiny_copy_takes_the_same_steps(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    config = tiny_config("qwen3_vl")
    verdict = compare_halves(config)
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 4, [0, 1, 2]
    config.text_config.num_hidden_layers = 4
    assert {form.num_levels for form in verdict.outputs.values()} == {2}
    write_recipe(config, tmp_path, "fp64", verdict.outputs)
    assert run_ranks(take_steps, 3, tmp_path, verdict) == [[""]] * 3


@pytest.mark.parametrize("model_type", ["blip-2", "llama4", "mllama"])
def test_a_class_that_does_not_split_is_refused_with_the_reason(model_type: str) -> None:
    assert compare_halves(tiny_config(model_type)).problem


def test_the_page_of_models_has_every_class() -> None:
    rows = [
        line.split("|")[1].strip(" `") for line in PAGE.read_text().splitlines() if "| `" in line
    ]
    assert [*dict.fromkeys(rows)] == [*ACCEPTED, *(name for name in CLASSES if name in REFUSALS)]
    assert len(ACCEPTED) >= 60


LORA = ["language.lora={rank: 4, targets: ['*.q_proj', '*.down_proj']}"]
TOWER_LORA = ["encoders.vision.lora={rank: 2, targets: ['*.q_proj', '*fc1', '*linear_1']}"]
FROZEN = {
    "language": ["language.freeze=true"],
    "tower": ["encoders.vision.freeze=true"],
    "all but the projector": ["encoders.vision.freeze=['*vision_tower*']"],
    "adapters": LORA,
    "adapters over tp": LORA + TP,
    "adapters in both": LORA + TOWER_LORA,
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model_type", "cases"),
    [
        pytest.param("internvl", [TP, BF16], marks=SLOW),
        ("qwen3_vl_moe", [["language.freeze=['*.gate.*', '*embed*']", *EXPERTS_TP]]),
        pytest.param("internvl", [REPLICAS, FULL, SELECTIVE, REDUCE], marks=SLOW),
        pytest.param("qwen3_5", [TP, REPLICAS, BF16, FULL, REDUCE], marks=SLOW),
        pytest.param("qwen3_vl_moe", [EXPERTS_TP, REPLICAS, FULL, REDUCE], marks=SLOW),
        pytest.param("gemma4", [REPLICAS, FULL, REDUCE], marks=SLOW),
    ],
)
def test_every_layout_and_schedule_of_three_ranks_takes_the_same_steps(
    model_type: str, cases: list[list[str]], run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert differences(run_ranks, tmp_path, model_type, cases) == [""] * len(cases)


@pytest.mark.slow
def test_gemma4_takes_the_same_steps_over_tp(run_ranks: RunRanks, tmp_path: Path) -> None:
    # Its norms and scores in fp32 turn another order of sums into errors of 2e-5 in the tower.
    assert differences(run_ranks, tmp_path, "gemma4", [LANES, TP], steps=take_wide_steps) == [
        "",
        "",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["internvl", "qwen3_5", "qwen3_vl_moe"])
def test_a_tower_on_the_ranks_of_the_language_model_takes_the_same_steps(
    model_type: str, run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert differences(run_ranks, tmp_path, model_type, [COLOCATED], num_ranks=2) == [""]


@pytest.mark.slow
def test_only_what_is_not_frozen_and_adapters_train(run_ranks: RunRanks, tmp_path: Path) -> None:
    of_cases = differences(run_ranks, tmp_path, "internvl", [*FROZEN.values()])
    assert dict(zip(FROZEN, of_cases, strict=True)) == dict.fromkeys(FROZEN, "")


@pytest.mark.slow
def test_a_router_loss_trains_as_in_transformers_but_is_not_logged(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    alone = [[(0,), (2,)], [(1,), (0,)]]  # one sample in each call
    assert differences(run_ranks, tmp_path, "qwen3_vl_moe", [LANES, EXPERTS_TP], alone) == ["", ""]


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("encoders.vision.freeze=tower", "encoders.vision.freeze", "give patterns"),
        ("language.freeze=['*.gaet.*']", "language.freeze", "no parameter has such a name"),
        ("language.freeze=['*']", "language.freeze", "freeze everything; set it to true"),
        ("language.lora={targets: ['*.qq']}", "language.lora", "no linear has such a name"),
        ("language.lora={targets: ['*norm']}", "language.lora", "is no linear's"),
        ("language.lora={}", "language.lora", "give patterns such as '*.q_proj'"),
        ("language.grid={tp: 3, dp: 1}", "language.grid.tp", "change tp"),
        ("encoders.vision.grid={tp: 2, dp: 1}", "encoders.vision.grid.tp", "towers of"),
        ("encoders.vision.recompute=selective", "encoders.vision.recompute", "full or none"),
    ],
)
def test_what_a_half_cannot_do_is_refused_by_key(
    override: str, key: str, message: str, tmp_path: Path
) -> None:
    recipe = load_recipe(
        write_recipe(tiny_config("internvl"), tmp_path, "fp32", ["image"]), [override]
    )
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe, None)
    assert any(f"{key}: " in line and message in line for line in caught.value.problems)
