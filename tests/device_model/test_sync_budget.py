"""Runs put every tensor in the right place and hardly wait for the device.

Whole runs of tiny models on ranks with a simulated device, see `shadow`: start, steps, validation,
checkpoint, and the same from a checkpoint. An event is named with its line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import FromScratch, FromWeights, Resume, Start
from mimo.config.schema import Recipe
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.train.run_folder import make_run_dir
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_family_parity import GEMMA
from tests.mimo.model.test_levels_parity import DISJOINT, LAYERS
from tests.mimo.runs import ADAM

if TYPE_CHECKING:  # Megatron takes long to import, and only ranks need it
    from tests.device_model.events import Event

    Events = Counter[Event]

WAITS_PER_STEP = 1
"""The host waits once for the device: for norm, loss and all other sums."""

NO_STEP = ("setup", "validation", "checkpoint")
"""Activities that may wait: they happen once, or rarely."""

QWEN = [*DISJOINT, LAYERS]
COLOCATED = ["encoders.vision.placement=colocated"]
# Four microbatches: more than a step may wait.
MICROBATCHES = ["train.micro_batch_size=3"]
COMMON = [*MICROBATCHES, *ADAM, "train.steps=2", "bridge.check=never"]

LAYOUTS: dict[str, list[str]] = {
    "tp2 with sp": [
        *QWEN,
        "language.grid={tp: 2, sp: true}",
        "encoders.vision.grid={tp: 2, sp: true, dp: 1}",
    ],
    "tp2 without sp": [*QWEN, "language.grid.tp=2"],
    "cp2": [*QWEN, "language.grid.cp=2"],
    "pp2, encoder pp2": [*QWEN, "language.grid.pp=2", "encoders.vision.grid.pp=2"],
    "interleaved pp2 vpp2": [*QWEN, "language.grid={pp: 2, vpp: 2}"],
    "replicated": [*QWEN, "language.grid={tp: 2, sp: true}", "bridge.delivery=replicated"],
    "colocated tp2 with sp": [
        *COLOCATED,
        "encoders.vision.grid={tp: 2, sp: true}",
        "language.grid={tp: 2, sp: true}",
        LAYERS,
    ],
    "colocated in groups": [
        *COLOCATED,
        "encoders.vision.grid={tp: 1}",
        "encoders.vision.encode_group=1",
        LAYERS,
    ],
    "gemma, cp2, recomputed": [*GEMMA, "language.grid.cp=2", "language.recompute=full"],
    "gemma, recomputed in part": [
        *GEMMA,
        "language.recompute=selective",
        "encoders.vision.recompute=full",
    ],
    "3 lanes to 2, unpacked, cp2": [
        "encoders.vision.grid.dp=3",
        "language.grid={dp: 2, cp: 2}",
        "data.packing=false",
        "train.global_batch_size=16",
        "train.micro_batch_size=2",
    ],
    "two encoders, windows": [
        tiny.SECOND_ENCODER,
        "data.sources=[{path: 'DIRECTORY/both-*.tar'}]",
        "encoders.vision.model.window_size=28",
        "encoders.vision.freeze=true",
    ],
    "bf16 with a distributed optimizer": [
        "language.grid.dp=2",
        "encoders.vision.grid.dp=2",
        "train.global_batch_size=16",
        "train.micro_batch_size=2",
        "train.precision=bf16",
        "train.distributed_optimizer=true",
        "train.overlap_grad_reduce=true",
    ],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("budget")
    tiny.write_samples(directory)
    tiny.write_samples(directory, name="both", videos_per_sample=tiny.VIDEOS_PER_SAMPLE)
    return tiny.write_recipe(directory)


@pytest.mark.parametrize("layout", quick(LAYOUTS, "gemma, cp2, recomputed"))
def test_steps_stay_within_the_budget(run_ranks: RunRanks, recipe: Path, layout: str) -> None:
    overrides = [key.replace("DIRECTORY", str(recipe.parent)) for key in LAYOUTS[layout]]
    check(watch(run_ranks, load_recipe(recipe, [*COMMON, *overrides])))


def test_validation_and_checkpoints_put_every_tensor_where_it_belongs(
    run_ranks: RunRanks, recipe: Path
) -> None:
    """Three runs in one world, as the phases of a job: from scratch, resumed, from weights."""
    settings = [
        *MICROBATCHES,
        *ADAM,
        f"data.validation=[{{path: '{recipe.parent}/train-*.tar'}}]",
        "train.validate_every=1",
        "train.validation_batches=1",
        "bridge.check=always",
    ]
    whole = load_recipe(recipe, [*settings, "train.steps=1", "name=first"])
    saved = make_run_dir(whole, resumes=False) / "checkpoints" / "step_1"
    longer = load_recipe(recipe, [*settings, "train.steps=2", "name=resumed"])
    anew = load_recipe(recipe, [*settings, "train.steps=1", "name=anew"])
    starts = [(whole, FromScratch()), (longer, Resume(saved)), (anew, FromWeights(saved))]
    by_run = watch_runs(run_ranks, starts)
    check(by_run, waits_per_step=WAITS_PER_STEP + 1)  # for the plans that are compared
    activities = {event.activity for events in by_run for event in events}
    assert activities >= {*NO_STEP, "norm and loss"}, "all activities were watched"


@pytest.mark.slow
def test_waits_do_not_become_more_with_microbatches_and_layers(
    run_ranks: RunRanks, recipe: Path
) -> None:
    sizes = [*COMMON, *DISJOINT]
    small = [*sizes, "language.model.num_layers=3", "train.micro_batch_size=6"]
    large = [*sizes, "language.model.num_layers=6", "train.micro_batch_size=2"]
    few, many = (watch(run_ranks, load_recipe(recipe, size)) for size in (small, large))
    for before, after in zip(few, many, strict=True):
        assert waits(after) == waits(before), "\n".join(map(str, waits(after)))
        assert blocking(after).keys() <= blocking(before).keys(), "other copies, too"


def check(by_run: Sequence[Events], waits_per_step: int = WAITS_PER_STEP) -> None:
    """Fail, naming lines, for events of any rank that a run must not have."""
    for events in by_run:
        wrong = [str(event) for event in events if _is_wrong(event)]
        assert not wrong, "\n".join(wrong)
        per_step: Counter[int] = Counter()
        for event, count in waits(events).items():
            per_step[event.step] += count
        assert per_step, "steps read their loss"
        assert max(per_step.values()) <= waits_per_step, "\n".join(
            f"{count} x {event}" for event, count in waits(events).items()
        )


def _is_wrong(event: Event) -> bool:
    in_step = event.activity not in NO_STEP
    match event.kind:
        case "error":
            return True
        case "object collective":
            return event.activity != "setup"
        case "blocking copy":
            return in_step and not event.site.startswith("bridge/flat.py")
        case "wait":
            return False  # see WAITS_PER_STEP


def waits(events: Events) -> Events:
    """The waits in steps."""
    in_steps = {e: n for e, n in events.items() if e.activity not in NO_STEP}
    return Counter({event: n for event, n in in_steps.items() if event.kind == "wait"})


def blocking(events: Events) -> Counter[str]:
    """Copies in steps that block the host, by what and where."""
    copies: Counter[str] = Counter()
    for event, count in events.items():
        if event.kind == "blocking copy" and event.activity not in NO_STEP:
            copies[f"{event.what} at {event.site}"] += count
    return copies


def watch(run_ranks: RunRanks, recipe: Recipe) -> list[Events]:
    """The events of a run from scratch, by rank."""
    make_run_dir(recipe, resumes=False)
    return watch_runs(run_ranks, [(recipe, FromScratch())])


def watch_runs(run_ranks: RunRanks, starts: Sequence[tuple[Recipe, Start]]) -> list[Events]:
    """The same for several runs after one another in one world, run after run."""
    runs = []
    for recipe, start in starts:
        run_dir = Path(recipe.train.run_dir) / recipe.name
        run_dir.mkdir(parents=True, exist_ok=True)
        runs.append((recipe, check_recipe(recipe, None), run_dir, start))
    by_rank = run_ranks(run_watched, runs[0][1].world_size, runs)
    by_run = [events for run in zip(*by_rank, strict=True) for events in run]
    total: Counter[str] = sum(map(blocking, by_run), Counter())
    print(*(f"{count:5d} blocking: {what}" for what, count in total.most_common()), sep="\n")
    return by_run


# ------------------------------------------------------- functions that run inside ranks


def run_watched(rank: int, runs: Sequence[tuple[Recipe, Layout, Path, Start]]) -> list[Events]:
    """One rank: train, and what the device would have noticed of each run."""
    from mimo.runtime.hang_monitor import HangMonitor
    from mimo.train import rank as train_rank
    from tests.device_model.shadow import pose_as_device

    record = pose_as_device()

    class WatchedMonitor(HangMonitor):
        """Tells the record what the rank does."""

        def at(self, step: int, activity: str) -> None:
            super().at(step, activity)
            record.step, record.activity = step, activity

    patched: Any = train_rank
    patched.HangMonitor = WatchedMonitor
    by_run = []
    for recipe, layout, run_dir, start in runs:
        record.step, record.activity, record.events = -1, "setup", Counter()
        train_rank.train_in_world(recipe, layout, run_dir, start)
        by_run.append(record.events)
    return by_run
