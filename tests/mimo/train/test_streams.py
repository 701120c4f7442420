"""The stream of samples that a run trains on, with the training loop and a model that does nothing.

It is the same for any ranks, lanes and readers. However a run stops and goes on, with other lanes,
batches, budgets or sources, no sample is repeated and none is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.checkpoint.folder import Progress, read_progress, write_progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.model import decoding
from mimo.model.dataset import Dataset
from mimo.parallel.build import build_layout
from mimo.parallel.connections import Host
from mimo.train import batches, loop
from mimo.train.batches import Batches, RankBatch
from mimo.train.loop import Trainer
from mimo.train.run_folder import continue_order
from mimo.train.step import StepObserver
from tests.mimo import tiny

# How batches are read ahead of use.
READING = [["data.prefetch_mib=0"], ["data.prefetch_mib=64"], ["data.workers=2"]]
LANGUAGE = ["{dp: 1}", "{dp: 2, pp: 2}", "{dp: 4}", "{dp: 2, tp: 2, sp: true}", "{dp: 1, cp: 2}"]
TOWERS = [["grid={dp: 1}"], ["grid={dp: 3}"], ["grid={tp: 1}", "placement=colocated"]]
BY_TOKENS = ["data.tokens_per_microbatch=128", "data.packing_window=9"]
Key = tuple[str, str]  # path of the source, and the sample's own


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("streams")
    tiny.write_samples(directory)
    tiny.write_samples(directory, (1, 0, 2, 0, 1), name="other")
    tiny.write_samples(directory, (0, 3, 0, 1, 1, 0, 2), name="third")
    return tiny.write_recipe(directory)


def recipe_of(path: Path, weights: dict[str, float], *overrides: str) -> Recipe:
    paths = {name: path.parent / f"{name}-*.tar" for name in weights}
    sources = ", ".join(f'{{path: "{paths[n]}", weight: {w}}}' for n, w in weights.items())
    return load_recipe(path, [f"data.sources=[{sources}]", "data.shuffle_block=null", *overrides])


def keys_at(dataset: Dataset, recipe: Recipe, positions: np.ndarray) -> list[Key]:
    return keys_of(dataset, recipe, *dataset.order.at(positions))


def keys_of(dataset: Dataset, recipe: Recipe, source: np.ndarray, sample: np.ndarray) -> list[Key]:
    pairs = zip(source.tolist(), sample.tolist(), strict=True)
    return [(recipe.data.sources[s].path, dataset.indexes[s].key(n)) for s, n in pairs]


@contextmanager
def without_a_model(rank: int) -> Iterator[None]:
    """Train steps that use up a batch, and yield its plan, on a host of this rank alone."""

    def stage(plan: Any, lanes: Any, items: Any, draws: Any, staging: Any) -> Any:
        return SimpleNamespace(language=lanes, items=items)

    model = SimpleNamespace(encode_group=None, modules={}, stage=stage)

    def step(*, batches: Batches, **others: Any) -> Any:
        batch = batches.next()
        batches.read_ahead()
        batches.sum_over_world(())
        return SimpleNamespace(metrics={"batch": batch}, is_skipped=False)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "build_model", lambda *unused: model)
        patched.setattr(loop, "train_step", step)
        for name in ("begin", "publish", "wait"):
            patched.setattr(loop.Saver, name, lambda *unused: None)
        patched.setattr(decoding, "find_host", lambda: Host((rank,), "streams", 2**40, 1))
        patched.setattr(batches, "sum_over_world", lambda terms: terms)
        yield


def train(
    recipe: Recipe, rank: int, dataset: Dataset, progress: Progress, steps: int
) -> tuple[list[RankBatch], Progress]:
    """What this rank trains on in so many steps from ``progress`` on, and where it then stands.

    The recipe has more of them, so later ones have been read when it stops.
    """
    layout = build_layout(recipe)
    topology: Any = SimpleNamespace(layout=layout, rank=rank, bridges=[], reports=False)
    with without_a_model(rank):
        trainer = Trainer(recipe, topology, recipe.run_dir)
        trainer.progress = progress
        with closing(trainer.train(dataset, None, StepObserver())) as running:
            used = [metrics["batch"] for metrics in islice(running, steps)]
    return used, trainer.progress


def packs_of(batch: RankBatch, dataset: Dataset, recipe: Recipe) -> list[list[Key]]:
    """The samples of a step, by microbatch and lane."""
    packs = []
    for planned in batch.plan.microbatches:
        samples = planned.samples
        for lane in range(len(samples.lane_tokens)):
            numbers = samples.samples_of_lane(lane)
            packs.append(keys_of(dataset, recipe, samples.source[numbers], samples.sample[numbers]))
    return packs


def check_contents(batch: RankBatch, dataset: Dataset, recipe: Recipe, rank: int) -> None:
    """What a rank has of a batch is what the plan says, read from the shards once more."""
    layout, readers = build_layout(recipe), dataset.readers
    for m, planned in enumerate(batch.plan.microbatches):
        samples = planned.samples
        if rank in layout.language.ranks:
            lane: Any = batch.inputs.language[m]
            for n in samples.samples_of_lane(layout.language.coords(rank).dp).tolist():
                start, reader = samples.start[n], readers[samples.source[n]]
                text = reader.sample(int(samples.sample[n])).input_ids
                np.testing.assert_array_equal(lane.input_ids[start : start + len(text)], text)
        if rank in layout.encoders["vision"].ranks:
            items: Any = batch.inputs.items["vision"][m]
            of_lane = planned.items["vision"].of_lane(layout.encoders["vision"].coords(rank).dp)
            owners = samples.source[samples.item_sample[of_lane]].tolist()
            numbers = samples.item[of_lane].tolist()
            assert len(items.patches) == 1 + len(of_lane)
            for (_, got), source, item in zip(items.patches[1:], owners, numbers, strict=True):
                assert got.equal(torch.from_numpy(readers[source].patches(item)))


# ------------------------------------------------------------------------------ one run


@pytest.mark.slow
@settings(max_examples=12)
@given(
    language=st.sampled_from(LANGUAGE),
    tower=st.sampled_from(TOWERS),
    reading=st.sampled_from(READING),
    micro_batch=st.sampled_from([1, 2]),
    stop=st.integers(1, 3),
    by_tokens=st.booleans(),
)
def test_every_rank_trains_on_the_same_stream_in_every_layout_however_it_is_read(
    path: Path,
    language: str,
    tower: list[str],
    reading: list[str],
    micro_batch: int,
    stop: int,
    by_tokens: bool,
) -> None:
    weights = {"train": 2.0, "other": 1.0}
    settings = [f"train.steps={stop + 3}", "train.global_batch_size=8"]
    batch_size = [*BY_TOKENS, "train.micro_batch_size=1"]
    batch_size = batch_size if by_tokens else [f"train.micro_batch_size={micro_batch}"]
    layout = [f"language.grid={language}", *(f"encoders.vision.{key}" for key in tower)]
    recipe = recipe_of(path, weights, *settings, *batch_size, *layout, *reading)
    dataset = tiny.open_sources(recipe)
    # One lane, and no order but that of the positions.
    alone = recipe_of(path, weights, *settings, *batch_size)
    expected, done = train(alone, 1, dataset, Progress(0, 0), stop)
    if not by_tokens:
        stream = keys_at(dataset, recipe, np.arange(8 * stop))
        assert [key for b in expected for p in packs_of(b, dataset, alone) for key in p] == stream
        assert done == Progress(stop, 8 * stop)
    for rank in range(build_layout(recipe).world_size):
        used, progress = train(recipe, rank, dataset, Progress(0, 0), stop)
        assert progress == done
        assert len(used) == stop
        for step, (batch, other) in enumerate(zip(used, expected, strict=True)):
            packs, others = (packs_of(one, dataset, recipe) for one in (batch, other))
            if by_tokens:  # whole sequences may change places within a step
                assert Counter(map(tuple, packs)) == Counter(map(tuple, others)), step
            else:
                assert [*chain(*packs)] == [*chain(*others)], step
            check_contents(batch, dataset, recipe, rank)


# ------------------------------------------------------------------------- runs that go on


@dataclass(frozen=True)
class Leg:
    """A run until it stops. sources: by name, with their weights."""

    language: str
    batch: list[str]
    steps: int
    sources: dict[str, float]


BATCHES = [
    ["train.global_batch_size=4"],
    ["train.global_batch_size=12"],
    [*BY_TOKENS, "train.global_batch_size=4"],
    [*BY_TOKENS, "data.packing_window=4", "train.global_batch_size=8"],
    ["data.tokens_per_microbatch=200", "data.packing_window=30", "train.global_batch_size=4"],
]
FIXED = {"train": 2.0, "other": 1.0}
ANY_SOURCES = st.lists(
    st.sampled_from(["train", "other", "third"]), min_size=1, unique=True
).flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(names, st.sampled_from([0.3, 1.0]))))


def legs(sources: st.SearchStrategy[dict[str, float]]) -> st.SearchStrategy[list[Leg]]:
    leg = st.builds(
        Leg, st.sampled_from(LANGUAGE), st.sampled_from(BATCHES), st.integers(1, 3), sources
    )
    return st.lists(leg, min_size=2, max_size=4)


def run_legs(path: Path, folder: Path, runs: list[Leg]) -> list[Key]:
    """Each leg is resumed from what the one before has written; the samples at all positions.

    Every sample is used at one position, or waits, or is left out and counted in a line.
    """
    progress, seen, known, gone = Progress(0, 0), list[Key](), list[Key](), list[Key]()
    for leg in runs:
        settings = [f"language.grid={leg.language}", *leg.batch, "train.micro_batch_size=1"]
        settings.append(f"train.steps={progress.step + leg.steps + 3}")
        recipe = recipe_of(path, leg.sources, *settings)
        before = progress.used
        dataset, progress, lines = continue_order(tiny.open_sources(recipe), progress)
        dropped = sorted({*before.passed_over} - {*progress.passed_over})
        gone += [known[position] for position in dropped]
        assert any(line.startswith(f"{len(dropped)} samples") for line in lines) or not dropped
        assert progress.used.end == before.end
        rank = build_layout(recipe).language.ranks[0]
        used, progress = train(recipe, rank, dataset, progress, leg.steps)
        known += keys_at(dataset, recipe, np.arange(len(known), progress.used.end))
        seen += [key for batch in used for pack in packs_of(batch, dataset, recipe) for key in pack]
        write_progress(folder, progress)
        assert read_progress(folder) == progress
        progress = read_progress(folder)
        waiting = [known[position] for position in progress.passed_over]
        assert waiting == keys_at(dataset, recipe, np.array(progress.passed_over, np.int64))
        assert Counter(seen) + Counter(waiting) + Counter(gone) == Counter(known)
        assert progress.samples == len(seen) + len(gone)
    return known


@pytest.mark.parametrize(
    "sources",
    [st.just(FIXED), pytest.param(ANY_SOURCES, marks=pytest.mark.slow)],
    ids=["same sources", "other sources"],
)
@settings(max_examples=8)
@given(data=st.data())
def test_a_run_that_goes_on_with_other_lanes_batches_budgets_or_sources_loses_no_sample(
    path: Path, tmp_path_factory: pytest.TempPathFactory, sources: Any, data: st.DataObject
) -> None:
    known = run_legs(path, tmp_path_factory.getbasetemp(), data.draw(legs(sources)))
    if sources is not ANY_SOURCES:  # no leg changes the order
        recipe = recipe_of(path, FIXED)
        assert known == keys_at(tiny.open_sources(recipe), recipe, np.arange(len(known)))


def test_what_was_passed_over_of_a_source_that_is_gone_is_left_out_and_counted(path: Path) -> None:
    both, one = {"train": 1.0, "other": 1.0}, {"other": 1.0}
    recipe = recipe_of(path, both)
    dataset = tiny.open_sources(recipe)
    source, sample = dataset.order.at(np.arange(20))
    passed_over = (2, 3, 5, 6, 7, 11)
    gone = [position for position in passed_over if source[position] == 0]
    assert 0 < len(gone) < len(passed_over), "the test needs samples of both sources"
    skipped = frozenset({(0, 4), (1, 3)})
    before = Progress(4, 14, 3, skipped, passed_over, dataset.order.mixtures)
    dataset, after, lines = continue_order(tiny.open_sources(recipe_of(path, one)), before)
    assert after.passed_over == tuple(p for p in passed_over if source[p] == 1)
    assert after.used.end == before.used.end
    assert any(line.startswith(f"{len(gone)} samples that were passed over") for line in lines)
    # Skipped samples are known by the numbers that sources have now; the count stays.
    assert (after.skipped, after.skipped_samples) == (frozenset({(0, 3)}), 3)
    left = dataset.order.at(np.array(after.passed_over))
    assert (left[0] == 0).all()
    assert left[1].tolist() == [sample[p] for p in after.passed_over]
    # The same without a change.
    same, unchanged, lines = continue_order(tiny.open_sources(recipe), before)
    assert (unchanged, lines) == (before, [])
    assert same.order.mixtures == dataset.order.mixtures[:1]


def test_a_checkpoint_without_a_history_goes_on_in_the_order_of_now(path: Path) -> None:
    dataset = tiny.open_sources(recipe_of(path, {"train": 1.0}))
    dataset, progress, lines = continue_order(dataset, Progress(2, 9, passed_over=(4,)))
    assert (progress.mixtures, lines) == (dataset.order.mixtures, [])
    assert [mixture.first for mixture in progress.mixtures] == [0]
