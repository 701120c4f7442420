"""`mimo verify` of recipes with a generator: layouts that are equal, and known bugs that are found.

One rank calls the plain module of diffusers, once for each item.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from data.modalities.image_files import image_size
from mimo.check.compare import gradient_floor
from mimo.check.layouts import SWEEP, SweepCell, recipe_cells, sweep_cells, sweep_recipe
from mimo.check.scale import ScaledRecipe, scale_recipe
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.cli.main import app
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from tests.cases import quick, quick_values
from tests.conftest import RunRanks
from tests.mimo.check.cells import (
    RECIPE,
    Case,
    by_fault,
    check_equal,
    check_fault,
    plan_first_step,
    run_cell,
)
from tests.mimo.check.draws import GENERATOR, PATH, draws_recipe, starting_from
from tests.mimo.check.minimums import check_minimums

CELLS = {cell.name: cell for cell in SWEEP if cell.generator is not None}
# `tests/device_model/test_nccl.py` compares others with one rank.
COMPARED = (
    "colocated fsdp → fsdp tp2 sp → colocated · prompt",
    "colocated → dp2 → colocated · adapters",
    "colocated → tp2 sp → colocated · recompute",
    "dp2 → dp2 → colocated",
    "dp2 → dp2 → dp2 · frozen language",
    "dp2 → tp2 → dp3",
    "dp2 → tp2 sp → dp2 · adapters",
    "dp2 → tp2 sp → dp2 · distributed optimizer",
    "none → dp2 → dp3 · prompt",
    "none → tp2 sp → colocated · frozen language",
    "none → tp2 sp → colocated · unpacked · recompute",
    "1 rank → dp2 → dp4 replicate2 · unpacked",
    "1 rank → tp2 sp dp2 → colocated",
)
LOSSES = {"loss_language", "loss_image"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return draws_recipe(tmp_path_factory.mktemp("checkpoint"))


# ---------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    "name",
    # `test_nccl.py` has the quick one with a generator on ranks of its own.
    quick(COMPARED, "none → dp2 → dp3 · prompt"),
)
def test_a_layout_with_a_generator_takes_the_steps_of_one_rank(
    verifier: Verifier, recipe: Recipe, name: str
) -> None:
    cell = CELLS[name]
    comparison = check_equal(run_cell(verifier, cell, recipe=recipe))
    assert all(step.keys() >= LOSSES for step in comparison.scalars)
    modules = {name.partition(".")[0] for name in comparison.weights}
    assert modules == {"language", "image", *(["vision"] if cell.encoders else [])}
    queries = [name for name in comparison.gradients if name == "language.queries.image"]
    assert bool(queries) == ("prompt" not in cell.options)


@pytest.mark.slow
def test_in_fp64_errors_are_those_of_fp64(
    run_ranks: RunRanks, recipe: Recipe, tmp_path: Path
) -> None:
    cell = CELLS["dp2 → pp2 → dp2 · recompute"]
    check_equal(run_cell(Verifier(tmp_path, "fp64"), cell, recipe=recipe))


@pytest.mark.slow
def test_lumina2_takes_the_steps_of_one_rank(verifier: Verifier, tmp_path: Path) -> None:
    family = ["generators.image.family=lumina2", "generators.image.model.num_query_groups=2"]
    family += ["generators.image.model.ffn_hidden_size=96"]
    for name in ("dp2 → dp2 → dp2 · clipped", "none → tp2 → colocated · prompt"):
        check_equal(run_cell(verifier, CELLS[name], recipe=draws_recipe(tmp_path, family)))


@pytest.mark.slow
def test_the_recipe_s_own_layout_is_shrunk_and_packed_by_tokens(
    verifier: Verifier, tmp_path: Path
) -> None:
    overrides = [
        *("train.micro_batch_size=1", "data.tokens_per_microbatch=512"),
        *("language.grid={tp: 4, sp: true, dp: 4}", "generators.image.grid.dp=6"),
        "generators.image.skipped_tokens=34",
    ]
    swept = draws_recipe(tmp_path, overrides)
    built = recipe_cells(swept, 12, full=False)
    assert any("image fsdp dp3 (non-dividing, more lanes)" in note for note in built.notes)
    (cell,) = built.cells
    check_equal(verifier.run(cell))


@pytest.mark.slow
def test_every_tensor_of_the_scaled_generator_counts(verifier: Verifier, recipe: Recipe) -> None:
    cell = CELLS["1 rank → 1 rank → dp2"]
    scaled = scale_recipe(*sweep_recipe(recipe, cell), verifier.folder, "fp32")
    parameters = verifier._reference(scaled).parameters
    gradients = {name: parameter.gradients[0] for name, parameter in parameters.items()}
    floor = gradient_floor(gradients.values())
    # An error of 1e-4 of any of them is larger than the tolerance.
    weak = {name for name, gradient in gradients.items() if abs(gradient).max() < floor / 10}
    # In the last block the condition's stream ends, so what follows its keys and values has none.
    unused = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
    last = tuple(f"image.transformer_blocks.3.{part}" for part in unused)
    assert weak == {name for name in gradients if name.startswith(last)}


@pytest.mark.slow
def test_the_command_compares_the_losses_of_a_recipe_with_a_generator(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    report, overrides = tmp_path / "report.json", [starting_from(tmp_path), GENERATOR]
    result = CliRunner().invoke(app, ["verify", str(PATH), *overrides, "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert "→ language dp2 → image fsdp dp2 (equal lanes) = 5 ranks" in result.output
    (layout,) = json.loads(report.read_text())["layouts"]
    assert layout["grids"]["image"]["dp"] == 2
    assert all(step.keys() >= LOSSES for step in layout["comparison"]["scalars"])


# ------------------------------------------------------------------------- the matrix


def test_cells_with_a_generator_run_where_the_recipe_has_one(recipe: Recipe) -> None:
    assert len(CELLS) >= 16
    for name, cell in CELLS.items():
        assert name == cell.name
    swept = {cell.name for cell in sweep_cells(recipe, 8, "fp32").cells}
    assert swept == {cell.name for cell in SWEEP if not cell.needs_experts}
    without = sweep_cells(load_recipe(RECIPE), 8, "fp32")
    assert not CELLS.keys() & {cell.name for cell in without.cells}
    assert not any(name in note for note in without.notes for name in CELLS)


def test_a_recipe_without_encoders_is_swept_with_the_cells_without(tmp_path: Path) -> None:
    alone = draws_recipe(tmp_path).model_copy(update={"encoders": {}})
    swept = [cell.name for cell in sweep_cells(alone, 8, "fp32").cells]
    assert swept == [name for name in CELLS if name.startswith("none")]
    with pytest.raises(RecipeError, match="an encoder or a generator"):
        sweep_cells(alone.model_copy(update={"generators": {}}), 8, "fp32")


def scaled_cell(recipe: Recipe, name: str, folder: Path) -> ScaledRecipe:
    return scale_recipe(*sweep_recipe(recipe, CELLS[name]), folder, "fp32")


def test_the_scaled_copy_keeps_the_settings_of_the_generator(
    recipe: Recipe, tmp_path: Path
) -> None:
    whole = recipe.generators["image"]
    scaled = scaled_cell(recipe, "fsdp dp2 → fsdp dp2 → dp2 · reduced each time", tmp_path)
    small = scaled.recipe.generators["image"]
    kept = ("family", "loss_weight", "condition", "condition_dropout", "time_shift", "time_std")
    assert [getattr(small, key) for key in kept] == [getattr(whole, key) for key in kept]
    assert small.queries == 3
    assert small.model["condition_size"] == scaled.recipe.language.model["hidden_size"] == 128
    assert scaled.recipe.init_from is not None
    rates = small.learning_rate, small.query_learning_rate, scaled.recipe.train.learning_rate
    assert rates == pytest.approx((0.0025, 0.01, 0.005))  # as 5e-4, 2e-3 and 1e-3


# ------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    "name", quick(CELLS, "dp2 → dp2 → dp2 · clipped", "none → dp2 → dp3 · prompt")
)
def test_the_data_show_a_difference(recipe: Recipe, tmp_path: Path, name: str) -> None:
    scaled = scaled_cell(recipe, name, tmp_path)
    check_minimums(scaled.recipe, scaled.layout, plan_first_step(scaled))


def test_answers_have_items_of_every_kind(recipe: Recipe, tmp_path: Path) -> None:
    scaled = scaled_cell(recipe, "dp2 → dp2 → dp2 · clipped", tmp_path)
    samples = scaled.workload.samples()
    drawn = {len(sample.drawn) for sample in samples}
    assert drawn >= {0, 1, 2}
    assert any(sample.items and sample.drawn for sample in samples)
    only = [sample for sample in samples if sample.drawn and not sample.answer]
    assert any([part["type"] for part in s.messages[1]["content"]] == ["image"] for s in only)
    contents = [item.content for sample in samples for item in sample.drawn]
    assert len({image_size(io.BytesIO(content)) for content in contents}) == 2
    plan = plan_first_step(scaled)
    counts = [planned.items["image"].item.size for planned in plan.microbatches]
    assert {0, 1} < set(counts)
    single = plan.microbatches[counts.index(1)].items["image"]
    assert single.lane.size == 1


# --------------------------------------------------------- faults, applied inside ranks


def shift_condition_rows() -> None:
    """The bridge takes the hidden state of the next token."""
    from bridge import OutputSender

    send = OutputSender.send
    OutputSender.send = lambda self, number, hidden: send(self, number, hidden.roll(-1, 0))  # type: ignore[method-assign]


def detach_gradients_of_generator() -> None:
    """The generator's gradient is not added to that of the text."""
    from mimo.engines.megatron import language

    append = language.append_scalar
    language.append_scalar = lambda losses, scalar: append(losses, scalar.detach())


def divide_by_items_of_lane() -> None:
    """Each lane of a generator divides its losses by its own items."""
    from mimo.model.outputs import OutputPlanner

    plan = OutputPlanner.plan

    def of_lane(self: Any, loaded: Any, step: Any, readers: Any, lane: int) -> Any:
        items = [planned.items[self.name] for planned in step.microbatches]
        count = sum(int(np.count_nonzero(of.lane == lane)) for of in items)
        return plan(self, loaded, replace(step, num_outputs={self.name: count}), readers, lane)

    OutputPlanner.plan = of_lane  # type: ignore[method-assign]


def draw_noise_of_lane() -> None:
    """Random numbers depend on the lane that has the item."""
    from mimo.model.outputs import OutputPlanner

    plan = OutputPlanner.plan

    def of_lane(self: Any, loaded: Any, step: Any, readers: Any, lane: int) -> Any:
        named = replace(self, key=f"{self.key}:{lane}")
        return plan(named, loaded, step, readers, lane)

    OutputPlanner.plan = of_lane  # type: ignore[method-assign]


def average_gradients_of_generator() -> None:
    """A generator's lanes are averaged, as FSDP2 does by itself."""
    from mimo.engines.fsdp.module import FsdpModule

    finish = FsdpModule.finish_gradients

    def averaged(self: Any, num_loss_tokens: int) -> None:
        finish(self, num_loss_tokens * self.groups.dp.size())

    FsdpModule.finish_gradients = averaged  # type: ignore[method-assign]


def keep_queries_of_own_tokens() -> None:
    """Under sequence parallelism a rank's queries learn from its own slice alone."""
    from mimo.model import build

    add = build._add_queries

    def add_whole(recipe: Any, chunk: Any, settings: Any) -> None:
        add(recipe, chunk, settings)
        for query in chunk.queries.values():
            query.sequence_parallel = False

    build._add_queries = add_whole


def sum_slices_of_gradients() -> None:
    """Slices of the rows' gradients are completed over tp, and then summed."""
    import torch.distributed as dist

    from bridge import outputs

    share_out: Any = outputs.share_out

    def summed(end: Any, group: Any, number: int, kind: Any, buffer: Any, shares: Any) -> None:
        share_out(end, group, number, kind, buffer, shares)
        dist.all_reduce(buffer, group=group)

    outputs.share_out = summed


EMBEDDING, QUERIES = "language.embedding.word_embeddings.weight", "language.queries.image"
FIRST_OF_GENERATOR = "image.time_text_embed.timestep_embedder.linear_1.weight"
CASES = by_fault(
    Case(shift_condition_rows, SweepCell("dp2", "none", generator="dp2"), EMBEDDING),
    Case(
        detach_gradients_of_generator,
        SweepCell("dp2", "none", generator="colocated"),
        EMBEDDING,
        spared="image",
    ),
    Case(divide_by_items_of_lane, SweepCell("dp2", "none", generator="dp2"), EMBEDDING),
    Case(draw_noise_of_lane, SweepCell("dp2", "none", generator="dp2"), EMBEDDING),
    Case(
        average_gradients_of_generator,
        SweepCell("dp2", "none", generator="dp2"),
        FIRST_OF_GENERATOR,
        spared="language",
    ),
    Case(
        keep_queries_of_own_tokens,
        SweepCell("tp2 sp", "none", generator=""),
        QUERIES,
        spared="image",
    ),
    Case(
        sum_slices_of_gradients,
        SweepCell("tp2", "none", generator=""),
        EMBEDDING,
        spared="image",
    ),
)


@pytest.mark.parametrize("case", quick_values(CASES, "shift_condition_rows"))
def test_a_fault_is_reported_with_the_first_parameter_that_differs(
    verifier: Verifier, recipe: Recipe, case: Case
) -> None:
    check_fault(verifier, case, recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", dict.fromkeys(case.cell for case in CASES.values()), ids=lambda c: c.name
)
def test_without_a_fault_the_same_layouts_are_equal(
    verifier: Verifier, recipe: Recipe, cell: SweepCell
) -> None:
    check_equal(run_cell(verifier, cell, recipe=recipe))
