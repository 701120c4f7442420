"""The file of an experiment: one recipe and its layouts."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from mimo.config import bounds
from mimo.config.modules import Section
from mimo.config.schema import descriptions
from mimo.config.source import Location, read_yaml
from mimo.errors import RecipeError, shown, suggestion

_SAME = ("train.steps", "train.run_dir", "train.precision")
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}"


def _layout_keys(layouts: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    names = Counter(str(layout.get("name", "")) for layout in layouts)
    for name, count in names.items():
        if not re.fullmatch(_NAME, name):
            raise ValueError(
                f"each layout needs a `name` of letters, digits, '_' and '-'; one has {name!r}"
            )
        if count > 1:
            raise ValueError(f"each layout needs a name of its own; several are called {name}")
    return layouts


class ExperimentFile(Section):
    """The keys of an experiment's file."""

    name: bounds.RunName
    """Name of the experiment and of its folder in the recipe's `train.run_dir`."""
    recipe: bounds.PathText
    """The recipe, from the folder of this file or from the working folder."""
    set: dict[str, Any] = {}
    """Overrides of the recipe in all layouts: keys with dots, and their values."""
    layouts: Annotated[
        tuple[dict[str, Any], ...],
        Field(strict=False, min_length=1),
        AfterValidator(_layout_keys),
    ] = ()
    """A list of layouts, each with a `name` and overrides."""
    vary: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    """Keys of the recipe with the values of each; the layouts are all combinations."""
    reference: str | None = None
    """The layout whose losses all others have to follow; null for the first."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Runs of each layout, in alternation."""
    steps: bounds.Steps
    """Steps of each run, in place of the recipe's."""

    @model_validator(mode="after")
    def _layouts_are_given_once(self) -> Self:
        if bool(self.layouts) == bool(self.vary):
            raise ValueError("give either `layouts`, a list, or `vary`, keys with values")
        return self


@dataclass(frozen=True)
class Experiment:
    """A validated experiment. shared: overrides that all layouts have.

    layouts: all overrides of each layout by its name, including the reference.
    """

    name: str
    recipe: Path
    shared: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]
    reference: str
    repeats: int


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment's file; ``overrides`` of its recipe follow those of the file.

    Raises RecipeError with a line for each problem.
    """
    source = read_yaml(path)

    def problem(location: Location, message: str) -> str:
        key = location[1:]
        return source.problem(key, message) if key else f"{path}: {message}"

    def error(key: str, message: str) -> RecipeError:
        return RecipeError(source.problem((key,), message))

    try:
        file = ExperimentFile.model_validate(source.data)
    except ValidationError as invalid:
        lines = descriptions(invalid, problem, ExperimentFile, ("experiment",))
        raise RecipeError(*lines) from invalid
    places = (path.parent / file.recipe, Path(file.recipe))
    recipe = next((place for place in places if place.is_file()), None)
    if recipe is None:
        raise error("recipe", f"no recipe is at {' nor '.join(dict.fromkeys(map(str, places)))}")
    try:
        named = dict(_named_layouts(file))
    except ValueError as invalid:
        raise error("vary", str(invalid)) from invalid
    for name, keys in named.items():
        if same := [key for key in _SAME if key in keys]:
            message = f"{name} sets {same[0]}, which is the same in all layouts"
            raise error("vary" if file.vary else "layouts", message)
    reference = file.reference or next(iter(named))
    if reference not in named:
        message = f"no layout is called {shown(reference)}; {suggestion(reference, named)}"
        raise error("reference", message)
    common = {"train.save_every": None, **file.set, "train.steps": file.steps}
    shared = (*_texts(common), *overrides)
    layouts = {name: (*shared, *_texts(keys)) for name, keys in named.items()}
    return Experiment(file.name, recipe, shared, layouts, reference, file.repeats)


def _texts(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides as on the command line; JSON is valid YAML."""
    for key, value in overrides.items():
        yield f"{key}={json.dumps(value)}"


def _named_layouts(file: ExperimentFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield layouts by name. Raises ValueError where values make no valid name."""
    for layout in file.layouts:
        yield str(layout["name"]), {key: value for key, value in layout.items() if key != "name"}
    if not file.vary:
        return
    axes = [[(key, value) for value in values] for key, values in file.vary.items()]
    names = set[str]()
    for chosen in itertools.product(*axes):
        name = "-".join(_label(key, value) for key, value in chosen)
        if name in names or not re.fullmatch(_NAME, name):
            raise ValueError(
                f"the name {shown(name)}, which follows from the values, is too long or that of "
                f"two layouts; list the layouts with names of their own under `layouts`"
            )
        names.add(name)
        yield name, dict(chosen)


def _label(key: str, value: Any) -> str:
    """Return a short name of a value: `tp2-dp2` for {tp: 2, dp: 2}, `colocated` for itself."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, Mapping) and value:
        text = "-".join(f"{name}{size}" for name, size in value.items())
    else:
        text = f"{key.rpartition('.')[2]}{json.dumps(value)}"
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")
