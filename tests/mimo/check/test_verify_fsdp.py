"""`mimo verify` of modules of transformers: layouts that are equal, and known bugs that are found.

One rank runs the plain module of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo.check.compare import gradient_floor
from mimo.check.layouts import SWEEP, SweepCell, recipe_cells, sweep_cells, sweep_recipe
from mimo.check.scale import scale_recipe
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.check.cells import (
    RECIPES,
    Case,
    by_fault,
    check_equal,
    check_fault,
    plan_first_step,
    run_cell,
)

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "gemma3")
CELLS = {cell.name: cell for cell in SWEEP if "fsdp" in cell.name and cell.generator is None}
# `tests/device_model/test_nccl.py` compares others with one rank.
COMPARED = (
    "fsdp → fsdp tp2",
    "fsdp dp2 → fsdp tp2 sp · recompute",
    "fsdp dp2 → fsdp dp4 replicate2 · kept gathered",
    "fsdp dp3 → fsdp dp2 · unpacked",
    "colocated fsdp → fsdp tp2 sp dp2",
    "colocated fsdp → fsdp tp2 dp2 · groups of 3 · selective recompute · reduced each time",
    "fsdp dp2 → fsdp tp2 sp · frozen language · recompute",
    "fsdp dp2 → fsdp tp2 sp dp2 · adapters",
    "colocated fsdp → cp2 · overlap",
    "colocated tp2 → fsdp tp2 sp dp2 · recompute",
)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """By family; each starts from a checkpoint."""
    recipes = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp("checkpoints") / family
        write_tiny(TinyCheckpoint(family), folder)
        recipes[family] = load_recipe(RECIPES / f"{family}_tiny.yaml", [f"init_from={folder}"])
    return recipes


# ---------------------------------------------------------------------------- layouts


@pytest.mark.slow  # `tests/mimo/model/test_fsdp_steps.py` has quick ones
@pytest.mark.parametrize("name", COMPARED)
def test_modules_of_transformers_take_the_steps_of_one_rank(
    verifier: Verifier, recipes: dict[str, Recipe], name: str
) -> None:
    check_equal(run_cell(verifier, CELLS[name], recipe=recipes["qwen3_vl"]))


# A family has tensor-parallel plans of its own; lanes are the same for all of them.
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_too(verifier: Verifier, recipes: dict[str, Recipe], family: str) -> None:
    cell = CELLS["fsdp dp2 → fsdp tp2 sp · recompute"]
    check_equal(run_cell(verifier, cell, recipe=recipes[family]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_text_model_of_transformers_takes_the_steps_of_one_rank(
    verifier: Verifier, tmp_path: Path, family: str
) -> None:
    write_tiny(TinyCheckpoint(family), tmp_path / "text")
    overrides = [f"init_from={tmp_path / 'text'}", "language.engine=fsdp", "train.precision=bf16"]
    overrides += ["language.grid={tp: 2, sp: true, dp: 2}", "encoders={}"]
    recipe = load_recipe(RECIPES / "qwen3_vl_tiny.yaml", overrides)
    (cell,) = recipe_cells(recipe, 8, full=False).cells
    check_equal(verifier.run(cell))


@pytest.mark.slow
def test_in_fp64_errors_are_those_of_fp64(
    run_ranks: RunRanks, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    cell = CELLS["fsdp dp3 → fsdp tp2 sp dp2"]
    check_equal(run_cell(Verifier(tmp_path, "fp64"), cell, recipe=recipes["qwen3_vl"]))


def test_the_matrix_leaves_out_fsdp_for_an_unknown_architecture_with_a_note() -> None:
    swept = sweep_cells(load_recipe(RECIPES / "quickstart.yaml"), 8, "fp32")
    assert not any("fsdp" in cell.name for cell in swept.cells)
    (note,) = (note for note in swept.notes if "a tiny checkpoint" in note)
    assert all(name in note for name in CELLS)


def test_the_stand_in_has_the_recipe_s_layout_ties_and_padding(
    recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    language = recipes["qwen3_vl"].language
    untied = language.model_copy(update={"model": language.model | {"tie_word_embeddings": False}})
    recipe = recipes["qwen3_vl"].model_copy(update={"language": untied})
    cell = SweepCell("fsdp dp4 replicate2", "fsdp dp2 replicate2", ("kept gathered",))
    scaled = scale_recipe(*sweep_recipe(recipe, cell), tmp_path, "fp32")
    assert scaled.recipe.language.model["tie_word_embeddings"] is False
    vocab, multiple = (scaled.recipe.language.model[k] for k in ("vocab_size", "vocab_multiple"))
    assert vocab % multiple
    assert scaled.recipe.language.grid.dp_replicate == 2
    assert not scaled.recipe.language.reshard_after_forward
    plan_first_step(scaled)


@pytest.mark.slow
@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3_vl"))
def test_every_tensor_of_the_stand_in_counts(
    verifier: Verifier, recipes: dict[str, Recipe], family: str
) -> None:
    cell = SweepCell("fsdp dp2", "fsdp dp2", ("clipped",))
    scaled = scale_recipe(*sweep_recipe(recipes[family], cell), verifier.folder, "fp32")
    parameters = verifier._reference(scaled).parameters
    gradients = {name: parameter.gradients[0] for name, parameter in parameters.items()}
    floor = gradient_floor(gradients.values())
    weak = [name for name, gradient in gradients.items() if abs(gradient).max() < 30 * floor]
    assert not weak, f"errors below {floor:.1e} are noise"


# --------------------------------------------------------- faults, applied inside ranks


def forget_heads_of_other_ranks() -> None:
    """Norms of queries and keys learn from the heads of one rank of tp."""
    from torch.distributed.tensor.parallel import ParallelStyle

    from mimo.engines.fsdp import plans

    class Alone(ParallelStyle):
        def _apply(self, module: Any, device_mesh: Any) -> Any:
            return module

    plans.head_norm = Alone


def average_over_lanes() -> None:
    """FSDP2 divides by the number of lanes, as it does by itself."""
    from torch.distributed.fsdp import FSDPModule

    module: Any = FSDPModule
    module.set_gradient_divide_factor = lambda self, factor: None
    module.set_force_sum_reduction_for_comms = lambda self, enable: None


def normalise_over_own_vocabulary() -> None:
    """The loss is that of a rank's own rows of the head."""
    from torch.nn import functional

    from mimo.engines.fsdp import language

    def local_loss(hidden: Any, weight: Any, labels: Any, *rest: Any) -> Any:
        logits = functional.linear(hidden, weight)
        return functional.cross_entropy(logits, labels % len(weight), reduction="none")

    language.linear_cross_entropy = local_loss


def derive_positions_from_shard() -> None:
    """Under sequence parallelism each rank numbers the tokens of its own part."""
    import torch

    from mimo.engines.fsdp.language import LanguageModel

    whole = LanguageModel.run

    def run(self: Any, *, position_ids: Any, **rest: Any) -> Any:
        parts = self.border.tp.size()
        first = position_ids.chunk(parts, -1)[0]
        return whole(self, position_ids=torch.cat([first] * parts, -1), **rest)

    LanguageModel.run = run  # type: ignore[method-assign]


def skip_lanes_without_items() -> None:
    """A lane without items doesn't run its tower. The others wait for a short time only."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from mimo.engines.fsdp.towers import Tower

    run, new_group = Tower.run, dist.new_group

    def skip(self: Any, patches: Any, items: Any) -> Any:
        if items.sizes:
            return run(self, patches, items)
        size = self.config.text_config.hidden_size * 3  # and two levels
        return self.make_rows(torch.zeros(0, size, requires_grad=True), ())

    def impatient(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "timeout": timedelta(seconds=8)})

    Tower.run = skip  # type: ignore[method-assign]
    dist.new_group = impatient


EMBEDDING = "language.embedding.word_embeddings.weight"
CASES = by_fault(
    Case(
        forget_heads_of_other_ranks,
        SweepCell("fsdp tp2", "fsdp"),
        "language.decoder.layers.0.self_attention.q_layernorm.weight",
        spared="vision",
    ),
    Case(average_over_lanes, SweepCell("", "fsdp dp2"), spared="language"),
    Case(
        normalise_over_own_vocabulary,
        SweepCell("fsdp tp2", "fsdp", ("frozen encoder",)),
        EMBEDDING,
    ),
    Case(
        derive_positions_from_shard,
        SweepCell("fsdp tp2 sp", "fsdp dp2", ("frozen encoder",)),
        EMBEDDING,
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_fault_is_reported_with_the_first_parameter_that_differs(
    verifier: Verifier, recipes: dict[str, Recipe], case: Case
) -> None:
    check_equal(run_cell(verifier, case.cell, recipe=recipes["qwen3_vl"]))
    check_fault(verifier, case, recipes["qwen3_vl"])


@pytest.mark.slow
def test_a_lane_that_skips_its_collectives_ends_in_a_diagnosis(
    verifier: Verifier, recipes: dict[str, Recipe]
) -> None:
    cell, recipe = SweepCell("fsdp", "fsdp dp2"), recipes["qwen3_vl"]
    result = run_cell(verifier, cell, skip_lanes_without_items, recipe=recipe)
    assert not result.passed
    # Whoever gives up first: the bridge, whose peer does not answer, or FSDP2.
    assert result.failure is not None
    assert "language -> vision" in result.failure or "_fsdp_collectives" in result.failure
    assert "failed" in result.failure.splitlines()[-1] or "in step 0" in result.failure
