"""Phases: one job that trains the same model several times in a row, each time differently.

An entry of the list `phases` has a name and any keys of a recipe, which override the keys outside
the list. Each phase starts from the weights of the previous one. A recipe without the list is one
phase. Mappings merge key by key at every depth; lists and plain values replace the old ones. A
mapping over a list changes entries of the list, by their indices or their paths.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from mimo.config.bounds import PHASE_NAME
from mimo.config.schema import Fill, Recipe, check_keys, parse_recipe
from mimo.config.source import (
    PHASES,
    Location,
    YamlSource,
    as_yaml,
    dotted,
    leaves,
    merge,
    read_yaml,
)
from mimo.errors import RecipeError, shown

_NAME = re.compile(PHASE_NAME)
PHASE_FOLDER = re.compile(r"phase_(\d+)_[A-Za-z0-9_-]+")
"""A phase's folder: its number from 1 on, and its name."""
_FIXED = {
    "init_from": "all phases start from the same weights",
    r"data\.tokenizer": "all phases share one tokenizer",
    r"cluster(\..+)?": "all phases run on the machines of one job",
    r"train\.run_dir": "all phases are in the folder of one run",
    r"(language|encoders\.[^.]+)\.(family|model)(\..+)?": "all phases train the same model",
}
"""Patterns of keys that no phase may change, and why."""


@dataclass
class PhaseSource(YamlSource):
    """The data of one phase. `changed`: locations of the values that the phase itself sets."""

    name: str = ""
    index: int = 0
    changed: frozenset[Location] = field(default_factory=frozenset)

    def problem(self, location: Location, message: str) -> str:
        """Format an error as one line like `YamlSource.problem`, and name the phase."""
        if self.nearest(location) in self.changed:
            key = dotted((PHASES, self.index, *location))
            return f"{self.origin(location)}: {key}: {message}"
        return super().problem(location, message) + _in_phase(self.name)


def _in_phase(name: str) -> str:
    """Suffix of a line about a key that all phases share but is wrong only in phase `name`."""
    return f" (in phase {name!r})"


@dataclass(frozen=True)
class Phase:
    """One training run of a job.

    recipe: complete, without phases; its run folder is the phase's. name, title (such as `phase 1
    of 2, projector`): empty if the recipe has no phases.
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
        """Whether the recipe has a list of phases; if not, the job's folder is its only run's."""
        return PHASES in self.source.data

    def each[T](self, do: Callable[[Recipe], T]) -> list[T]:
        """Call `do` on the recipe of every phase. Raises one RecipeError with all problems."""
        names = [phase.name for phase in self.phases]
        return _for_each(names, [phase.recipe for phase in self.phases], do)

    def to_yaml(self) -> str:
        return as_yaml(self.source.data)


def read_phases(
    path: Path, overrides: Sequence[str], fill: Fill, site: Path | None = None
) -> PhasedRecipe:
    """Read the recipe at `path`, with or without phases. site: a file of the keys of `cluster`.

    The override `phases.0.train.steps=5` changes one phase. An override of a key outside the list
    reaches the phases that do not set the key themselves; if all do, it is an error.
    Raises RecipeError with the problems of all phases.
    """
    source = read_yaml(Path(path), overrides, site)
    if PHASES not in source.data:
        recipe = parse_recipe(source, fill)
        return PhasedRecipe(recipe.run_dir, (Phase(recipe),), source)
    problems = [*source.problems, *_form_problems(source)]
    if problems:
        raise RecipeError(*problems)
    entries: list[dict[str, Any]] = source.data[PHASES]
    names = [phase["name"] for phase in entries]
    for index, phase in enumerate(entries):
        problems += _number_entries(source, source.data, phase, (PHASES, index))
    problems += _override_problems(source)
    if problems:
        raise RecipeError(*problems)
    unfilled = [_phase_source(source, index, name) for index, name in enumerate(names)]
    _for_each(names, unfilled, check_keys)
    # The folder of `init_from` is the same for all phases; each phase reports its problems below.
    shared = replace(source, data=deepcopy(source.data))
    for _ in fill(shared.data):
        pass
    for index in range(len(entries)):
        problems += _fixed_problems(shared, index)
    sources = [_phase_source(shared, index, name) for index, name in enumerate(names)]
    recipes: list[Recipe] = []
    try:
        recipes = _for_each(names, sources, lambda phase: parse_recipe(phase, fill))
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


def _form_problems(source: YamlSource) -> list[str]:
    phases = source.data[PHASES]
    if not isinstance(phases, list) or not phases:
        return [source.problem((PHASES,), f"needs a list of phases; got {shown(phases)}")]
    problems, seen = [], set[str]()
    for index, phase in enumerate(phases):
        where: Location = (PHASES, index, "name")
        if not isinstance(phase, dict):
            where, message = where[:2], f"needs keys of a recipe; got {shown(phase)}"
        elif "name" not in phase:
            message = "this key is required"
        elif not isinstance(name := phase["name"], str) or not _NAME.fullmatch(name):
            message = f"needs up to 64 letters, digits, '_' or '-'; got {shown(name)}"
        elif name in seen:
            message = f"got {name!r}, the name of another phase; choose another"
        else:
            seen.add(name)
            continue
        problems.append(source.problem(where, message))
    return problems


def _adapter_problems(names: Sequence[str], recipes: Sequence[Recipe]) -> Iterator[str]:
    """Phases whose adapters differ from those that the phase before has trained."""
    for name, (before, after) in zip(names, pairwise(recipes), strict=False):
        for module, part in before.modules.items():
            later = after.module(module).lora
            if part.lora is not None and later != part.lora:
                message = (
                    f"got {None if later is None else later.model_dump()}, but phase {name!r} has "
                    f"trained other adapters, which would be lost; give both the same lora"
                )
                yield after.problem((*after.key_of(module), "lora"), message)


def _in_folder(recipe: Recipe, number: int, name: str) -> Recipe:
    train = recipe.train.model_copy(update={"run_dir": str(recipe.run_dir)})
    return recipe.model_copy(update={"name": f"phase_{number}_{name}", "train": train})


def _for_each[S: Recipe | PhaseSource, T](
    names: Sequence[str], items: Sequence[S], do: Callable[[S], T]
) -> list[T]:
    """Call `do` for each phase. Raises one RecipeError with all problems, shared lines once."""
    results: list[T] = []
    lines_of = defaultdict[str, list[str]](list)  # of all phases, by the line without the phase
    for name, item in zip(names, items, strict=True):
        try:
            results.append(do(item))
        except RecipeError as error:
            for line in dict.fromkeys(error.problems):
                lines_of[line.removesuffix(_in_phase(name))].append(line)
    if lines_of:
        problems = ([p] if len(lines) == len(items) else lines for p, lines in lines_of.items())
        raise RecipeError(*dict.fromkeys(chain.from_iterable(problems)))
    return results


def _phase_source(base: YamlSource, index: int, name: str) -> PhaseSource:
    """Merge the keys of phase `index` over those outside `phases`."""
    keys = {key: value for key, value in base.data[PHASES][index].items() if key != "name"}
    data = {key: value for key, value in base.data.items() if key != PHASES}
    replaced = {location for location, _ in leaves(keys)}
    origins = {
        location: origin
        for location, origin in base.origins.items()
        if location[0] != PHASES
        and not any(location[:depth] in replaced for depth in range(1, len(location) + 1))
    }
    prefix = (PHASES, index)
    # An override of a whole phase leaves its keys without origins: each key gets the phase's.
    changed: dict[Location, str] = {(key,): base.origin((*prefix, key)) for key in keys}
    changed |= {
        location[2:]: origin
        for location, origin in base.origins.items()
        if location[:2] == prefix and location[2:3] and location[2] in keys
    }
    merged, locations = merge(data, keys), frozenset(changed)
    return PhaseSource(base.path, merged, origins | changed, [], [], name, index, locations)


def _number_entries(base: YamlSource, below: Any, changes: Any, where: Location) -> Iterator[str]:
    """Replace paths by which a phase at `where` names entries of lists by indices; yield errors."""
    if not (isinstance(below, dict | list) and isinstance(changes, dict)):
        return
    for key in list(changes) if isinstance(below, list) else ():
        value, place = changes.pop(key), (*where, key)
        paths = [entry.get("path") if isinstance(entry, dict) else None for entry in below]
        numbers = [n for n, path in enumerate(paths) if key in (n, str(n), path)]
        if len(numbers) != 1 or numbers[0] in changes:
            message = (
                f"got {shown(key)}, which names no further entry; give an index from 0 to "
                f"{len(below) - 1}, or the entry's path, or the whole list"
            )
            yield base.problem(place, message)
            continue
        changes[numbers[0]] = value
        for known in [known for known in base.origins if known[: len(place)] == place]:
            moved = (*where, numbers[0], *known[len(place) :])
            base.origins[moved] = base.origins.pop(known)
    for key, value in changes.items():
        if isinstance(below, list) or key in below:
            yield from _number_entries(base, below[key], value, (*where, key))


# -------------------------------------------------------------------- refusals


def _fixed_problems(base: YamlSource, index: int) -> Iterator[str]:
    encoders = base.data.get("encoders")
    known = set(encoders) if isinstance(encoders, dict) else set()
    for location, value in leaves(base.data[PHASES][index]):
        where, key = (PHASES, index, *location), dotted(location)
        if location[0] == "encoders" and len(location) > 1 and location[1] not in known:
            key = dotted(location[:2])
            message = f"all phases have the same encoders; add {key} outside of phases"
            yield base.problem(where[:4], message)
            known.add(location[1])  # report it once
            continue
        for pattern, reason in _FIXED.items():
            if re.fullmatch(pattern, key) and value != _value_at(base.data, location):
                message = f"got {value!r}, but {reason}; set {key} outside of phases"
                yield base.problem(where, message)


def _override_problems(base: YamlSource) -> Iterator[str]:
    """Overrides outside `phases` without effect, because every phase sets the key itself."""
    phases: list[Any] = base.data[PHASES]
    for location in dict.fromkeys(base.overridden):
        if location[0] in (PHASES, "name"):  # a phase's name is not the recipe's
            continue
        value = _value_at(base.data, location)
        below = [(*location, *rest) for rest, _ in leaves(value)] or [location]
        if all(_value_at(phase, leaf) is not _NOTHING for phase in phases for leaf in below):
            better = ", ".join(dotted((PHASES, n, *location)) for n in range(len(phases)))
            message = f"has no effect, as every phase sets it; override {better}"
            yield base.problem(location, message)


_NOTHING = object()


def _value_at(data: Any, location: Location) -> Any:
    """The value at `location` inside mappings, or what replaces a parent; else `_NOTHING`."""
    for part in location:
        if not isinstance(data, dict):
            break
        if part not in data:
            return _NOTHING
        data = data[part]
    return data
