"""The file of an experiment: one recipe and its layouts; and how far their losses may differ.

Another layout adds the same numbers in another order. That changes the last bits of the first
losses, and training lets such differences grow: in fp32 some tenfold every ten steps once the
learning rate is high. An error changes the first updates by far more: a rate that is wrong by one
percent shows in the second loss at 6e-5. So the first steps are compared strictly, and with them
the gradient norm of every module, which shows a wrong gradient that the optimizer scales away. Then
the bound grows as rounding may.

After some hundred steps rounding alone has led to other weights, and the losses of single steps
differ by up to 160 % in correct layouts. From there on means over many steps are compared, which
only show whether a run learns about as well.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from mimo.config import bounds
from mimo.config.modules import Section
from mimo.config.schema import descriptions
from mimo.config.source import Location, read_yaml
from mimo.errors import RecipeError, shown, suggestion

Record = dict[str, Any]
"""A line of metrics.jsonl."""
_MAX_RUNS = 1000  # of all layouts together
_SAME = ("train.steps", "train.run_dir", "train.precision")
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}"


def _layout_keys(layouts: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    names = [str(layout.get("name", "")) for layout in layouts]
    for name in names:
        if not re.fullmatch(_NAME, name):
            raise ValueError(
                f"each layout needs a `name` of letters, digits, '_' and '-'; one has {name!r}"
            )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"each layout needs a name of its own; several are called {twice[0]}")
    return layouts


Overrides = Annotated[dict[str, Any], Field(max_length=100)]
"""Keys of the recipe with dots, such as `language.grid.tp`, and their values."""


class ExperimentFile(Section):
    """The keys of an experiment's file."""

    name: bounds.RunName
    """Name of the experiment and of its folder in the recipe's `train.run_dir`."""
    recipe: bounds.PathText
    """The recipe, from the folder of this file or from the working folder."""
    set: Overrides = {}
    """Overrides of the recipe in all layouts."""
    layouts: Annotated[
        tuple[dict[str, Any], ...],
        Field(strict=False, min_length=1, max_length=_MAX_RUNS),
        AfterValidator(_layout_keys),
    ] = ()
    """A list of layouts, each with a `name` and overrides."""
    vary: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(max_length=16)] = {}
    """Keys of the recipe with the values of each; the layouts are all combinations."""
    reference: str | None = None
    """The layout whose losses all others have to follow; null for the first."""
    repeats: Annotated[int, Field(ge=1, le=100)] = 1
    """Runs of each layout, in alternation."""
    steps: bounds.Steps
    """Steps of each run, in place of the recipe's."""

    @model_validator(mode="after")
    def _layouts_are_given_once(self) -> Self:
        if bool(self.layouts) == bool(self.vary):
            raise ValueError("give either `layouts`, a list, or `vary`, keys with values")
        return self


@dataclass(frozen=True)
class Layout:
    """One way to run the recipe. overrides: as on the command line."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Experiment:
    """A validated experiment. shared: overrides that all layouts have; each layout contains them.

    layouts: by name, including the reference.
    """

    name: str
    recipe: Path
    shared: tuple[str, ...]
    layouts: Mapping[str, Layout]
    reference: str
    repeats: int

    @property
    def rounds(self) -> Iterator[tuple[Layout, int]]:
        """Yield each layout with the number of its run, from 1, in alternation: A B C A B C."""
        for repeat in range(1, self.repeats + 1):
            for layout in self.layouts.values():
                yield layout, repeat


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment's file; ``overrides`` of its recipe follow those of the file.

    Raises RecipeError with a line for each problem.
    """
    source = read_yaml(path)

    def problem(location: Location, message: str) -> str:
        own = location[1:]
        return source.problem(own, message) if own else f"{path}: {message}"

    try:
        given = ExperimentFile.model_validate(source.data)
    except ValidationError as error:
        lines = descriptions(error, problem, ExperimentFile, ("experiment",))
        raise RecipeError(*lines) from error
    places = (path.parent / given.recipe, Path(given.recipe))
    recipe = next((place for place in places if place.is_file()), None)
    if recipe is None:
        tried = " nor ".join(dict.fromkeys(map(str, places)))
        raise RecipeError(source.problem(("recipe",), f"no recipe is at {tried}"))
    try:
        named = dict(_named_layouts(given))
    except ValueError as error:
        raise RecipeError(source.problem(("vary",), str(error))) from error
    for name, own in named.items():
        if same := [key for key in _SAME if key in own]:
            message = f"{name} sets {same[0]}, which is the same in all layouts"
            raise RecipeError(source.problem(("vary" if given.vary else "layouts",), message))
    reference = given.reference or next(iter(named))
    if reference not in named:
        message = f"no layout is called {shown(reference)}; {suggestion(reference, named)}"
        raise RecipeError(source.problem(("reference",), message))
    if len(named) * given.repeats > _MAX_RUNS:
        message = f"{len(named)} layouts · {given.repeats} are more than {_MAX_RUNS} runs"
        raise RecipeError(source.problem(("repeats",), message))
    own = {"train.save_every": None, **given.set, "train.steps": given.steps}
    shared = (*_texts(own), *overrides)
    layouts = [Layout(name, (*shared, *_texts(own))) for name, own in named.items()]
    by_name = {layout.name: layout for layout in layouts}
    return Experiment(given.name, recipe, shared, by_name, reference, given.repeats)


def _texts(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides as on the command line; JSON is valid YAML."""
    for key, value in overrides.items():
        yield f"{key}={json.dumps(value)}"


def _named_layouts(given: ExperimentFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield layouts by name. Raises ValueError where values make no valid name."""
    for layout in given.layouts:
        yield str(layout["name"]), {key: value for key, value in layout.items() if key != "name"}
    if not given.vary:
        return
    labels = {key: [_label(key, value) for value in given.vary[key]] for key in given.vary}
    counts = Counter(label for own in labels.values() for label in set(own))
    for key, own in labels.items():
        if any(counts[label] > 1 for label in own):  # such as tp2 of two modules
            module = key.removeprefix("encoders.").partition(".")[0]
            labels[key] = [f"{module}-{label}" for label in own]
    seen = set[str]()
    for values in itertools.product(*(range(len(own)) for own in labels.values())):
        chosen = dict(zip(given.vary, values, strict=True))
        name = "-".join(labels[key][number] for key, number in chosen.items())
        if name in seen or not re.fullmatch(_NAME, name):
            raise ValueError(
                f"the name {shown(name)}, which follows from the values, is too long or that of "
                f"two layouts; list the layouts with names of their own under `layouts`"
            )
        seen.add(name)
        yield name, {key: given.vary[key][number] for key, number in chosen.items()}


def _label(key: str, value: Any) -> str:
    """Return a short name of a value: `tp2-dp2` for {tp: 2, dp: 2}, `colocated` for itself."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, Mapping) and value:
        text = "-".join(f"{name}{one}" for name, one in value.items())
    else:
        text = f"{key.rpartition('.')[2]}{json.dumps(value)}"
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")


STRICT_STEPS = 10
_STEPS_TO_DOUBLE = 10
_LIMIT = 0.05
# Means over this many steps; correct layouts of the quickstart differed by up to 7 %.
_WINDOW, _MEAN_LIMIT = 100, 0.25
# Relative differences that rounding explains in the first steps, by the precision of the weights.
_FIRST = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 0.02}


@dataclass(frozen=True)
class Followed:
    """The comparison of a run with the reference.

    difference: the largest relative difference of losses, over the steps that have a bound. at: its
    step. problem: a sentence about the first step beyond the bound, or "".
    """

    difference: float
    at: int
    problem: str = ""


def bound(step: int, precision: str) -> float | None:
    """Return the largest relative difference of losses that rounding explains at a step, from 0.

    None if rounding explains any difference.
    """
    doubled = max(0, step + 1 - STRICT_STEPS) / _STEPS_TO_DOUBLE
    allowed = _FIRST[precision] * 2.0 ** min(doubled, 64.0)
    return allowed if allowed <= _LIMIT else None


def difference(ours: float | None, theirs: float | None) -> float:
    """Return the difference relative to the reference, ``theirs``; 0 if neither is finite."""
    if ours is None or theirs is None:  # not finite, in JSON
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs) / abs(theirs) if ours != theirs and theirs else abs(ours - theirs)


def follow(records: Sequence[Record], reference: Sequence[Record], precision: str) -> Followed:
    """Compare all steps of a run with the reference's."""
    largest, at, problem = 0.0, 0, ""
    for record, other in zip(records, reference, strict=True):
        step, name = record["step"], "loss"
        if (allowed := bound(step, precision)) is None:
            allowed, name = _MEAN_LIMIT, f"the mean loss of {_WINDOW} steps"
            off = difference(_mean(records, step), _mean(reference, step))
        else:
            off = difference(record["loss"], other["loss"])
            if off > largest:
                largest, at = off, step
        if step < STRICT_STEPS:
            norms = [norm for norm in other if norm.startswith("grad_norm")]
            norm_off = {norm: difference(record.get(norm), other[norm]) for norm in norms}
            off, name = max((off, name), *((value, norm) for norm, value in norm_off.items()))
        if not problem and off > allowed:
            problem = f"{name} of step {step + 1} is off by {off:.1e}, beyond {allowed:.1e}"
    return Followed(largest, at, problem)


def _mean(records: Sequence[Record], step: int) -> float | None:
    """Return the mean of the finite losses of the last steps up to this one."""
    losses = [record["loss"] for record in records[max(0, step + 1 - _WINDOW) : step + 1]]
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if finite else None
