"""Four colocated layouts of the built-in matrix, other recipes, and the data of the comparison.

`tests/device_model/test_nccl.py` compares disjoint layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mimo.check.layouts import SWEEP, SweepCell, recipe_cells, sweep_cells
from mimo.check.scale import ScaledRecipe, reference_recipe, scale_recipe
from mimo.check.shrink import place
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.parallel.build import build_layout
from mimo.parallel.grids import LANGUAGE, GridSpec
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.check.cells import RECIPE, check_equal, plan_first_step, run_cell
from tests.mimo.check.minimums import check_minimums

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")
MIXED = ["data.sources=[{path: a.tar, weight: 9.0}, {path: b.tar}]"]
BY_TOKENS = ["train.micro_batch_size=1", "data.tokens_per_microbatch=4096"]
# Its families have no architecture in transformers, and no experts.
MEGATRON = [
    cell
    for cell in SWEEP
    if "fsdp" not in cell.name and cell.generator is None and not cell.needs_experts
]

COLOCATED = [
    SweepCell("tp2 cp2", "colocated", ("adapters", "recompute")),
    SweepCell("tp2 cp2 pp2", "colocated tp2"),
    SweepCell("tp2 dp2", "colocated tp2", ("groups of 3",)),
    SweepCell("tp2 pp2", "colocated", ("frozen encoder",)),
]
AUDIO = (
    "encoders.audio={family: whisper, media: audio, placeholder: '<|audio_pad|>', model: "
    "{num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2, "
    "num_mel_bins: 40, tokens_per_row: 2}}"
)
TWO_ENCODERS = {
    "disjoint": [
        "encoders.audio.grid={tp: 2, sp: true, dp: 1}",
        "language.grid={tp: 1, dp: 2}",
    ],
    "colocated": [
        "encoders.vision.placement=colocated",
        "encoders.vision.grid={tp: 1}",
        "encoders.audio.placement=colocated",
        "encoders.audio.grid={tp: 2}",
        "language.grid={tp: 2, pp: 2, dp: 1}",
    ],
    "mixed": [
        "encoders.audio.placement=colocated",
        "encoders.audio.grid={tp: 2, sp: true}",
        "encoders.vision.grid.dp=2",
        "language.grid={tp: 2, sp: true, cp: 2, dp: 1}",
    ],
    "audio pp2": [
        "encoders.audio.grid={pp: 2, dp: 2}",
        "language.grid={tp: 1, dp: 1}",
        "encoders.vision.placement=colocated",
        "encoders.vision.grid={tp: 1}",
    ],
}


@pytest.mark.slow  # `test_verify_command.py` and `test_parity.py` of the model have quick ones
@pytest.mark.parametrize("cell", COLOCATED, ids=lambda cell: cell.name)
def test_a_layout_of_the_matrix_takes_the_steps_of_one_rank(
    verifier: Verifier, cell: SweepCell
) -> None:
    assert cell in SWEEP
    check_equal(run_cell(verifier, cell))


@pytest.mark.slow  # `test_text_only.py` trains one on one rank
def test_a_language_model_without_encoders_takes_the_steps_of_one_rank(verifier: Verifier) -> None:
    recipe = load_recipe(RECIPE, ["encoders={}", "language.grid={tp: 2, sp: true}"])
    (cell,) = recipe_cells(recipe, 8, full=False).cells
    check_equal(verifier.run(cell))


@pytest.mark.slow
@pytest.mark.parametrize("layout", TWO_ENCODERS)
def test_images_and_clips_in_the_same_samples_take_the_steps_of_one_rank(
    verifier: Verifier, layout: str
) -> None:
    recipe = load_recipe(RECIPE, [AUDIO, *TWO_ENCODERS[layout]])
    (cell,) = recipe_cells(recipe, 8, full=True).cells
    check_equal(verifier.run(cell))
    workload = scale_recipe(recipe, cell.layout, verifier.folder, "fp32").workload
    assert sorted(items.media for items in workload.items) == ["audio", "image"]


@pytest.mark.slow
def test_a_recipe_that_packs_by_tokens_takes_the_steps_of_one_rank(verifier: Verifier) -> None:
    recipe = load_recipe(RECIPE, [*BY_TOKENS, "language.grid={tp: 1, cp: 2, dp: 2}"])
    (cell,) = recipe_cells(recipe, 8, full=False).cells
    check_equal(verifier.run(cell))


@pytest.mark.slow
def test_sgd_untied_weights_and_a_rate_per_module_are_those_of_the_recipe(
    verifier: Verifier,
) -> None:
    overrides = [
        "train.optimizer=sgd",
        "language.model.tie_word_embeddings=false",
        "language.learning_rate=1.0e-4",
        "encoders.vision.placeholder=<picture>",
        "encoders.vision.media=picture",
    ]
    recipe = load_recipe(RECIPE, overrides)
    (cell,) = recipe_cells(recipe, 8, full=False).cells
    check_equal(verifier.run(cell))
    scaled = scale_recipe(recipe, cell.layout, verifier.folder, "fp32").recipe
    rates = scaled.language.learning_rate, scaled.train.learning_rate
    assert rates == pytest.approx((0.01, 0.1))  # 1e-4 and the recipe's 1e-3
    assert scaled.encoders["vision"].learning_rate is None


@pytest.mark.slow
def test_in_fp64_errors_are_those_of_fp64(
    run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> None:
    exact = Verifier(tmp_path_factory.mktemp("exact"), "fp64")
    assert exact.tolerance == 1e-10
    check_equal(run_cell(exact, SweepCell("tp2 sp pp2", "dp3")))


@pytest.mark.slow
def test_layouts_with_the_same_model_and_batches_share_the_run_on_one_rank(
    verifier: Verifier,
) -> None:
    check_equal(run_cell(verifier, SweepCell("tp2", "dp2")))
    before = len(verifier._references)
    check_equal(run_cell(verifier, SweepCell("dp3", "")))
    assert len(verifier._references) == before


def test_every_layout_of_the_matrix_is_another_one_and_fits_eight_ranks() -> None:
    assert len({cell.name for cell in SWEEP}) == len(SWEEP) >= 24
    built = sweep_cells(load_recipe(RECIPE), max_ranks=8, precision="fp32")
    assert len(built.cells) == len(MEGATRON)
    assert max(cell.layout.world_size for cell in built.cells) == 8


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.optimizer=sgd"],
        ["train.precision=fp64"],
        ["train.precision=bf16", "train.distributed_optimizer=true"],
        ["encoders.vision.placeholder=the"],
    ],
)
def test_the_matrix_applies_to_recipes_with_settings_of_any_kind(
    tmp_path: Path, overrides: list[str]
) -> None:
    built = sweep_cells(load_recipe(RECIPE, overrides), max_ranks=8, precision="fp32")
    assert len(built.cells) == len(MEGATRON)
    for cell in built.cells:
        scaled = scale_recipe(cell.recipe, cell.layout, tmp_path, "fp32").recipe
        assert ("distributed optimizer" in cell.name) == scaled.train.distributed_optimizer


def test_a_recipe_that_gathers_weights_late_is_verified_in_fp64_without(tmp_path: Path) -> None:
    late = ["train.distributed_optimizer=true", "train.overlap_param_gather=true"]
    recipe = load_recipe(RECIPE, late)
    scaled = scale_recipe(recipe, build_layout(recipe), tmp_path, "fp64").recipe.train
    assert not scaled.distributed_optimizer
    assert scaled.overlap_param_gather == "auto"


def test_the_matrix_in_fp64_leaves_out_distributed_optimizers_with_a_note() -> None:
    built = sweep_cells(load_recipe(RECIPE), max_ranks=8, precision="fp64")
    assert not any("distributed optimizer" in cell.name for cell in built.cells)
    (note,) = (note for note in built.notes if "has no fp64" in note)
    left_out = {cell.name for cell in MEGATRON} - {cell.name for cell in built.cells}
    assert left_out
    assert all(name in note for name in left_out)


def test_layouts_that_a_family_refuses_are_left_out_of_the_matrix_with_its_reason() -> None:
    sizes = "num_layers: 6, hidden_size: 64, ffn_hidden_size: 96, num_attention_heads: 4"
    model = f"{{{sizes}, num_query_groups: 2, head_size: 16, rotary_base: 1.0e+6}}"
    gemma3 = ["language.family=gemma3", f"language.model={model}"]
    built = sweep_cells(load_recipe(RECIPE, gemma3), max_ranks=8, precision="fp32")
    left_out = {cell.name for cell in MEGATRON} - {cell.name for cell in built.cells}
    assert left_out == {cell.name for cell in MEGATRON if "unpacked" in cell.options}
    (note,) = (note for note in built.notes if "needs packed sequences" in note)
    assert all(name in note for name in left_out)


def test_encoders_that_the_matrix_has_no_room_for_are_named() -> None:
    encoder = "{family: qwen_vl, media: M, placeholder: '<M>', model: {num_layers: 2, "
    encoder += "hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2}}"
    more = [f"encoders.{name}={encoder.replace('M', name)}" for name in ("clips", "audio")]
    built = sweep_cells(load_recipe(RECIPE, more), max_ranks=8, precision="fp32")
    assert any(note.endswith("not run: audio") for note in built.notes)


# ------------------------------------------------------------------ data of the comparison


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workloads")


def scaled_to(
    folder: Path, lanes: int, encoder_lanes: int, overrides: Sequence[str] = ()
) -> ScaledRecipe:
    encoders = {"vision": GridSpec("vision", dp=encoder_lanes)}
    layout = place(GridSpec(LANGUAGE, dp=lanes), encoders, ())
    return scale_recipe(load_recipe(RECIPE, overrides), layout, folder, "fp32")


@pytest.mark.parametrize(
    ("lanes", "encoder_lanes", "packing"),
    [
        (2, (3,), []),
        (3, (2,), BY_TOKENS),
        *(
            pytest.param(lanes, (1, 2, 3, 4, 7, 16), [], marks=pytest.mark.slow)
            for lanes in (1, 2, 3, 4, 5, 8, 16)
        ),
        *(
            pytest.param(lanes, (1, 2, 3, 7), BY_TOKENS, marks=pytest.mark.slow)
            for lanes in (1, 2, 3, 4, 8)
        ),
    ],
)
def test_the_data_differ_between_lanes_for_any_number_of_them(
    folder: Path, lanes: int, encoder_lanes: tuple[int, ...], packing: list[str]
) -> None:
    for size in encoder_lanes:
        for sources in ([], MIXED):
            scaled = scaled_to(folder, lanes, size, [*sources, *packing])
            check_minimums(scaled.recipe, scaled.layout, plan_first_step(scaled))


@pytest.mark.parametrize("name", quick(["quickstart", *FAMILIES], "quickstart"))
def test_the_data_show_a_difference_on_every_layout_of_the_matrix(folder: Path, name: str) -> None:
    overrides = []
    if name in FAMILIES:
        write_tiny(TinyCheckpoint(name), folder / name)
        overrides, name = [f"init_from={folder / name}"], f"{name}_tiny"
    recipe = load_recipe(RECIPE.with_name(f"{name}.yaml"), overrides)
    for cell in sweep_cells(recipe, max_ranks=8, precision="fp32").cells:
        scaled = scale_recipe(cell.recipe, cell.layout, folder, "fp32")
        check_minimums(scaled.recipe, scaled.layout, plan_first_step(scaled))


def test_a_recipe_that_packs_by_tokens_is_scaled_to_one_that_does(folder: Path) -> None:
    overrides = [*BY_TOKENS, "data.rows_per_microbatch=2048", "data.packing_window=1024"]
    scaled = scaled_to(folder, 2, 3, overrides)
    data, alone = scaled.recipe.data, reference_recipe(scaled)
    assert data.tokens_per_microbatch == data.sequence_length == data.rows_per_microbatch == 192
    assert alone.data.model_dump() == data.model_dump()
    assert alone.train.global_batch_size == scaled.recipe.train.global_batch_size == 16
    plan = plan_first_step(scaled)
    microbatches = [planned.samples for planned in plan.microbatches]
    assert len(microbatches) == 8
    assert len({samples.num_samples for samples in microbatches}) > 2
    # Samples as long as the budget, with one item or none, run together.
    assert [len(samples.item) for samples in microbatches[:2]] == [0, 1]
    assert {length for samples in microbatches[:2] for length in samples.length} == {192}


def test_a_workload_that_is_a_toy_is_refused(folder: Path) -> None:
    scaled = scaled_to(folder, 2, 2)
    recipe, layout, plan = scaled.recipe, scaled.layout, plan_first_step(scaled)
    check_minimums(recipe, layout, plan)
    equal = tuple(
        replace(m, samples=replace(m.samples, loss_tokens=m.samples.loss_tokens * 0 + 3))
        for m in plan.microbatches
    )
    busy = tuple(m for m in plan.microbatches if len(m.samples.item))
    deep = replace(layout, language=replace(layout.language, pp=8))
    train = recipe.train.model_copy(update={"global_batch_size": 12})
    few = recipe.model_copy(update={"train": train})
    for match, toy, on, planned in (
        ("lanes 0 and 1 are alike", recipe, layout, replace(plan, microbatches=equal)),
        ("every microbatch has items", recipe, layout, replace(plan, microbatches=busy)),
        ("a stage", recipe, deep, plan),
        ("2 microbatches, but", few, layout, plan),
    ):
        with pytest.raises(AssertionError, match=match):
            check_minimums(toy, on, planned)
