"""The forwards of a generator's lanes: how many, of what, with which numbers and weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.loader import LoadedStep
from data.packing import Used
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.modules import Generator
from mimo.model.outputs import HostDraw, OutputPlanner, output_planner
from mimo.model.step_plan import StepPlan, step_planner
from mimo.parallel.build import build_layout
from mimo.parallel.grids import Layout
from tests.mimo import drawings, tiny
from tests.mimo.drawings import GENERATOR

IMAGE = "generators.image"
# 8 samples a step. Some microbatches draw one size, some several, and one nothing.
SIZES = "train.global_batch_size=8"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawings.write_recipe(tmp_path_factory.mktemp("outputs"))


@dataclass(frozen=True)
class Planned:
    """A step: by microbatch and lane its forwards."""

    layout: Layout
    plan: StepPlan
    draws: list[list[list[HostDraw]]]
    planner: OutputPlanner

    @property
    def forwards(self) -> list[HostDraw]:
        return [draw for lanes in self.draws for draws in lanes for draw in draws]

    def items(self) -> dict[bytes, tuple[float, float, bytes, bool]]:
        """By the pixels of each item: time, weight, noise, and whether it has no condition."""
        return {
            patches.numpy().tobytes(): (
                float(host.draw.times[b]),
                float(host.draw.weights[b]),
                host.draw.noise[b].numpy().tobytes(),
                int(host.draw.lengths[b]) == 0,
            )
            for host in self.forwards
            for b, (_, patches) in enumerate(host.patches)
            if host.draw.counted[b]
        }


def plan(path: Path, *overrides: str, num_loss_tokens: int | None = None) -> Planned:
    """Plan a step of a recipe, for all lanes; with another number of loss tokens, if given."""
    recipe = load_recipe(path, [GENERATOR, SIZES, *overrides])
    dataset, layout = tiny.open_sources(recipe), build_layout(recipe)
    steps = step_planner(recipe, layout, dataset)
    planned = steps.finish(steps.microbatches(0))
    if num_loss_tokens is not None:
        planned = replace(planned, num_loss_tokens=num_loss_tokens)
    patches = []
    for microbatch in planned.microbatches:
        samples, numbers = microbatch.samples, microbatch.items["image"].item
        at = zip(samples.source[samples.item_sample[numbers]], samples.item[numbers], strict=True)
        places = [(int(source), int(item)) for source, item in at]
        files = [torch.from_numpy(dataset.readers[s].patches(item)) for s, item in places]
        patches.append(dict(zip(places, files, strict=True)))
    loaded = LoadedStep(0, planned.microbatches, Used(), patches=patches)
    planner = output_planner(recipe, "image", "step")
    lanes = [
        planner.plan(loaded, planned, dataset.readers, lane)
        for lane in range(layout.generators["image"].dp)
    ]
    return Planned(layout, planned, [[*of_all] for of_all in zip(*lanes, strict=True)], planner)


LAYOUTS = {
    "1 lane": ["train.micro_batch_size=4"],
    "3 lanes": [f"{IMAGE}.grid.dp=3", "language.grid.dp=2", "train.micro_batch_size=1"],
    "colocated": [
        f"{IMAGE}.grid.dp=null",
        f"{IMAGE}.placement=colocated",
        "language.grid.dp=4",
        "train.micro_batch_size=1",
    ],
    "unpacked": [f"{IMAGE}.grid.dp=2", "data.packing=false", "train.micro_batch_size=2"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_lanes_run_one_forward_for_each_size_in_the_microbatch(path: Path, name: str) -> None:
    planned = plan(path, *LAYOUTS[name])
    num_sizes, num_blank = set[int](), 0
    for microbatch, lanes in zip(planned.plan.microbatches, planned.draws, strict=True):
        grids = [[host.draw.grid for host in draws] for draws in lanes]
        assert all(of_lane == grids[0] for of_lane in grids), "they gather weights together"
        assert grids[0] == sorted(set(grids[0]))
        items = microbatch.items["image"]
        counts = np.array([[int(host.draw.counted.sum()) for host in draws] for draws in lanes])
        assert counts.sum(axis=1).tolist() == [items.of_lane(n).size for n in range(len(lanes))]
        assert (counts.sum(axis=0) > 0).all(), "no forward is blank on all lanes"
        num_sizes.add(len(grids[0]))
        for host in (host for draws in lanes for host in draws if not host.draw.counted.any()):
            num_blank += 1
            assert host.draw.weights.tolist() == [0.0]
            assert not host.patches[0][1].any()
    assert len(num_sizes) > 1, "microbatches differ in their number of sizes"
    assert name == "1 lane" or num_blank > 0
    assert (
        sum(map(len, drawings.DRAWN)) == len(planned.items()) == planned.plan.num_outputs["image"]
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_an_item_are_its_share_of_the_lanes_rows(path: Path, name: str) -> None:
    planned = plan(path, f"{IMAGE}.condition_dropout=0.5", *LAYOUTS[name])
    dropped = [item[-1] for item in planned.items().values()]
    assert len(set(dropped)) == 2, "some have a condition, some none"
    for microbatch, lanes in zip(planned.plan.microbatches, planned.draws, strict=True):
        samples, items = microbatch.samples, microbatch.items["image"]
        for lane, draws in enumerate(lanes):
            held = int(samples.item_rows[items.of_lane(lane)].sum())
            seen, without = list[int](), 0
            for draw in (host.draw for host in draws):
                for b in np.flatnonzero(draw.counted).tolist():
                    rows, length = draw.rows[b].numpy(), int(draw.lengths[b])
                    assert (rows[length:] == held).all(), "a blank row stands there"
                    assert length in (0, 3), "queries"
                    seen += rows[:length].tolist()
                    without += 3 - length
            assert sorted(seen) == sorted({*seen} & {*range(held)}), "no row has two items"
            assert len(seen) == held - without


def test_every_layout_draws_the_same_numbers_for_an_item(path: Path) -> None:
    dropout = f"{IMAGE}.condition_dropout=0.3"
    first, *others = (plan(path, dropout, *given).items() for given in LAYOUTS.values())
    assert len(first) == sum(map(len, drawings.DRAWN))
    assert len({noise for _, _, noise, _ in first.values()}) == len(first), "items differ"
    for other in others:
        assert other == first


def test_numbers_change_with_step_seed_split_and_generator(path: Path) -> None:
    shared: Any = SimpleNamespace(grid=(1, 2, 3))
    recipe = load_recipe(path, [GENERATOR])
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 99})})
    planners = [output_planner(recipe, "image", "step"), output_planner(recipe, "image", "valid")]
    planners.append(output_planner(other, "image", "step"))
    planners.append(replace(planners[0], key=f"{planners[0].key}2"))
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    drawn = [planner.numbers(at, shared) for planner in planners for at in places]
    assert len({numbers.time for numbers in drawn}) == len(drawn)
    assert len({numbers.noise.numpy().tobytes() for numbers in drawn}) == len(drawn)
    assert drawn[0].noise.shape == (6, 12)
    again = planners[0].numbers(places[0], shared)
    assert (again.time, again.dropped) == (drawn[0].time, drawn[0].dropped)


def test_times_noise_and_dropout_follow_their_distributions() -> None:
    count, shift, plan_of_item = 20_000, 3.0, SimpleNamespace(grid=(1, 1, 1))
    generator = Generator(
        family="qwen_image", condition_dropout=0.1, time_mean=0.5, time_std=2.0, time_shift=shift
    )
    planner = OutputPlanner("image", generator, "0:step:image", channels=4)
    item: Any = plan_of_item
    drawn = [planner.numbers((7, 0, sample, 0), item) for sample in range(count)]
    times = np.array([numbers.time for numbers in drawn])
    assert ((times > 0) & (times < 1)).all()
    # Undo shift · t / (1 + (shift - 1) · t) and the sigmoid: a normal distribution remains.
    even = times / (shift - (shift - 1) * times)
    normal = np.log(even / (1 - even))
    assert normal.mean() == pytest.approx(0.5, abs=5 * 2.0 / np.sqrt(count))
    assert normal.std() == pytest.approx(2.0, rel=5 / np.sqrt(2 * count))
    assert np.mean(normal < 0.5 - 2.0) == pytest.approx(0.1587, abs=5 * 0.366 / np.sqrt(count))
    share = np.mean([numbers.dropped for numbers in drawn])
    assert share == pytest.approx(0.1, abs=5 * 0.3 / np.sqrt(count))
    noise = np.concatenate([numbers.noise.numpy().ravel() for numbers in drawn])
    assert noise.dtype == np.float32
    assert noise.mean() == pytest.approx(0, abs=5 / np.sqrt(noise.size))
    assert noise.std() == pytest.approx(1, rel=5 / np.sqrt(2 * noise.size))
    dropped = np.array([numbers.dropped for numbers in drawn])
    assert abs(np.corrcoef(times, dropped)[0, 1]) < 5 / np.sqrt(count), "two separate draws"


def test_an_items_weight_makes_the_mean_of_all_items_of_the_global_batch(path: Path) -> None:
    planned = plan(path, f"{IMAGE}.loss_weight=0.7", *LAYOUTS["3 lanes"])
    num_items, num_tokens = sum(map(len, drawings.DRAWN)), planned.plan.num_loss_tokens
    assert planned.plan.num_outputs == {"image": num_items}
    assert num_tokens > num_items
    weights = [weight for _, weight, _, _ in planned.items().values()]
    assert weights == pytest.approx([0.7 * num_tokens / num_items] * num_items, rel=1e-12)
    # All modules divide their gradients once by the loss tokens.
    assert sum(weights) / num_tokens == pytest.approx(0.7)


def test_a_step_without_items_runs_no_forward_and_one_without_loss_tokens_divides_by_one(
    path: Path, tmp_path: Path
) -> None:
    drawings.write_samples(tmp_path, [[]] * 8)
    reading = plan(path, f"data.sources=[{{path: '{tmp_path}/train-*.tar'}}]", *LAYOUTS["3 lanes"])
    assert reading.plan.num_outputs == {"image": 0}
    assert [draws for lanes in reading.draws for draws in lanes] == [[]] * (3 * len(reading.draws))
    drawing = plan(path, num_loss_tokens=0)
    weights = [weight for _, weight, _, _ in drawing.items().values()]
    assert weights == pytest.approx([1 / len(weights)] * len(weights), rel=1e-12)
