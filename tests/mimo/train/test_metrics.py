"""What a step's line says of the work that was done: FLOPs of every module, over all ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.families.registry import encoder_settings, language_settings
from mimo.model.dataset import item_processors, open_dataset, open_tokenizer
from mimo.model.step_plan import StepFlops, StepPlan, StepPlanner
from mimo.parallel.build import build_layout
from mimo.parallel.grids import num_microbatches
from mimo.train import metrics
from mimo.train.loggers import MetricsWriter
from mimo.train.metrics import StepResult, step_metrics
from tests.mimo import tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("flops")
    tiny.write_samples(found)
    tiny.write_recipe(found)
    return found


def planned(recipe: Recipe) -> tuple[StepPlan, StepFlops, list[tuple[int, int, int]]]:
    """The first step, what counts its FLOPs, and the grids of all its images."""
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    dataset = open_dataset(recipe, "sources", chat, processors)
    assert dataset is not None
    layout = build_layout(recipe)
    planner = StepPlanner(
        layout,
        {"vision": ("image",)},
        dataset.indexes,
        dataset.order,
        recipe.train.micro_batch_size,
        num_microbatches(recipe, layout),
    )
    plan = planner.finish(planner.microbatches(0), [])
    items = [item for m in plan.microbatches for item in m.samples.item.tolist()]
    grids = [dataset.readers[0].plan(item).grid for item in items]
    return plan, StepFlops(recipe, chat.vocab_size, dataset), grids


def forward_flops(recipe: Recipe, grids: list[tuple[int, int, int]]) -> float:
    """Of the tower, image by image."""
    settings = encoder_settings(recipe, "vision")
    products = settings.products(language_settings(recipe).hidden_size)
    total = 0.0
    for grid in grids:
        counts = settings.counts(np.array([grid]))
        total += sum(product.forward * counts[product.per] for product in products)
    return total


def test_frozen_towers_count_their_forward_and_text_costs_them_nothing(directory: Path) -> None:
    recipe = load_recipe(directory / "tiny.yaml", ["encoders.vision.freeze=true"])
    plan, flops, grids = planned(recipe)
    found = flops.of(plan)
    assert found["vision"] == pytest.approx(forward_flops(recipe, grids))
    (text_only,) = [m for m in plan.microbatches if not len(m.samples.item)][:1]
    alone = flops.of(StepPlan((text_only,), 1, 1, 1.0, {}))
    assert alone["vision"] == 0
    assert alone["language"] > 0


def test_what_learns_costs_a_backward_and_what_is_frozen_behind_it_part_of_one(
    directory: Path,
) -> None:
    def of(*overrides: str) -> dict[str, float]:
        plan, flops, _ = planned(load_recipe(directory / "tiny.yaml", overrides))
        return flops.of(plan)

    trained, frozen = of(), of("encoders.vision.freeze=true")
    projector = of("encoders.vision.freeze=tower")
    assert 2 * frozen["vision"] < trained["vision"] <= 3 * frozen["vision"]
    assert frozen["vision"] < projector["vision"] < trained["vision"]
    assert frozen["language"] == trained["language"]
    behind = of("language.freeze=true")
    assert behind["vision"] == trained["vision"]
    # No gradients of weights, but those that lead to the images' rows.
    assert trained["language"] / 3 < behind["language"] < trained["language"]


def test_the_line_of_a_logged_step_is_easily_found_in_a_log(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(directory / "tiny.yaml", ["train.steps=1000", "train.log_every=2"])
    line = {"loss": 2.34567, "grad_norm": 1.0, "lr": 1e-4, "tokens_per_second": 12345.6}
    with MetricsWriter(recipe, tmp_path, 0) as writer:
        for step, shares in enumerate([{"mfu": None}, {"mfu": 0.4321, "idle_fraction": 0.25}]):
            writer.step({"step": step, **line, **shares, "epochs": {0: 0.5, 1: 1.25}})
    assert re.fullmatch(
        r"step 2/1000 loss 2\.3457 grad_norm 1\.000 lr 1\.000e-04 tokens/s 12346 epoch 0\.50-1\.25 "
        r"mfu 0\.432 idle 0\.250 eta \d+:\d\d:\d\d\n",
        capsys.readouterr().out,
    )


def test_utilisation_is_a_share_of_the_peak_of_all_ranks_of_the_job(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(directory / "tiny.yaml", ["language.grid={tp: 2, dp: 1}"])
    plan, _, _ = planned(recipe)
    layout = build_layout(recipe)
    assert layout.world_size == 3
    flops = {"language": 90.0, "vision": 30.0}
    done = (plan, flops, 1.0, 1.0, {"language": 0.1}, 0.0, 2.0, 0.0, 0.0)
    result = StepResult(*done, is_skipped=False, grad_norms={}, update_norms={})
    monkeypatch.setattr(metrics, "peak_flops", lambda: 100.0)
    found = step_metrics(result, layout, 0, 0)
    assert found["mfu"] == pytest.approx(120 / (2.0 * 3 * 100.0))
    assert (found["flops_language"], found["flops_vision"]) == (90.0, 30.0)
    monkeypatch.setattr(metrics, "peak_flops", lambda: None)
    assert step_metrics(result, layout, 0, 0)["mfu"] is None
