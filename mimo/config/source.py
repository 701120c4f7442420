"""YAML text and command-line overrides, merged into plain data that remembers where it came from.

Every value keeps its origin: a line of the file, or the override that set it. An error found much
later (a wrong type, a grid that does not tile the world) can so point at the place to mend.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from mimo.errors import RecipeError, kind_of, nearest, shown

Location = tuple[str | int, ...]
"""The way to a value: keys of mappings and indices of lists, outermost first."""

_MAX_BYTES = 2**18  # of a recipe
_MAX_VALUES = 20_000  # of a recipe, aliases followed: nine levels of nine are 387 million
_MAX_DEPTH = 50
_MAX_DIGITS = 100
_MAX_PARTS = 32  # of the key of an override
_SHOWN = 200  # characters of an override in a message
_SECRET = re.compile(r"://(?=[^/\s]*@|\S*\?)\S*")  # a URL that may hold credentials
_TAG = "tag:yaml.org,2002:"
_NUMBERS = {f"{_TAG}int", f"{_TAG}float"}
_KEYS = {f"{_TAG}{kind}" for kind in ("str", "bool", "null", "merge")} | _NUMBERS
_VALUES = {f"{_TAG}map", f"{_TAG}seq"} | _KEYS


def dotted(location: Location) -> str:
    """`("data", "sources", 0)` as people type it: `data.sources.0`."""
    parts = (str(part) for part in location)
    return ".".join(part if len(part) <= _SHOWN else f"{part[:_SHOWN]}..." for part in parts)


REMOVED: dict[Location, str] = {
    ("stages",): "it is now called 'phases'",
    ("train", "tp_comm_overlap"): "sends no longer overlap with tensor-parallel linears",
    ("data", "prepare"): "`python -m examples.digits` writes the example data",
    ("data", "prepare_settings"): "give its options to `python -m examples.digits`",
    ("data", "directory"): "give the folder to `python -m examples.digits`",
}
"""Keys of earlier versions, and what to do instead. The part `*` is any name."""
_RECORDED = "recipe.yaml"
"""File name of the copy in a run, a job or a checkpoint."""


def removed(location: Location) -> str | None:
    """What to do instead of a key that an earlier version had; None for any other key."""
    for old, instead in REMOVED.items():
        if len(old) == len(location) and all(
            part in ("*", given) for part, given in zip(old, location, strict=True)
        ):
            return instead
    return None


def _drop_removed(section: Any, location: Location) -> None:
    if not isinstance(section, dict):
        return
    for key in [*section] if location[0] == "*" else [location[0]]:
        if len(location) > 1:
            _drop_removed(section.get(key), location[1:])
        else:
            section.pop(key, None)


def as_yaml(data: dict[str, Any]) -> str:
    """Plain data as the text of a recipe."""
    yaml, stream = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.dump(data, stream)
    return stream.getvalue()


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
        try:
            location = self._set(text)
        except ValueError as error:
            self.problems.append(f"{origin}: {error}")
            return
        for known in [known for known in self.origins if known[: len(location)] == location]:
            del self.origins[known]
        self.origins[location] = origin
        self.overridden.append(location)

    def lay_over(self, key: str, other: YamlSource) -> None:
        """Lay a file over the section `key`: it holds that section's keys, or `key` around them.

        Mappings merge key by key at every depth; lists and plain values replace what was there.
        """
        prefix: Location = () if key in other.data else (key,)
        for found in (found for found in other.data if not prefix and found != key):
            message = f"does not belong to {key}, which is all that this file is for; remove it"
            self.problems.append(other.problem((found,), message))
        given = other.data if prefix else other.data[key]

        def merged(own: Any, value: Any, location: Location) -> Any:
            if isinstance(value, dict) and isinstance(own, dict | None):
                base = own or {}
                new = {k: merged(base.get(k), v, (*location, k)) for k, v in value.items()}
                return {**base, **new}
            for known in [known for known in self.origins if known[: len(location)] == location]:
                del self.origins[known]
            return value

        self.data[key] = merged(self.data.get(key), given, (key,))
        self.origins.setdefault((key,), str(other.path))
        self.origins |= {
            (*prefix, *location): origin
            for location, origin in other.origins.items()
            if prefix or location[0] == key
        }

    def _set(self, text: str) -> Location:
        key, equals, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ValueError("needs the form dotted.key=value")
        if len(parts) > _MAX_PARTS:
            raise ValueError(f"has {len(parts)} parts; no key has that many")
        try:
            value = _load(value_text, YamlSource(self.path))
        except Exception as error:  # as when a file is read
            raise ValueError(f"the value is not YAML: {_reason(error)}") from error
        location: Location = ()
        container: Any = self.data
        for part in parts[:-1]:
            step = _step(container, part, location)
            if isinstance(container, dict) and container.get(step) is None:
                container[step] = {}
            container, location = container[step], (*location, step)
        step = _step(container, parts[-1], location)
        container[step] = value
        return (*location, step)


def read_yaml(
    path: Path, overrides: Sequence[str] = (), sections: Mapping[str, Path] | None = None
) -> YamlSource:
    """Read `path`, lay over it the files of `sections` by their keys, and apply `overrides`.

    Raises RecipeError when a file is missing, too large, not YAML, or holds no mapping, StartError
    when its file system fails.
    Overrides that cannot be applied are left in `problems` of the result.
    """
    source = _read_file(path)
    for key, file in (sections or {}).items():
        source.lay_over(key, _read_file(file))
    for override in overrides:
        source.override(override)
    return source


def _read_file(path: Path) -> YamlSource:
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
        raise kind_of(error, RecipeError)(f"{path}: cannot be read: {error}") from None
    source = YamlSource(path)
    try:
        data = _load(text, source)
    except _Refused as error:
        raise RecipeError(source.problem(error.location, str(error))) from None
    except Exception as error:  # the parser raises many types on damaged text
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = "" if mark is None else f":{mark.line + 1}"
        raise RecipeError(f"{path}{line}: not valid YAML: {_reason(error)}") from None
    if data is not None and not isinstance(data, dict):
        raise RecipeError(f"{path}:1: a recipe is a mapping of keys to values")
    source.data = data or {}
    if path.name == _RECORDED:  # written by us: a run of an earlier version stays readable
        phases = source.data.get("phases")
        for part in (source.data, *(phases if isinstance(phases, list) else ())):
            for location in REMOVED:
                _drop_removed(part, location)
    return source


class _Refused(ValueError):
    """The YAML is too large, or holds more than mappings, lists and plain scalars."""

    def __init__(self, location: Location, message: str) -> None:
        super().__init__(message)
        self.location = location


def _load(text: str, source: YamlSource) -> Any:
    """Plain data from YAML; the lines of all its keys and list entries are noted in ``source``.

    Nothing is built before its size is known. Raises _Refused, and what ruamel raises.
    """
    too_deep = f"lists and mappings are nested more than {_MAX_DEPTH} deep"
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):  # without recursion
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise MarkedYAMLError(problem=too_deep, problem_mark=event.start_mark)
    yaml = YAML(typ="safe", pure=True)
    node = yaml.compose(text)
    if node is None:
        return None
    _check(node, (), (), source)
    return yaml.constructor.construct_document(node)


def _check(node: Node, location: Location, parents: tuple[Node, ...], source: YamlSource) -> int:
    """How many values a node is, aliases followed. Raises _Refused for one that no recipe has."""
    if node.tag == f"{_TAG}timestamp":
        raise _Refused(location, f"{node.value} is read as a date; put it in quotes")
    if node.tag not in _VALUES:
        kind = node.tag.replace(_TAG, "!!")
        raise _Refused(location, f"the tag {kind} is not allowed; write a plain value")
    if isinstance(node, ScalarNode):
        if any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise _Refused(location, f"{shown(node.value)} is not valid Unicode")
        if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
            raise _Refused(location, f"holds a number of {len(node.value)} characters")
        return 1
    if any(node is parent for parent in parents):
        raise _Refused(location, "an alias contains itself")
    count = 1
    is_mapping = isinstance(node, MappingNode)
    for index, entry in enumerate(node.value):
        key, value = entry if is_mapping else (None, entry)
        if key is not None and key.tag not in _KEYS:
            raise _Refused(location, "a key is a string, not a list, a mapping or a date")
        step = index if key is None else int(key.value) if key.tag == f"{_TAG}int" else key.value
        place = (*location, step)
        mark = (key or value).start_mark
        if mark.index >= node.start_mark.index:  # not where an alias leads
            source.origins[place] = f"{source.path}:{mark.line + 1}"
        count += _check(value, place, (*parents, node), source) + is_mapping
        if count > _MAX_VALUES:
            raise _Refused(place, f"holds more than {_MAX_VALUES} values, aliases followed")
    return count


def _step(container: Any, part: str, location: Location) -> str | int:
    """The key or index that `part` stands for in `container`, at `location`. Raises ValueError."""
    if isinstance(container, dict):
        return part
    name = dotted(location) or "recipe"
    if not isinstance(container, list):
        what = f"is the value {shown(container)}, so '{part[:_SHOWN]}' cannot be set inside it"
        raise ValueError(f"{name}: {what}")
    # Not `isdigit`: that also knows digits such as ², which are not numbers.
    if part.isascii() and part.isdecimal() and len(part) < 10 and int(part) < len(container):
        return int(part)
    what = f"has {len(container)} entries, so '{part[:_SHOWN]}' is not the index of one"
    raise ValueError(f"{name}: {what}")


def _reason(error: Exception) -> str:
    """The first line that says what a YAML error is about."""
    problem = getattr(error, "problem", None)
    return (problem or str(error) or type(error).__name__).splitlines()[0]
