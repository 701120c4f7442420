"""How a run goes on: from which checkpoint, and with the sources that its recipe names now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data.text.chat import ChatTokenizer
from mimo.checkpoint.assets import ASSETS
from mimo.checkpoint.folder import Progress, read_progress
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import Choice, FromScratch, Resume, Run, listed_files
from mimo.config.schema import LANGUAGE, Recipe
from mimo.config.source import Location, dotted
from mimo.errors import RecipeError, shown
from mimo.families.hf_config import read_json
from mimo.families.registry import encoder_settings, language_settings
from mimo.model.dataset import Dataset
from mimo.train.incidents import record
from mimo.train.schedule import learning_rates

_Difference = tuple[Location, Any, Any]
"""Where two recipes differ, the value of before and the one of now."""


def continue_order(dataset: Dataset, progress: Progress) -> tuple[Dataset, Progress, list[str]]:
    """The data in the order in which a run goes on, where it then stands, and lines about it.

    What was passed over of sources that are gone, or have another number of samples now, is not
    used any more.
    """
    now, used, said = dataset.order, progress.used, list[str]()
    if used.end == 0:
        return dataset, replace(progress, mixtures=now.mixtures), said
    earlier = progress.mixtures or now.mixtures
    order = now.after(earlier, used.end)
    if order.mixtures[-1].first == used.end:
        epochs = ", ".join(f"{epoch:.3f}" for epoch in order.epochs(used.end))
        said.append(f"another mixture of sources begins; their epochs so far: {epochs}")
    passed_over = np.array(used.passed_over, np.int64)
    left = tuple(passed_over[order.at(passed_over)[0] >= 0].tolist())
    if gone := len(passed_over) - len(left):
        said.append(
            f"{gone} samples that were passed over are left out: their sources are gone, or have "
            "another number of samples"
        )
    number = dict(enumerate(order.numbers_of(earlier[-1]).tolist()))
    return (
        replace(dataset, order=order),
        replace(
            progress,
            samples=used.samples + gone,
            passed_over=left,
            mixtures=order.mixtures,
            skipped=frozenset(
                (number[source], sample)
                for source, sample in progress.skipped
                if number.get(source, -1) >= 0
            ),
        ),
        said,
    )


def tell_choice(choice: Choice, run_dir: Path) -> None:
    """Say what is wrong with checkpoints that were passed over, also to the run's incidents."""
    for path, problems in choice.damaged.items():
        text = (
            f"checkpoint {path} is damaged and was passed over: {'; '.join(problems)}; the run "
            f"goes on from {choice.checkpoint}"
        )
        print(text, flush=True)
        record(run_dir, "checkpoint", text, checkpoint=str(path), problems=[*problems])
    if choice.checkpoint is not None and listed_files(choice.checkpoint) is None:
        print(f"{choice.checkpoint} has no checksums: nothing could be verified", flush=True)


def check_start(run: Run) -> list[str]:
    """Refuse a start that does not fit the recipe; return a line for each change on resuming.

    Writes nothing. Raises RecipeError with all problems: a folder of initial weights that does not
    fit; another model or tokenizer than the checkpoint's; adapters that would be lost.
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
        f"{dotted(where)}: {shown(then)} before, {shown(now)} now"
        for where, then, now in differences
        if where[0] not in ("name", "cluster") and where != ("train", "run_dir")
    ] + [
        f"learning rate of {module} at step {step}: {rates[module]:.4g} before, {rate:.4g} now"
        for module, rate in rates_now.items()
        if not math.isclose(rates.get(module, rate), rate)
    ]
    return [f"changed since {checkpoint}:", *(f"  {line}" for line in lines)] if lines else []


def is_at_end(run: Run) -> bool:
    """Whether no step of a run is left, which is then printed."""
    if not isinstance(run.start, Resume):
        return False
    done, steps = read_progress(run.start.checkpoint).step, run.recipe.train.steps
    if done >= steps:
        phase = f"{run.phase.title}: " if run.phase.name else ""
        print(f"{phase}already at step {done} of {steps}; raise train.steps to go on", flush=True)
    return done >= steps


def _plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, with the defaults of its families."""
    data = recipe.model_dump(mode="json")
    data[LANGUAGE]["model"] = language_settings(recipe).model_dump(mode="json")
    for name, encoder in data["encoders"].items():
        encoder["model"] = encoder_settings(recipe, name).model_dump(mode="json")
    return data


def _differences(before: Any, now: Any, where: Location = ()) -> Iterator[_Difference]:
    """Where recipes differ, with both values: keys of mappings, and of mappings in lists."""
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
    """The differences with which a run may not go on, and why; none that follows from another."""
    changed = {where: (then, now) for where, then, now in differences}
    folders = changed.get(("init_from",), (None, None))
    if not _is_same_folder(*folders, checkpoint):
        yield ("init_from",), *folders, "a resumed run reads no weights of a folder"
        return
    for where, then, now in differences:
        if where[0] not in (LANGUAGE, "encoders"):
            continue
        depth = 1 if where[0] == LANGUAGE else 2
        module, path = str(where[depth - 1]), where[depth:]
        if path[:1] == ("model",) and (*where[:depth], "family") in changed:
            continue
        if (reason := _reason(recipe, module, path, then, now)) is not None:
            yield where, then, now, reason


def _reason(recipe: Recipe, module: str, path: Location, then: Any, now: Any) -> str | None:
    """Why a run may not go on with this change of a module's key at ``path``; None if it may."""
    match path:
        case () | ("family",):
            return "a resumed run keeps its model"
        case ("model", key, *_):
            if module == LANGUAGE:
                settings = language_settings(recipe)
            else:
                settings = encoder_settings(recipe, module)
            if key not in settings.changeable_keys:
                return "a resumed run keeps its model"
        case ("lora",) if then is not None:
            return "what its adapters have learned would be lost"
        case ("lora", "rank"):
            return "its adapters have that rank"
        case ("lora", "targets") if {*(then or ())} - {*now}:
            return "what its adapters have learned would be lost"
    return None


def _is_same_folder(before: str | None, now: str | None, checkpoint: Path) -> bool:
    """Whether ``init_from`` names no folder now, or the one of before, perhaps moved."""
    if before is None or now is None:
        return now is None
    if Path(before).is_dir():
        return Path(now).is_dir() and Path(before).samefile(now)
    ours, carried = Path(now) / "config.json", checkpoint / ASSETS / "config.json"
    return ours.is_file() and carried.is_file() and read_json(ours) == read_json(carried)


def _tokenizer_problems(before: Recipe, recipe: Recipe, checkpoint: Path) -> Iterator[str]:
    """What differs between the recipe's tokenizer folder and what the checkpoint carries of it."""
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
