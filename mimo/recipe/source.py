"""YAML text and command-line overrides, merged into plain data that remembers where it came from.

Every value keeps its origin: a line of the file, or the override that set it. An error found much
later (a wrong type, a grid that does not tile the world) can so point at the place to mend.
"""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from mimo.errors import RecipeError, nearest, shown
from mimo.recipe.yaml_size import YamlTooLarge, check_size

Location = tuple[str | int, ...]
"""The way to a value: keys of mappings and indices of lists, outermost first."""

_MAX_BYTES = 2**18  # of a recipe
_MAX_PARTS = 32  # of the key of an override
_SHOWN = 200  # characters of an override in a message
_SECRET = re.compile(r"://(?=[^/\s]*@|\S*\?)\S*")  # a URL that may hold credentials


def dotted(location: Location) -> str:
    """`("data", "sources", 0)` as people type it: `data.sources.0`."""
    parts = (str(part) for part in location)
    return ".".join(part if len(part) <= _SHOWN else f"{part[:_SHOWN]}..." for part in parts)


@dataclass
class YamlSource:
    """Plain data (`dict`, `list`, `str`, `int`, `float`, `bool`, `None`) with an origin per value.

    `origins` maps the location of a value to `recipes/x.yaml:12` or `override 'a.b=1'`;
    `overridden` lists the locations that overrides have set; `problems` collects what went wrong
    while reading, so that it is reported together with later findings.
    """

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)
    overridden: list[Location] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def problem(self, location: Location, message: str) -> str:
        """One line for an error at `location`: its origin, the dotted key and the message."""
        return f"{self.origin(location)}: {dotted(location) or 'recipe'}: {message}"

    def origin(self, location: Location) -> str:
        """Where the value was written; for one that is missing, where its parent was."""
        known = self.nearest(location)
        return str(self.path) if known is None else self.origins[known]

    def nearest(self, location: Location) -> Location | None:
        """`location`, or its closest parent whose origin is known."""
        prefixes = (location[:length] for length in range(len(location), 0, -1))
        return next((prefix for prefix in prefixes if prefix in self.origins), None)

    def override(self, text: str) -> None:
        """Apply `dotted.key=value`; the value is YAML. What cannot be applied becomes a problem."""
        safe = _SECRET.sub("://...", text)
        origin = f"override '{safe if len(safe) <= _SHOWN else safe[:_SHOWN] + '...'}'"
        key, equals, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            self.problems.append(f"{origin}: needs the form dotted.key=value")
            return
        if len(parts) > _MAX_PARTS:
            self.problems.append(f"{origin}: has {len(parts)} parts; no key has that many")
            return
        try:
            check_size(value_text)
            value = _plain(YAML().load(value_text))
        except Exception as error:  # as when a file is read
            self.problems.append(f"{origin}: the value is not YAML: {_reason(error)}")
            return
        location: Location = ()
        container: Any = self.data
        for depth, part in enumerate(parts):
            step = _step(container, part)
            if isinstance(step, _Refusal):
                name = dotted(location) or "recipe"
                self.problems.append(f"{origin}: {name}: {step.reason}")
                return
            location = (*location, step)
            if depth == len(parts) - 1:
                container[step] = value
            else:
                if isinstance(container, dict) and container.get(step) is None:
                    container[step] = {}
                container = container[step]
        for known in [known for known in self.origins if known[: len(location)] == location]:
            del self.origins[known]
        self.origins[location] = origin
        self.overridden.append(location)


def read_yaml(path: Path, overrides: Sequence[str] = ()) -> YamlSource:
    """Read `path` and apply `overrides` in order.

    Raises RecipeError when the file is missing, too large, not YAML, or holds no mapping.
    Overrides that cannot be applied are left in `problems` of the result.
    """
    try:
        if not path.is_file() and path.exists():
            raise RecipeError(f"{path}: is not a file; give the path of a recipe")
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise RecipeError(f"{path}: has more than {_MAX_BYTES} bytes, which no recipe has")
        text = raw.decode("utf-8")
    except FileNotFoundError:
        match = nearest(path.name, (other.name for other in path.parent.glob("*.yaml")))
        hint = f"; did you mean '{path.parent / match}'?" if match else ""
        raise RecipeError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    origins: dict[Location, str] = {}
    try:
        check_size(text)
        loaded = YAML().load(text)
        _note_lines(loaded, (), path, origins)
        data = _plain(loaded) if isinstance(loaded, CommentedMap) else {}
    except _NotPlain as error:
        raise RecipeError(
            YamlSource(path, {}, origins).problem(error.location, str(error))
        ) from None
    except Exception as error:  # the parser raises many types on damaged text
        raise RecipeError(f"{path}{_line(error)}: not valid YAML: {_reason(error)}") from None
    if loaded is not None and not isinstance(loaded, CommentedMap):
        raise RecipeError(f"{path}:1: a recipe is a mapping of keys to values")
    source = YamlSource(path, data, origins)
    for override in overrides:
        source.override(override)
    return source


@dataclass(frozen=True)
class _Refusal:
    reason: str


class _NotPlain(ValueError):
    """The YAML holds something other than mappings, lists and plain scalars, at `location`."""

    def __init__(self, location: Location, message: str) -> None:
        super().__init__(message)
        self.location = location


def _line(error: Exception) -> str:
    """`:12` for an error that knows its line."""
    if isinstance(error, YamlTooLarge):
        return f":{error.line}"
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    return f":{mark.line + 1}" if mark is not None else ""


def _step(container: Any, part: str) -> str | int | _Refusal:
    """The key or index that `part` stands for in `container`."""
    if isinstance(container, dict):
        return part
    if isinstance(container, list):
        # Not `isdigit`: that also knows digits such as ², which are not numbers.
        if part.isascii() and part.isdecimal() and len(part) < 10 and int(part) < len(container):
            return int(part)
        return _Refusal(
            f"has {len(container)} entries, so '{part[:_SHOWN]}' is not the index of one"
        )
    return _Refusal(
        f"is the value {shown(container)}, so '{part[:_SHOWN]}' cannot be set inside it"
    )


def _reason(error: Exception) -> str:
    """The first line that says what a YAML error is about."""
    problem = getattr(error, "problem", None)
    return (problem or str(error) or type(error).__name__).splitlines()[0]


def _plain(value: Any, location: Location = ()) -> Any:
    """`value` without the types that remember formatting and comments."""
    if isinstance(value, CommentedMap):
        for key in value:
            if not isinstance(key, str | int | float | bool | None):
                raise _NotPlain(location, "a key is a string, not a list, a mapping or a date")
        return {key: _plain(item, (*location, key)) for key, item in value.items()}
    if isinstance(value, CommentedSeq):
        return [_plain(item, (*location, index)) for index, item in enumerate(value)]
    if isinstance(value, TaggedScalar):
        raise _NotPlain(location, f"the tag {value.tag.value} is not allowed; write a plain value")
    if isinstance(value, bool | ScalarBoolean):
        return bool(value)
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _NotPlain(location, f"{shown(str(value))} is not valid Unicode")
    for plain_type in (int, float, str):
        if isinstance(value, plain_type):
            return plain_type(value)
    if value is None:
        return None
    if isinstance(value, datetime.date):
        raise _NotPlain(location, f"{value} is read as a date; put it in quotes")
    raise _NotPlain(location, f"a value of the kind {type(value).__name__} is not allowed")


def _note_lines(value: Any, location: Location, path: Path, origins: dict[Location, str]) -> None:
    """Fill `origins` with the line of every key and list entry below `value`."""
    if isinstance(value, CommentedMap):
        # A key that came in by a merge (`<<`) has no line: its parent's is used.
        lines = {key: mark[0] for key, mark in (value.lc.data or {}).items()}
        children = list(value.items())
    elif isinstance(value, CommentedSeq):
        lines = {index: mark[0] for index, mark in (value.lc.data or {}).items()}
        children = list(enumerate(value))
    else:
        return
    for key, child in children:
        if key in lines:
            origins[(*location, key)] = f"{path}:{lines[key] + 1}"
        _note_lines(child, (*location, key), path, origins)
