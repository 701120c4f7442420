"""What is wrong with a recipe's keys, in the terms of a recipe."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mimo.errors import shown, suggestion
from mimo.recipe.source import Location

PHASES = "phases"
"""The key of a file with several recipes, which `mimo.recipe.phases` takes apart."""


_RENAMED: dict[Location, str] = {("stages",): PHASES}


def descriptions(
    error: ValidationError,
    problem: Callable[[Location, str], str],
    model: type[BaseModel],
    base: Location = (),
    skipped: str | None = None,
) -> Iterator[str]:
    """One line for each of pydantic's findings about ``model``, in the terms of a recipe.

    problem: makes a line of a location and a message. base: where the model's keys are. skipped: a
    type of pydantic's errors that gets no line.
    """
    for details in error.errors():
        if details["type"] == skipped:
            continue
        own: Location = tuple(details["loc"])
        if own and own[-1] == "[key]":
            own = own[:-1]
        message = _message(details, own, model, is_recipe=not base)
        if details["type"] == "string_type" and own != details["loc"]:
            message = f"a key is a string; got {shown(details['input'])}"
        yield problem((*base, *own), message)


def _message(
    details: ErrorDetails, location: Location, model: type[BaseModel], is_recipe: bool
) -> str:
    if details["type"] == "extra_forbidden":
        if is_recipe and location in _RENAMED:
            return f"this key is now called '{_RENAMED[location]}'"
        section = _section_at(location[:-1], model)
        choices = [*section.model_fields] if section is not None else []
        choices += [PHASES] if is_recipe and section is model else []
        return f"unknown key; {suggestion(str(location[-1]), choices)}"
    if details["type"] == "missing":
        return "this key is required"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if isinstance(details["input"], dict) and details["type"] == "value_error":
        return message
    return f"{message}; got {shown(details['input'])}"


def _section_at(location: Location, recipe: type[BaseModel]) -> type[BaseModel] | None:
    """The model that describes the mapping at `location`, found by walking the annotations."""
    section: type[BaseModel] | None = recipe
    in_container = False
    for part in location:
        if in_container:
            in_container = False
            continue
        if section is None or part not in section.model_fields:
            return None
        annotation = section.model_fields[str(part)].annotation
        in_container = not isinstance(annotation, type) or not issubclass(annotation, BaseModel)
        section = _first_section(annotation)
    return section


def _first_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_first_section(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)
