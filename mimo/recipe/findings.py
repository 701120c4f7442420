"""What is wrong with a recipe's keys, in the terms of a recipe."""

from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from mimo.errors import shown, suggestion
from mimo.recipe.source import Location, YamlSource

PHASES = "phases"
"""The key of a file with several recipes, which `mimo.recipe.phases` takes apart."""


_RENAMED: dict[Location, str] = {("stages",): PHASES}


def describe(source: YamlSource, details: ErrorDetails, recipe: type[BaseModel]) -> str:
    """One line for one of pydantic's findings about ``recipe``, in the terms of a recipe."""
    location: Location = tuple(details["loc"])
    if details["type"] == "extra_forbidden":
        if location in _RENAMED:
            return source.problem(location, f"this key is now called '{_RENAMED[location]}'")
        section = _section_at(location[:-1], recipe)
        choices = [*section.model_fields] if section is not None else []
        choices += [PHASES] if section is recipe else []
        return source.problem(location, f"unknown key; {suggestion(str(location[-1]), choices)}")
    if details["type"] == "missing":
        return source.problem(location, "this key is required")
    if location and location[-1] == "[key]":
        return source.problem(location[:-1], f"a key is a string; got {shown(details['input'])}")
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if isinstance(details["input"], dict) and details["type"] == "value_error":
        return source.problem(location, message)
    return source.problem(location, f"{message}; got {shown(details['input'])}")


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
