"""Stages: one job that trains the same model several times over, each time in its own way.

A recipe may have a list `stages`; each entry has a name and any keys of a recipe, laid over the
keys outside of the list. So each stage has its own freezing, learning rates, data and layout, and
begins with the weights that the one before has left. A recipe without the list is one stage.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from mimo.bounds import STAGE_NAME
from mimo.checkpoint.folder import stage_folder
from mimo.errors import RecipeError, shown
from mimo.recipe.phase_source import (
    StageSource,
    fixed_problems,
    in_stage,
    lay_over,
    override_problems,
)
from mimo.recipe.schema import STAGES, Fill, LoRA, Recipe, fill_nothing, parse_recipe
from mimo.recipe.source import Location, YamlSource, read_yaml

_NAME = re.compile(STAGE_NAME)
_MAX_STAGES = 100


@dataclass(frozen=True)
class Stage:
    """One training run of a job.

    recipe: whole, and without stages; its run folder is the stage's. name: empty for the only one
    of a recipe without stages. title: for people, such as `stage 1 of 2, projector`.
    """

    recipe: Recipe
    name: str = ""
    title: str = ""


@dataclass(frozen=True)
class StagedRecipe:
    """All stages of a job, in order. run_dir: the folder of the job."""

    run_dir: Path
    stages: tuple[Stage, ...]
    source: YamlSource

    @property
    def has_stages(self) -> bool:
        """Whether the recipe names stages; else the job's folder is that of its only run."""
        return STAGES in self.source.data

    def each[T](self, do: Callable[[Recipe], T]) -> list[T]:
        """`do` for the recipe of every stage. Raises one RecipeError with all problems."""
        names = [stage.name for stage in self.stages]
        return _for_each(names, [stage.recipe for stage in self.stages], do)

    def to_yaml(self) -> str:
        """The recipe with its stages and overrides, as it was given."""
        stream = io.StringIO()
        YAML().dump(self.source.data, stream)
        return stream.getvalue()


def read_stages(
    path: Path, overrides: Sequence[str] = (), fill: Fill = fill_nothing
) -> StagedRecipe:
    """Read the recipe at `path`, with or without stages.

    An override such as `stages.0.train.steps=5` changes one stage. One of a key outside of stages
    reaches the stages that do not give that key themselves; where all do, it is an error.
    Raises RecipeError with the problems of all stages.
    """
    source = read_yaml(Path(path), overrides)
    if STAGES not in source.data:
        recipe = parse_recipe(source, fill)
        return StagedRecipe(recipe.run_dir, (Stage(recipe),), source)
    problems = [*source.problems, *_form_problems(source)]
    if problems:
        raise RecipeError(*problems)
    given: list[dict[str, Any]] = source.data[STAGES]
    names = [stage["name"] for stage in given]
    problems += override_problems(source)
    # What the folder of `init_from` says is the same for all; each stage finds its own problems.
    shared = replace(source, data=deepcopy(source.data))
    for _ in fill(shared.data):
        pass
    for index in range(len(given)):
        problems += fixed_problems(shared, index)
    sources = [lay_over(shared, index, name) for index, name in enumerate(names)]
    recipes: list[Recipe] = []
    try:
        recipes = _for_each(names, sources, lambda own: parse_recipe(own, fill))
    except RecipeError as error:
        problems += error.problems
    if not problems:
        problems += _adapter_problems(names, recipes)
    if problems:
        raise RecipeError(*problems)
    stages = [
        Stage(_in_folder(recipe, number, name), name, f"stage {number} of {len(names)}, {name}")
        for number, (recipe, name) in enumerate(zip(recipes, names, strict=True), start=1)
    ]
    return StagedRecipe(recipes[0].run_dir, tuple(stages), source)


def _form_problems(source: YamlSource) -> list[str]:
    """What keeps `stages` from being a list of mappings with names of their own."""
    stages = source.data[STAGES]
    if not isinstance(stages, list) or not stages:
        return [source.problem((STAGES,), f"needs a list of stages; got {shown(stages)}")]
    if len(stages) > _MAX_STAGES:
        message = f"has {len(stages)} stages; at most {_MAX_STAGES} can be run"
        return [source.problem((STAGES,), message)]
    problems, seen = [], set[str]()
    for index, stage in enumerate(stages):
        where = (STAGES, index)
        if not isinstance(stage, dict):
            problems.append(source.problem(where, f"needs keys of a recipe; got {shown(stage)}"))
            continue
        if "name" not in stage:
            problems.append(source.problem((*where, "name"), "this key is required"))
            continue
        name = stage["name"]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"needs up to 64 letters, digits, '_' or '-'; got {shown(name)}"
            problems.append(source.problem((*where, "name"), message))
        elif name in seen:
            message = f"got {name!r}, which another stage is called already; choose another"
            problems.append(source.problem((*where, "name"), message))
        else:
            seen.add(name)
    return problems


def _adapter_problems(names: Sequence[str], recipes: Sequence[Recipe]) -> Iterator[str]:
    """Stages that lack adapters which an earlier one has trained."""
    for name, (before, after) in zip(names, pairwise(recipes), strict=False):
        for key, earlier in _adapters(before).items():
            later = _adapters(after)[key]
            if earlier is not None and later != earlier:
                message = (
                    f"got {None if later is None else later.model_dump()}, but stage {name!r} has "
                    f"trained other adapters, which would be lost; give both the same lora"
                )
                yield after.problem((*key, "lora"), message)


def _adapters(recipe: Recipe) -> dict[Location, LoRA | None]:
    """What is said of adapters, by the key of the module."""
    encoders = {("encoders", name): encoder.lora for name, encoder in recipe.encoders.items()}
    return {("language",): recipe.language.lora, **encoders}


def _in_folder(recipe: Recipe, number: int, name: str) -> Recipe:
    """The recipe as that of a run of its own, inside the folder of the job."""
    train = recipe.train.model_copy(update={"run_dir": str(recipe.run_dir)})
    return recipe.model_copy(update={"name": stage_folder(number, name), "train": train})


def _for_each[S: Recipe | StageSource, T](
    names: Sequence[str], items: Sequence[S], do: Callable[[S], T]
) -> list[T]:
    """`do` for all items, one of each stage. Raises one RecipeError with all problems.

    A line that is the same for all stages is there once.
    """
    results: list[T] = []
    found: list[tuple[str, tuple[str, ...]]] = []
    for name, item in zip(names, items, strict=True):
        try:
            results.append(do(item))
        except RecipeError as error:
            found.append((name, error.problems))
    if found:
        plain = [{line.removesuffix(in_stage(name)) for line in lines} for name, lines in found]
        shared = set.intersection(*plain) if len(found) == len(items) else set[str]()
        lines = [
            short if (short := line.removesuffix(in_stage(name))) in shared else line
            for name, problems in found
            for line in problems
        ]
        raise RecipeError(*dict.fromkeys(lines))
    return results
