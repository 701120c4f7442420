"""What a recipe may say but this version cannot do yet: one table, refused by name.

The schema already knows these keys, so that a recipe does not change when the feature arrives.
Removing a row is all that it takes to open a feature to recipes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mimo.recipe.source import Location


@dataclass(frozen=True)
class NotYet:
    """A key (`*` stands for any encoder's name) and the only value of it that works so far."""

    key: str
    works: str | int | bool | None
    feature: str


NOT_YET = (
    NotYet("encoders.*.grid.cp", 1, "context parallelism in an encoder"),
    NotYet("encoders.*.grid.vpp", 1, "interleaved pipeline stages in an encoder"),
)


def refusals(data: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    """The location and the message of every value in `data` that this version refuses.

    `data` is a recipe as plain mappings and need not be valid otherwise: what is absent or has
    the wrong type is left to the schema.
    """
    for row in NOT_YET:
        for location, value in _matches(data, row.key.split("."), ()):
            right_type = row.works is None or type(value) is type(row.works)
            if right_type and value != row.works:
                got, works = _yaml(value), _yaml(row.works)
                message = f"got {got}, but {row.feature} is not supported yet; only {works} works"
                yield location, message


def _matches(data: Any, parts: list[str], location: Location) -> Iterator[tuple[Location, Any]]:
    if not parts:
        yield location, data
    elif isinstance(data, dict):
        for key in data if parts[0] == "*" else [parts[0]]:
            if key in data:
                yield from _matches(data[key], parts[1:], (*location, key))


def _yaml(value: str | int | bool | None) -> str:
    """A scalar as it is written in a recipe."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
