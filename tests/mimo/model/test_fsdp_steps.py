"""Two ranks train modules of transformers as one rank trains the plain modules.

The tests compare loss, norm, every gradient and every weight, in fp64. Tensor parallelism comes
without sequence parallelism, which would sum the gradients of all parameters that are not cut.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from mimo.check.compare import RankSteps, Reference, compare
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.parallel.build import build_layout
from tests.conftest import RunRanks
from tests.mimo.model.test_fsdp_runs import FSDP, make

NUM_STEPS = {"qwen2_5_vl": 1, "qwen3_vl": 1, "gemma3": 1, "adapters": 2}
"""The gradients of adapters' first matrices are zero until the second ones have changed."""
TOLERANCE = 1e-10
SETTINGS = [
    *FSDP,
    *("train.precision=fp64", "train.adam_eps=1e-3", "train.weight_decay=0.1"),
    *("train.learning_rate=0.01", "encoders.vision.learning_rate=0.002"),
    *("train.save_every=null", "train.validate_every=null"),
]
LAYOUTS = {
    # Microbatches are encoded one at a time: some lanes of the tower have no item.
    "tp2": ["language.grid={tp: 2, dp: 1}", "encoders.vision.encode_group=1"],
    "dp2": ["language.grid={dp: 2}"],
}
LORA = ["language.lora={rank: 6, alpha: 12}", "encoders.vision.lora={rank: 2, alpha: 5}"]
MODELS = {
    "qwen2_5_vl": ("qwen2_5_vl", []),
    "qwen3_vl": ("qwen3_vl", []),
    "gemma3": ("gemma3", []),
    "adapters": ("qwen3_vl", LORA),
}
NUM_UNITS = 5
"""Of each module: its four layers, and what is outside of them."""


@dataclass(frozen=True)
class Steps:
    """What each rank saw in each layout, and how often it reduced gradients over the lanes."""

    number: int
    expected: Reference
    ranks: dict[str, list[RankSteps]]
    reductions: dict[str, list[int]]


def take_steps(
    rank: int, path: Path, settings: list[str], number: int
) -> list[tuple[RankSteps, int]]:
    from mimo.check.steps import layout_steps
    from tests.fsdp_ranks import Counted

    warnings.filterwarnings("error", message=".*returned a view tensor")
    found = []
    for own in LAYOUTS.values():
        recipe = load_recipe(path, [*settings, *own])
        with Counted() as counted:
            steps = layout_steps(recipe, build_layout(recipe), number)
        found.append((steps, counted.reductions))
    return found


def take_reference_steps(rank: int, path: Path, settings: list[str], number: int) -> Reference:
    from mimo.check.steps import keep_fp64, reference_steps

    with keep_fp64("fp64"):
        return reference_steps(load_recipe(path, settings), number)


@pytest.fixture(scope="module", params=MODELS)
def steps(
    request: pytest.FixtureRequest, run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> Steps:
    (family, more), number = MODELS[request.param], NUM_STEPS[request.param]
    path = make(tmp_path_factory.mktemp(family), family)
    by_rank = run_ranks(take_steps, 2, path, [*SETTINGS, *more], number)
    together = "train.micro_batch_size=4"
    alone = [*SETTINGS, *more, together]
    (expected,) = run_ranks(take_reference_steps, 1, path, alone, number)
    by_layout = dict(zip(LAYOUTS, zip(*by_rank, strict=True), strict=True))
    return Steps(
        number,
        expected,
        {layout: [steps for steps, _ in ranks] for layout, ranks in by_layout.items()},
        {layout: [count for _, count in ranks] for layout, ranks in by_layout.items()},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_steps_of_one(steps: Steps, layout: str) -> None:
    comparison = compare(steps.ranks[layout], steps.expected, TOLERANCE)
    assert comparison.first is None, str(comparison.first)


def test_gradients_are_reduced_once_a_step_and_not_with_every_microbatch(steps: Steps) -> None:
    embedding_learns = steps.expected.parameters["language.embedding.word_embeddings.weight"]
    of_language = NUM_UNITS if embedding_learns.gradients else NUM_UNITS - 1
    if "language.output_layer.weight" in steps.expected.parameters:
        of_language += 2  # an untied embedding and head are units of their own
    assert steps.reductions == {
        "tp2": [steps.number * NUM_UNITS] * 2,
        "dp2": [steps.number * (NUM_UNITS + of_language)] * 2,
    }
