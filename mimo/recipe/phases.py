"""Phases: one job that trains the same model several times in a row, each time differently.

A recipe may have a list `phases`; each entry has a name and any keys of a recipe, which override
the keys outside the list. So freezing, learning rates, data and layout can differ between phases,
and each phase starts from the weights that the previous one left. A recipe without the list is one
phase.
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

from mimo.bounds import PHASE_NAME
from mimo.errors import RecipeError, shown
from mimo.recipe.phase_source import (
    PhaseSource,
    fixed_problems,
    in_phase,
    lay_over,
    number_entries,
    override_problems,
)
from mimo.recipe.schema import PHASES, Fill, LoRA, Recipe, fill_nothing, parse_recipe
from mimo.recipe.source import Location, YamlSource, read_yaml

_NAME = re.compile(PHASE_NAME)
_MAX_PHASES = 100
PHASE_FOLDER = re.compile(r"phase_(\d+)_[A-Za-z0-9_-]+")
"""The name of a phase's folder; see `phase_folder`."""


@dataclass(frozen=True)
class Phase:
    """One training run of a job.

    recipe: complete and without phases; its run folder is the phase's. name: empty if the recipe
    has no phases. title: for people, such as `phase 1 of 2, projector`.
    """

    recipe: Recipe
    name: str = ""
    title: str = ""


@dataclass(frozen=True)
class PhasedRecipe:
    """All phases of a job, in order. run_dir: the folder of the job."""

    run_dir: Path
    phases: tuple[Phase, ...]
    source: YamlSource

    @property
    def has_phases(self) -> bool:
        """Whether the recipe names phases; if not, the job's folder is that of its only run."""
        return PHASES in self.source.data

    def each[T](self, do: Callable[[Recipe], T]) -> list[T]:
        """Call `do` on the recipe of every phase. Raises one RecipeError with all problems."""
        names = [phase.name for phase in self.phases]
        return _for_each(names, [phase.recipe for phase in self.phases], do)

    def to_yaml(self) -> str:
        """The recipe with its phases and overrides, as it was given."""
        stream = io.StringIO()
        YAML().dump(self.source.data, stream)
        return stream.getvalue()


def read_phases(
    path: Path, overrides: Sequence[str] = (), fill: Fill = fill_nothing
) -> PhasedRecipe:
    """Read the recipe at `path`, with or without phases.

    An override such as `phases.0.train.steps=5` changes one phase. An override of a key outside
    the list reaches the phases that do not set that key themselves; if all do, it is an error.
    Raises RecipeError with the problems of all phases.
    """
    source = read_yaml(Path(path), overrides)
    if PHASES not in source.data:
        recipe = parse_recipe(source, fill)
        return PhasedRecipe(recipe.run_dir, (Phase(recipe),), source)
    problems = [*source.problems, *_form_problems(source)]
    if problems:
        raise RecipeError(*problems)
    given: list[dict[str, Any]] = source.data[PHASES]
    names = [phase["name"] for phase in given]
    problems += [*number_entries(source), *override_problems(source)]
    # The folder of `init_from` says the same for all phases; each phase reports its problems later.
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
    phases = [
        Phase(_in_folder(recipe, number, name), name, f"phase {number} of {len(names)}, {name}")
        for number, (recipe, name) in enumerate(zip(recipes, names, strict=True), start=1)
    ]
    return PhasedRecipe(recipes[0].run_dir, tuple(phases), source)


def phase_folder(number: int, name: str) -> str:
    """The name of the run folder of phase ``number``, which counts from 1."""
    return f"phase_{number}_{name}"


def _form_problems(source: YamlSource) -> list[str]:
    """What keeps `phases` from being a list of mappings with different names."""
    phases = source.data[PHASES]
    if not isinstance(phases, list) or not phases:
        return [source.problem((PHASES,), f"needs a list of phases; got {shown(phases)}")]
    if len(phases) > _MAX_PHASES:
        message = f"has {len(phases)} phases; at most {_MAX_PHASES} can be run"
        return [source.problem((PHASES,), message)]
    problems, seen = [], set[str]()
    for index, phase in enumerate(phases):
        where = (PHASES, index)
        if not isinstance(phase, dict):
            problems.append(source.problem(where, f"needs keys of a recipe; got {shown(phase)}"))
            continue
        if "name" not in phase:
            problems.append(source.problem((*where, "name"), "this key is required"))
            continue
        name = phase["name"]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"needs up to 64 letters, digits, '_' or '-'; got {shown(name)}"
            problems.append(source.problem((*where, "name"), message))
        elif name in seen:
            message = f"got {name!r}, which another phase is called already; choose another"
            problems.append(source.problem((*where, "name"), message))
        else:
            seen.add(name)
    return problems


def _adapter_problems(names: Sequence[str], recipes: Sequence[Recipe]) -> Iterator[str]:
    """Phases that lack adapters which an earlier phase trained."""
    for name, (before, after) in zip(names, pairwise(recipes), strict=False):
        for key, earlier in _adapters(before).items():
            later = _adapters(after)[key]
            if earlier is not None and later != earlier:
                message = (
                    f"got {None if later is None else later.model_dump()}, but phase {name!r} has "
                    f"trained other adapters, which would be lost; give both the same lora"
                )
                yield after.problem((*key, "lora"), message)


def _adapters(recipe: Recipe) -> dict[Location, LoRA | None]:
    """The adapter settings of each module, by its key."""
    encoders = {("encoders", name): encoder.lora for name, encoder in recipe.encoders.items()}
    return {("language",): recipe.language.lora, **encoders}


def _in_folder(recipe: Recipe, number: int, name: str) -> Recipe:
    """The recipe of a phase as a separate run, inside the folder of the job."""
    train = recipe.train.model_copy(update={"run_dir": str(recipe.run_dir)})
    return recipe.model_copy(update={"name": phase_folder(number, name), "train": train})


def _for_each[S: Recipe | PhaseSource, T](
    names: Sequence[str], items: Sequence[S], do: Callable[[S], T]
) -> list[T]:
    """Call `do` on all items, one for each phase. Raises one RecipeError with all problems.

    A line that is the same for all phases appears once.
    """
    results: list[T] = []
    found: list[tuple[str, tuple[str, ...]]] = []
    for name, item in zip(names, items, strict=True):
        try:
            results.append(do(item))
        except RecipeError as error:
            found.append((name, error.problems))
    if found:
        plain = [{line.removesuffix(in_phase(name)) for line in lines} for name, lines in found]
        shared = set.intersection(*plain) if len(found) == len(items) else set[str]()
        lines = [
            short if (short := line.removesuffix(in_phase(name))) in shared else line
            for name, problems in found
            for line in problems
        ]
        raise RecipeError(*dict.fromkeys(lines))
    return results
