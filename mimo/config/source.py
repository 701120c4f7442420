"""YAML and command-line overrides, merged into plain data that remembers where it came from.

Every value keeps its origin: a line of the file, or the override that set it. An error found much
later, such as a grid that does not tile the world, still points at the place to mend.
"""

import io
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from mimo.errors import RecipeError, kind_of, nearest, shown

Location = tuple[str | int, ...]
"""The way to a value: keys of mappings and indices of lists, outermost first."""

PHASES = "phases"
"""The key of a file with several recipes, which `mimo.config.phases` splits."""

_NAMES: dict[str, dict[str, str]] = YAML(typ="safe").load(
    (files("mimo.config") / "names.yaml").read_text(encoding="utf-8")
)
REMOVED: dict[Location, str] = {
    tuple(key.split(".")): instead for key, instead in _NAMES["removed"].items()
}
"""Keys of earlier versions, and what to use instead."""
KEY_OF = {name: key for key, names in _NAMES["of other trainers"].items() for name in names.split()}
"""Our keys by their names in other trainers."""

_RECORDED = "recipe.yaml"  # the copy in a run, a job or a checkpoint
_MAX_BYTES = 2**18
_TAG = "tag:yaml.org,2002:"
_SECRET = re.compile(r"://(?=[^/\s]*@|\S*\?)\S*")  # a URL that may hold credentials


def dotted(location: Location) -> str:
    """Write `("data", "sources", 0)` as people type it: `data.sources.0`."""
    return ".".join(str(part) for part in location)


def as_yaml(data: dict[str, Any]) -> str:
    """Write plain data as the text of a recipe."""
    yaml, stream = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.dump(data, stream)
    return stream.getvalue()


def merge(base: Any, changes: Any) -> Any:
    """Merge mappings key by key at every depth, and into a list by index; others replace."""
    by_index = isinstance(base, list)
    if not (isinstance(changes, dict) and (by_index or isinstance(base, dict))):
        return deepcopy(changes)
    if by_index and not all(isinstance(key, int) for key in changes):
        return deepcopy(changes)  # the schema refuses it
    merged = deepcopy(base)
    for key, value in changes.items():
        merged[key] = merge(base[key] if by_index or key in base else None, value)
    return merged


def leaves(data: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Yield all values inside the mapping `data` that are not mappings, with their locations."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*location, key))
    elif location:
        yield location, data


@dataclass
class YamlSource:
    """Plain data with an origin per value.

    origins: `recipes/x.yaml:12` or `override 'a.b=1'` by location. overridden: locations that
    overrides have set. problems: errors of reading, to be reported together with later ones.
    """

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)
    overridden: list[Location] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def problem(self, location: Location, message: str) -> str:
        """Format an error at `location` as one line: its origin, the dotted key, the message."""
        return f"{self.origin(location)}: {dotted(location) or 'recipe'}: {message}"

    def origin(self, location: Location) -> str:
        """Where the value was written; for a missing value, where its parent was."""
        known = self.nearest(location)
        return str(self.path) if known is None else self.origins[known]

    def nearest(self, location: Location) -> Location | None:
        """`location`, or its closest parent whose origin is known."""
        prefixes = (location[:length] for length in range(len(location), 0, -1))
        return next((prefix for prefix in prefixes if prefix in self.origins), None)

    def override(self, text: str) -> None:
        """Apply `dotted.key=value`; the value is YAML. Errors are added to `problems`."""
        origin = f"override '{_SECRET.sub('://...', text)}'"
        try:
            location = self._set(text)
        except ValueError as error:
            self.problems.append(f"{origin}: {error}")
            return
        self._forget_origins(location)
        self.origins[location] = origin
        self.overridden.append(location)

    def merge_site(self, site: "YamlSource") -> None:
        """Merge a file of the keys of `cluster`, with or without that name around them."""
        prefix: Location = () if [*site.data] == ["cluster"] else ("cluster",)
        changes = {"cluster": site.data} if prefix else site.data
        for location, _ in leaves(changes):
            self._forget_origins(location)
        self.data = merge(self.data, changes)
        self.origins.setdefault(("cluster",), str(site.path))
        self.origins |= {(*prefix, *location): o for location, o in site.origins.items()}

    def _forget_origins(self, location: Location) -> None:
        for known in [known for known in self.origins if known[: len(location)] == location]:
            del self.origins[known]

    def _set(self, text: str) -> Location:
        key, equals, value_text = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ValueError("needs the form dotted.key=value")
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


def read_yaml(path: Path, overrides: Sequence[str] = (), site: Path | None = None) -> YamlSource:
    """Read `path`, merge the file `site` into `cluster`, and apply `overrides`.

    Raises RecipeError for a file that is no recipe, StartError if its file system fails. Overrides
    that cannot be applied are left in `problems`.
    """
    source = _read_file(path)
    if site is not None:
        source.merge_site(_read_file(site))
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
            raise RecipeError(f"{path}: a recipe has at most {_MAX_BYTES} bytes")
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
    except Exception as error:  # the parser raises many types on damaged text
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = "" if mark is None else f":{mark.line + 1}"
        raise RecipeError(f"{path}{line}: not valid YAML: {_reason(error)}") from None
    if data is not None and not isinstance(data, dict):
        raise RecipeError(f"{path}:1: a recipe is a mapping of keys to values")
    source.data = data or {}
    if path.name == _RECORDED:  # so that runs of earlier versions stay readable
        phases = source.data.get(PHASES)
        for recipe in (source.data, *(phases if isinstance(phases, list) else ())):
            for location in REMOVED:
                _drop(recipe, location)
    return source


def _drop(section: Any, location: Location) -> None:
    for key in location[:-1]:
        section = section.get(key) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.pop(location[-1], None)


class _Constructor(SafeConstructor):
    """Builds plain values only; a date is text."""


_Constructor.add_constructor(f"{_TAG}timestamp", SafeConstructor.construct_yaml_str)


def _load(text: str, source: YamlSource) -> Any:
    """Build plain data from YAML, and record the lines of keys and list entries in `source`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    node = yaml.compose(text)
    if node is None:
        return None
    for location, line in _lines(node, ()):
        source.origins[location] = f"{source.path}:{line}"
    return yaml.constructor.construct_document(node)


def _lines(node: Node, location: Location) -> Iterator[tuple[Location, int]]:
    """Every key and list entry below `node`, with the line that it is on."""
    entries: list[tuple[str | int, Node, Node]] = []
    if isinstance(node, MappingNode):
        for key, value in node.value:
            name = int(key.value) if key.tag == f"{_TAG}int" else key.value
            if isinstance(name, str | int):  # a list is no key; the parser refuses it
                entries.append((name, key, value))
    elif isinstance(node, SequenceNode):
        entries = [(index, value, value) for index, value in enumerate(node.value)]
    for name, mark, value in entries:
        if mark.start_mark.index >= node.start_mark.index:  # not where an alias leads
            yield (*location, name), mark.start_mark.line + 1
        yield from _lines(value, (*location, name))


def _step(container: Any, part: str, location: Location) -> str | int:
    """The key or index that `part` stands for in `container`, at `location`. Raises ValueError."""
    if isinstance(container, dict):
        return part
    name = dotted(location) or "recipe"
    if not isinstance(container, list):
        raise ValueError(
            f"{name}: is the value {shown(container)}, so '{part}' cannot be set inside it"
        )
    if part.isascii() and part.isdecimal() and int(part) < len(container):
        return int(part)
    raise ValueError(f"{name}: has {len(container)} entries, so '{part}' is not the index of one")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "lists and mappings are nested too deep"
    problem = getattr(error, "problem", None)
    return (problem or str(error) or type(error).__name__).splitlines()[0]
