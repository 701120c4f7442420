"""A step's line: FLOPs, and where time, memory and bytes went, over the ranks of every module."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.families.registry import encoder_settings, language_settings
from mimo.model.step_plan import StepFlops, StepPlan, step_planner
from mimo.parallel.build import build_layout
from mimo.parallel.grids import GridSpec, Layout
from mimo.spans import RANK
from mimo.train import metrics as figures
from mimo.train.loggers import MetricsWriter
from mimo.train.metrics import StepTimes
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import metrics, run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flops")
    tiny.write_samples(directory)
    tiny.write_recipe(directory)
    return directory


def planned(recipe: Recipe) -> tuple[StepPlan, StepFlops, list[tuple[int, int, int]]]:
    """The first step, what counts its FLOPs, and the grids of all its images."""
    dataset = tiny.open_sources(recipe)
    planner = step_planner(recipe, build_layout(recipe), dataset)
    plan = planner.finish(planner.microbatches(0), [])
    items = [item for m in plan.microbatches for item in m.samples.item.tolist()]
    grids = [dataset.readers[0].plan(item).grid for item in items]
    return plan, StepFlops(recipe, dataset.readers[0].chat.vocab_size, dataset), grids


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
    counts = flops.of(plan)
    assert counts["vision"] == pytest.approx(forward_flops(recipe, grids))
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
    layout = build_layout(recipe)
    assert layout.world_size == 3
    times, flops = StepTimes(layout, 0), {"language": 90.0, "vision": 30.0}
    monkeypatch.setattr(figures, "peak_flops", lambda: 100.0)
    assert times.utilization(flops, 2.0) == pytest.approx(120 / (2.0 * 3 * 100.0))
    monkeypatch.setattr(figures, "peak_flops", lambda: None)
    assert times.utilization(flops, 2.0) is None


# Vision on rank 0, the language model on ranks 1 and 2.
SECONDS = (
    {
        ("vision", "encode", ""): 2.0,
        ("vision", "bridge_wait", "vision_backward"): 5.0,
        (RANK, "sync", ""): 3.0,
    },
    {("language", "forward", ""): 4.0, (RANK, "data", ""): 1.0, (RANK, "sync", ""): 5.0},
    {
        ("language", "forward", ""): 6.0,
        ("language", "bridge_wait", "vision_forward"): 2.0,
        ("language", "pipeline_wait", ""): 2.0,
    },
)
# Vision's rows go to both ranks of the language model.
BYTES = (
    {("sent", "vision_forward"): 80, ("least", "vision_forward"): 40},
    {("sent", "vision_backward"): 10},
    {("sent", "vision_backward"): 30},
)


def test_mean_largest_and_idle_share_of_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    language = GridSpec("language", tp=2, rank_offset=1)
    layout = Layout(language, {"vision": GridSpec("vision")}, world_size=3)
    tables = []
    for rank, seconds in enumerate(SECONDS):
        monkeypatch.setattr(figures.SPANS, "take", lambda seconds=seconds: seconds)
        monkeypatch.setattr(figures, "peak_memory", lambda rank=rank: (rank + 1) * 2**30)
        tables.append(StepTimes(layout, rank).of_this_rank(BYTES[rank]))
    line = StepTimes(layout, 0).figures(
        {name: np.sum([table[name] for table in tables], axis=0) for name in tables[0]}
    )
    assert line == pytest.approx(
        {
            "idle_fraction": 18 / 30,
            "idle_fraction_vision": 8 / 10,
            "idle_fraction_language": 10 / 20,
            "memory_gib_vision": 1,
            "memory_gib_language": 3,
            "bridge_wait_seconds_vision_forward": 2,
            "bridge_wait_seconds_vision_backward": 5,
            "bridge_bytes_vision_forward": 80,
            "bridge_least_bytes_vision_forward": 40,
            "bridge_bytes_vision_backward": 40,
            "bridge_least_bytes_vision_backward": 0,
            **with_max("vision_encode", 2, 2),
            **with_max("vision_bridge_wait", 5, 5),
            **with_max("vision_sync", 3, 3),
            **with_max("language_forward", 5, 6),
            **with_max("language_data", 0.5, 1),
            **with_max("language_sync", 2.5, 5),
            **with_max("language_bridge_wait", 1, 2),
            **with_max("language_pipeline_wait", 1, 2),
        }
    )
    assert StepTimes(layout, 0).figures({}) == {}


@pytest.mark.parametrize(
    ("layout", "copies", "backward"),
    [
        (["language.grid.tp=2"], 2, True),  # to one rank, and from there to the other
        pytest.param(
            ["language.grid.tp=2", "bridge.delivery=replicated"], 2, True, marks=pytest.mark.slow
        ),
        pytest.param(
            ["language.grid.tp=2", "language.grid.sp=true"], 1, True, marks=pytest.mark.slow
        ),
        # `tests/bridge/test_communicator.py` has a quick frozen encoder.
        pytest.param(
            ["language.grid.dp=2", "encoders.vision.freeze=true"],
            1,
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bytes_over_a_bridge_are_those_that_are_sent(
    run_ranks: RunRanks, recipe: Path, layout: list[str], copies: int, backward: bool
) -> None:
    run(run_ranks, recipe, *layout, "train.micro_batch_size=2", "train.steps=1")
    (line,) = metrics(recipe)
    least = line["bridge_least_bytes_vision_forward"]
    assert least == rows_in(recipe.parent / "train-00000.tar") * 32 * 4
    assert line["bridge_bytes_vision_forward"] == copies * least
    back = line["bridge_least_bytes_vision_backward"], line["bridge_bytes_vision_backward"]
    # Each rank of a lane has the whole gradient, and returns its share.
    assert back == ((least, least) if backward else (0, 0))


def rows_in(shard: Path) -> int:
    """Return the rows of all images: one for each 28 · 28 pixels."""
    with tarfile.open(shard) as tar:
        files = [tar.extractfile(member) for member in tar if member.name.endswith(".png")]
        sizes = [Image.open(file).size for file in files if file is not None]
    return sum(width * height for width, height in sizes) // 28**2


def with_max(name: str, mean: float, largest: float) -> dict[str, float]:
    return {f"seconds_{name}": mean, f"seconds_{name}_max": largest}
