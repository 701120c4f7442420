"""The file of an experiment: one recipe and its layouts."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from mimo.config import bounds
from mimo.config.modules import Section
from mimo.config.schema import descriptions
from mimo.config.source import Location, read_yaml
from mimo.errors import RecipeError, shown, suggestion

_SAME = ("train.steps", "train.run_dir", "train.precision")
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}"


class ExperimentFile(Section):
    """The keys of an experiment's file."""

    name: bounds.RunName
    """Name of the experiment and of its folder in the recipe's `train.run_dir`."""
    recipe: bounds.PathText
    """The recipe, from the folder of this file or from the working folder."""
    set: dict[str, Any] = {}
    """Overrides of the recipe in all layouts: keys with dots, and their values."""
    layouts: Annotated[tuple[dict[str, Any], ...], Field(strict=False, min_length=1)] = ()
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
    """A validated experiment. shared: overrides of all layouts. layouts: all overrides by name."""

    name: str
    recipe: Path
    shared: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]
    reference: str
    repeats: int


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment. overrides: of its recipe, after those of the file. Raises RecipeError."""
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
    where = "vary" if file.vary else "layouts"
    named = dict[str, dict[str, Any]]()
    for name, keys in _layouts(file):
        if name in named or not re.fullmatch(_NAME, name):
            fix = "; its values make that name: use `layouts`" if file.vary else ""
            raise error(
                where,
                f"each layout needs a `name` of its own, of up to 80 letters, digits, '_' and '-'; "
                f"got {shown(name)}{fix}",
            )
        if same := [key for key in _SAME if key in keys]:
            raise error(where, f"{name} sets {same[0]}, which is the same in all layouts")
        named[name] = keys
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


def _layouts(file: ExperimentFile) -> Iterator[tuple[str, dict[str, Any]]]:
    for layout in file.layouts:
        yield str(layout.get("name", "")), {k: v for k, v in layout.items() if k != "name"}
    axes = [[(key, value) for value in values] for key, values in file.vary.items()]
    for chosen in itertools.product(*axes) if axes else ():
        yield "-".join(_label(key, value) for key, value in chosen), dict(chosen)


def _label(key: str, value: Any) -> str:
    """Return a short name of a value: `tp2-dp2` for {tp: 2, dp: 2}, `colocated` for itself."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, Mapping) and value:
        text = "-".join(f"{name}{size}" for name, size in value.items())
    else:
        text = f"{key.rpartition('.')[2]}{json.dumps(value)}"
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")
