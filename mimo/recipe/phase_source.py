"""The data of one phase: the phase's keys laid over those of the recipe, each with its origin.

Mappings merge key by key at every depth; lists and plain values replace what was there. A mapping
over a list changes entries of it, by their numbers or by their paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from mimo.errors import shown
from mimo.recipe.schema import PHASES
from mimo.recipe.source import Location, YamlSource, dotted

_FIXED = (
    (("init_from",), "all phases start from the same weights"),
    (("data", "tokenizer"), "all phases share one tokenizer"),
    (("train", "run_dir"), "all phases are in the folder of one run"),
    (("language", "family"), "all phases train the same model"),
    (("language", "model"), "all phases train the same model"),
    (("encoders", "*", "family"), "all phases train the same model"),
    (("encoders", "*", "model"), "all phases train the same model"),
)
"""Keys (`*` stands for any encoder) that no phase may change, and why."""


@dataclass
class PhaseSource(YamlSource):
    """What one phase is read from. `own`: locations of the values that the phase itself sets."""

    name: str = ""
    index: int = 0
    own: frozenset[Location] = field(default_factory=frozenset)

    def problem(self, location: Location, message: str) -> str:
        """One line like `YamlSource.problem` that also shows which phase it is about."""
        if self.nearest(location) in self.own:
            key = dotted((PHASES, self.index, *location))
            return f"{self.origin(location)}: {key}: {message}"
        return super().problem(location, message) + in_phase(self.name)


def in_phase(name: str) -> str:
    """The end of a line about a key that all phases share but is wrong only in phase `name`."""
    return f" (in phase {name!r})"


def lay_over(base: YamlSource, index: int, name: str) -> PhaseSource:
    """The recipe `base` with the keys of its phase `index` laid over those outside `phases`."""
    keys = {key: value for key, value in base.data[PHASES][index].items() if key != "name"}
    data = {key: value for key, value in base.data.items() if key != PHASES}
    replaced: list[Location] = []
    merged = _merged(data, keys, (), replaced)
    origins = {
        location: origin
        for location, origin in base.origins.items()
        if location[0] != PHASES and not _is_below_any(location, replaced)
    }
    prefix = (PHASES, index)
    # A phase set as a whole by an override has no origin per key; each key gets the phase's.
    own: dict[Location, str] = {(key,): base.origin((*prefix, key)) for key in keys}
    own |= {
        location[2:]: origin
        for location, origin in base.origins.items()
        if location[:2] == prefix and location[2:3] and location[2] in keys
    }
    return PhaseSource(base.path, merged, origins | own, name=name, index=index, own=frozenset(own))


def _merged(base: Any, own: Any, location: Location, replaced: list[Location]) -> Any:
    """`own` laid over `base`; adds to `replaced` where values of `base` were replaced."""
    if not (isinstance(base, dict | list) and isinstance(own, dict)):
        replaced.append(location)
        return deepcopy(own)
    merged = deepcopy(base)
    for key, value in own.items():
        if isinstance(base, list) or key in base:
            merged[key] = _merged(base[key], value, (*location, key), replaced)
        else:
            merged[key] = deepcopy(value)
    return merged


def number_entries(base: YamlSource) -> Iterator[str]:
    """Where phases change entries of a list, name these by their numbers; yields what names none.

    To be called once, before anything else here.
    """
    for index, phase in enumerate(base.data[PHASES]):
        yield from _number_entries(base, base.data, phase, (PHASES, index))


def _number_entries(base: YamlSource, below: Any, own: Any, where: Location) -> Iterator[str]:
    """The same for the value `own` of a phase, at `where`, laid over `below`."""
    if not (isinstance(below, dict | list) and isinstance(own, dict)):
        return
    for key in list(own) if isinstance(below, list) else ():
        value, place = own.pop(key), (*where, key)
        paths = [one.get("path") if isinstance(one, dict) else None for one in below]
        numbers = [n for n, path in enumerate(paths) if key in (n, str(n), path)]
        if len(numbers) != 1 or numbers[0] in own:
            message = (
                f"got {shown(key)}, which names no entry that is not named already; give the "
                f"number of one, from 0 to {len(below) - 1}, or its path; or give the whole list"
            )
            yield base.problem(place, message)
            continue
        own[numbers[0]] = value
        for known in [known for known in base.origins if known[: len(place)] == place]:
            moved = (*where, numbers[0], *known[len(place) :])
            base.origins[moved] = base.origins.pop(known)
    for key, value in own.items():
        if isinstance(below, list) or key in below:
            yield from _number_entries(base, below[key], value, (*where, key))


def _is_below_any(location: Location, parents: Sequence[Location]) -> bool:
    return any(location[: len(parent)] == parent for parent in parents)


# ------------------------------------------------------------------ what is refused


def fixed_problems(base: YamlSource, index: int) -> Iterator[str]:
    """Keys of phase `index` that would change what all phases share."""
    encoders = base.data.get("encoders")
    known = set(encoders) if isinstance(encoders, dict) else set()
    for location, value in leaves(base.data[PHASES][index]):
        where = (PHASES, index, *location)
        if location[0] == "encoders" and len(location) > 1 and location[1] not in known:
            message = (
                f"all phases have the same encoders; add {dotted(location[:2])} outside of phases"
            )
            yield base.problem(where[:4], message)
            known.add(location[1])  # report it once for all of its keys
            continue
        for pattern, reason in _FIXED:
            if _matches(location, pattern) and value != value_at(base.data, location, _NOTHING):
                yield base.problem(
                    where, f"got {value!r}, but {reason}; set {dotted(location)} outside of phases"
                )


def override_problems(base: YamlSource) -> Iterator[str]:
    """Overrides outside `phases` that change nothing, because every phase sets the key itself."""
    phases: list[Any] = base.data[PHASES]
    for location in dict.fromkeys(base.overridden):
        if location[0] in (PHASES, "name"):  # a phase's name is not the recipe's
            continue
        value = value_at(base.data, location, _NOTHING)
        below = [(*location, *rest) for rest, _ in leaves(value)] or [location]
        if all(_gives(phase, leaf) for phase in phases for leaf in below):
            better = ", ".join(dotted((PHASES, n, *location)) for n in range(len(phases)))
            message = f"changes nothing, as every phase has its own; override {better}"
            yield base.problem(location, message)


_NOTHING = object()


def value_at(data: Any, location: Location, default: Any) -> Any:
    """The value at `location` inside mappings, or `default`."""
    for part in location:
        if not isinstance(data, dict) or part not in data:
            return default
        data = data[part]
    return data


def leaves(data: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """All values inside the mapping `data` that are not mappings, with their locations."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*location, key))
    elif location:
        yield location, data


def _gives(phase: Any, location: Location) -> bool:
    """Whether a phase sets the value at `location`, by itself or through a parent."""
    for part in location:
        if not isinstance(phase, dict):
            return True  # a plain value or a list stands in place of a parent
        if part not in phase:
            return False
        phase = phase[part]
    return True


def _matches(location: Location, pattern: Sequence[str]) -> bool:
    """Whether `location` is the key `pattern` or below it."""
    pairs = zip(location, pattern, strict=False)
    return len(location) >= len(pattern) and all(want in ("*", part) for part, want in pairs)
