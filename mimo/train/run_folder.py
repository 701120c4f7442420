"""The start of a run: its folder, and whether a checkpoint fits what the recipe says now."""

import itertools
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data.text.chat import ChatTokenizer
from mimo.checkpoint.assets import ASSETS
from mimo.checkpoint.folder import Progress, read_progress, resumable
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import Choice, FromScratch, Resume, Run
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import LANGUAGE, Recipe
from mimo.config.source import Location, dotted
from mimo.errors import RecipeError, shown
from mimo.families.hf_config import read_json
from mimo.families.registry import module_settings
from mimo.model.dataset import Dataset
from mimo.runtime.heartbeat import CRASH, HANG, RANKS
from mimo.runtime.run_files import LAUNCH, record
from mimo.train.schedule import learning_rates

_Difference = tuple[Location, Any, Any]
"""Where two recipes differ, the value of before and the one of now."""


# ------------------------------------------------------------------------- the folder


def make_run_dir(recipe: Recipe, resumes: bool) -> Path:
    """Make the run folder, with the resolved recipe in it, and return it.

    resumes: leave an existing folder where it is; else an older run of that name moves aside, and
    only the folder `launch` of a job that was started from there stays.
    """
    run_dir = recipe.run_dir
    if not resumes:
        _step_aside(run_dir, recipe.path)
    run_dir.mkdir(parents=True, exist_ok=True)
    # Files of ranks that failed in an earlier start must not be taken for news.
    shutil.rmtree(run_dir / RANKS, ignore_errors=True)
    (run_dir / CRASH).unlink(missing_ok=True)
    if (hang := run_dir / HANG).exists():
        moved_aside(hang)
    (run_dir / "recipe.yaml").write_text(recipe.to_yaml())
    return run_dir


def make_run_dirs(phased: PhasedRecipe, runs: Sequence[Run], resumes: bool) -> None:
    """Make the folders of all runs that a job has to do.

    resumes: whether the job was begun before. Then only the folders of runs that start over, or
    from another run's checkpoint, move aside, unless they have no checkpoint yet.
    """
    if phased.has_phases:
        if not resumes:
            _step_aside(phased.run_dir, phased.source.path)
        phased.run_dir.mkdir(parents=True, exist_ok=True)
        (phased.run_dir / "recipe.yaml").write_text(phased.to_yaml())
    for run in runs:
        has_nothing = resumes and not resumable(run.recipe.run_dir)
        make_run_dir(run.recipe, resumes=run.resumes or has_nothing)
    if resumes and isinstance(runs[0].start, FromScratch):
        print(f"no checkpoint in {phased.run_dir} yet: starting anew")
    elif resumes and not phased.has_phases:
        print(f"the run {runs[0].begins}")
    print(f"run folder: {phased.run_dir}", flush=True)


def print_save_intervals(runs: Sequence[Run]) -> None:
    """Print how often each run saves a checkpoint."""
    for run in runs:
        phase, train = f"{run.phase.title}: " if run.phase.name else "", run.recipe.train
        every = train.save_interval or train.steps
        often = f"every {every} steps" if every < train.steps else "after the last step only"
        print(f"{phase}saves a checkpoint {often}", flush=True)


def _step_aside(run_dir: Path, recipe: Path | None) -> None:
    """Move an older run away, but not what the present job has put there before it begins."""
    if not run_dir.exists() or os.listdir(run_dir) == [LAUNCH]:
        return
    aside = moved_aside(run_dir)
    print(f"the previous run moved to {aside}")
    launch = (run_dir / LAUNCH).resolve()
    if recipe is not None and recipe.resolve().is_relative_to(launch):
        run_dir.mkdir()
        (aside / LAUNCH).rename(launch)


def moved_aside(folder: Path) -> Path:
    """Rename a folder to the first free name with a number; return the new path."""
    numbered = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    return folder.rename(next(aside for aside in numbered if not aside.exists()))


# ------------------------------------------------------------- the checkpoint to continue


def continue_order(dataset: Dataset, progress: Progress) -> tuple[Dataset, Progress, list[str]]:
    """Return the data in the order in which a run continues, its progress, and lines about both.

    Samples that were passed over are dropped if their source is gone or changed its size.
    """
    used, notes = progress.used, list[str]()
    if used.end == 0:
        return dataset, replace(progress, mixtures=dataset.order.mixtures), notes
    earlier = progress.mixtures or dataset.order.mixtures
    order = dataset.order.after(earlier, used.end)
    if order.mixtures[-1].first == used.end:
        epochs = ", ".join(f"{epoch:.3f}" for epoch in order.epochs(used.end))
        notes.append(f"another mixture of sources begins; their epochs so far: {epochs}")
    passed_over = np.array(used.passed_over, np.int64)
    left = tuple(passed_over[order.at(passed_over)[0] >= 0].tolist())
    if gone := len(passed_over) - len(left):
        notes.append(
            f"{gone} samples that were passed over are left out: their sources are gone, or have "
            "another number of samples"
        )
    numbers = dict(enumerate(order.numbers_of(earlier[-1]).tolist()))
    renumbered = ((numbers.get(source, -1), sample) for source, sample in progress.skipped)
    progress = replace(
        progress,
        samples=used.samples + gone,
        passed_over=left,
        mixtures=order.mixtures,
        skipped=frozenset(pair for pair in renumbered if pair[0] >= 0),
    )
    return replace(dataset, order=order), progress, notes


def report_choice(choice: Choice, run_dir: Path) -> None:
    """Print and record what is wrong with checkpoints that were passed over."""
    for path, problems in choice.damaged.items():
        text = (
            f"checkpoint {path} is damaged and was passed over: {'; '.join(problems)}; the run "
            f"goes on from {choice.checkpoint}"
        )
        print(text, flush=True)
        record(run_dir, "checkpoint", text, checkpoint=str(path), problems=[*problems])


def check_start(run: Run) -> list[str]:
    """Refuse a start that does not fit the recipe; return a line for each change on resuming.

    Raises RecipeError for initial weights, model or tokenizer that do not fit, and lost adapters.
    """
    if isinstance(run.start, FromScratch):
        initial_weights(run.recipe)
        return []
    recipe, checkpoint = run.recipe, run.start.checkpoint
    before = load_recipe(checkpoint / "recipe.yaml")
    differences = list(_differences(_plain(before), _plain(recipe)))
    problems = [
        recipe.problem(
            where,
            f"got {shown(now)}, but {checkpoint} was trained with {shown(then)}, and {reason}; set "
            "it back, or start another run: another name, without --resume",
        )
        for where, then, now, reason in _refused(recipe, checkpoint, differences)
    ]
    problems += _tokenizer_problems(before, recipe, checkpoint)
    if problems:
        raise RecipeError(*problems)
    if not isinstance(run.start, Resume):
        return []
    step = read_progress(checkpoint).step
    rates, rates_now = learning_rates(before, step), learning_rates(recipe, step)
    lines = [
        f"  {dotted(where)}: {shown(then)} before, {shown(now)} now"
        for where, then, now in differences
        if where[0] not in ("name", "cluster") and where != ("train", "run_dir")
    ] + [
        f"  learning rate of {module} at step {step}: {rates[module]:.4g} before, {rate:.4g} now"
        for module, rate in rates_now.items()
        if not math.isclose(rates.get(module, rate), rate)
    ]
    return [f"changed since {checkpoint}:", *lines] if lines else []


def is_at_end(run: Run) -> bool:
    """Return whether no step of a run is left, and print it then."""
    if not isinstance(run.start, Resume):
        return False
    done, steps = read_progress(run.start.checkpoint).step, run.recipe.train.steps
    if done >= steps:
        phase = f"{run.phase.title}: " if run.phase.name else ""
        print(f"{phase}already at step {done} of {steps}; raise train.steps to go on", flush=True)
    return done >= steps


def _plain(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain data, with the defaults of its families."""
    data = recipe.model_dump(mode="json")
    parts = {LANGUAGE: data[LANGUAGE], **data["encoders"], **data["generators"]}
    for name, part in parts.items():
        part["model"] = module_settings(recipe, name).model_dump(mode="json")
    return data


def _differences(before: Any, now: Any, where: Location = ()) -> Iterator[_Difference]:
    """Yield where recipes differ, with both values: keys of mappings, and of mappings in lists."""
    lists = isinstance(before, list) and isinstance(now, list)
    if lists and any(isinstance(entry, dict) for entry in before + now):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            yield from _differences(before.get(key), now.get(key), (*where, key))
    elif before != now:
        yield where, before, now


def _refused(
    recipe: Recipe, checkpoint: Path, differences: Sequence[_Difference]
) -> Iterator[tuple[Location, Any, Any, str]]:
    """Yield the differences that a resumed run must not have, and why.

    A difference that follows from another one is left out.
    """
    changed = {where: (then, now) for where, then, now in differences}
    folders = changed.get(("init_from",), (None, None))
    if not _is_same_folder(*folders, checkpoint):
        yield ("init_from",), *folders, "a resumed run reads no weights of a folder"
        return
    for where, then, now in differences:
        if where[0] not in (LANGUAGE, "encoders", "generators"):
            continue
        depth = 1 if where[0] == LANGUAGE else 2
        module, path = str(where[depth - 1]), where[depth:]
        if path[:1] == ("model",) and (*where[:depth], "family") in changed:
            continue
        if (reason := _reason(recipe, module, path, then, now)) is not None:
            yield where, then, now, reason


def _reason(recipe: Recipe, module: str, path: Location, then: Any, now: Any) -> str | None:
    """Return why a run must not resume with a module's key at ``path`` changed; None if it may."""
    match path:
        case () | ("family",):
            return "a resumed run keeps its model"
        case ("model", key, *_):
            if key not in module_settings(recipe, module).changeable_keys:
                return "a resumed run keeps its model"
        case ("condition" | "queries" | "skipped_tokens" | "media",) if module != LANGUAGE:
            return "a resumed run keeps what its generator is conditioned on"
        case ("lora",) if then is not None:
            return "its trained adapters would be lost"
        case ("lora", "rank"):
            return "its adapters have that rank"
        case ("lora", "targets") if {*(then or ())} - {*now}:
            return "its trained adapters would be lost"
    return None


def _is_same_folder(before: str | None, now: str | None, checkpoint: Path) -> bool:
    """Return whether ``init_from`` names no folder now, or the one of before, perhaps moved."""
    if before is None or now is None:
        return now is None
    if Path(before).is_dir():
        return Path(now).is_dir() and Path(before).samefile(now)
    ours, carried = Path(now) / "config.json", checkpoint / ASSETS / "config.json"
    return ours.is_file() and carried.is_file() and read_json(ours) == read_json(carried)


def _tokenizer_problems(before: Recipe, recipe: Recipe, checkpoint: Path) -> Iterator[str]:
    """Yield how the recipe's tokenizer folder differs from the one that the checkpoint carries."""
    folder = checkpoint / ASSETS
    if not (folder / "tokenizer.json").is_file():
        folder = Path(before.data.tokenizer)
    now = Path(recipe.data.tokenizer)
    if not folder.is_dir() or not now.is_dir() or folder.samefile(now):
        return
    if changed := ChatTokenizer(now, {}).differences(ChatTokenizer(folder, {})):
        message = (
            f"the {' and '.join(changed)} in {now} changed since {checkpoint}, which was trained "
            f"with that in {folder}; copy it back from there, or start another run: another name, "
            "without --resume"
        )
        yield recipe.problem(("data", "tokenizer"), message)
