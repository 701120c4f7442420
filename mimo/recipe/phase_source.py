"""The data of one stage: its own keys laid over those of the recipe, each with its origin.

Mappings merge, key by key and at every depth; lists and plain values replace what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from mimo.recipe.schema import STAGES
from mimo.recipe.source import Location, YamlSource, dotted

_FIXED = (
    (("init_from",), "all stages start from the same weights"),
    (("data", "tokenizer"), "all stages share one tokenizer"),
    (("train", "run_dir"), "all stages are in the folder of one run"),
    (("language", "family"), "all stages train the same model"),
    (("language", "model"), "all stages train the same model"),
    (("encoders", "*", "family"), "all stages train the same model"),
    (("encoders", "*", "model"), "all stages train the same model"),
)
"""Keys (`*` stands for any encoder) that no stage may change, and why."""


@dataclass
class StageSource(YamlSource):
    """What one stage is read from. `own`: locations of values that the stage itself gives."""

    name: str = ""
    index: int = 0
    own: frozenset[Location] = field(default_factory=frozenset)

    def problem(self, location: Location, message: str) -> str:
        """One line like `YamlSource.problem`, in which the stage can be told."""
        if self.nearest(location) in self.own:
            key = dotted((STAGES, self.index, *location))
            return f"{self.origin(location)}: {key}: {message}"
        return super().problem(location, message) + in_stage(self.name)


def in_stage(name: str) -> str:
    """How a line about a key that all stages share ends when it is wrong in stage `name` only."""
    return f" (in stage {name!r})"


def lay_over(base: YamlSource, index: int, name: str) -> StageSource:
    """The recipe `base` with the keys of its stage `index` laid over those outside of stages."""
    keys = {key: value for key, value in base.data[STAGES][index].items() if key != "name"}
    data = {key: value for key, value in base.data.items() if key != STAGES}
    replaced: list[Location] = []
    merged = _merged(data, keys, (), replaced)
    origins = {
        location: origin
        for location, origin in base.origins.items()
        if location[0] != STAGES and not _is_below_any(location, replaced)
    }
    prefix = (STAGES, index)
    # A stage that an override has set as a whole has no origin per key: its own serves.
    own: dict[Location, str] = {(key,): base.origin((*prefix, key)) for key in keys}
    own |= {
        location[2:]: origin
        for location, origin in base.origins.items()
        if location[:2] == prefix and location[2:3] and location[2] in keys
    }
    return StageSource(base.path, merged, origins | own, name=name, index=index, own=frozenset(own))


def _merged(base: Any, own: Any, location: Location, replaced: list[Location]) -> Any:
    """`own` over `base`; notes in `replaced` which values of `base` are gone."""
    if not (isinstance(base, dict) and isinstance(own, dict)):
        replaced.append(location)
        return deepcopy(own)
    merged = deepcopy(base)
    for key, value in own.items():
        if key in base:
            merged[key] = _merged(base[key], value, (*location, key), replaced)
        else:
            merged[key] = deepcopy(value)
    return merged


def _is_below_any(location: Location, parents: Sequence[Location]) -> bool:
    return any(location[: len(parent)] == parent for parent in parents)


# ------------------------------------------------------------------ what is refused


def fixed_problems(base: YamlSource, index: int) -> Iterator[str]:
    """Keys of stage `index` that would change what all stages share."""
    encoders = base.data.get("encoders")
    known = set(encoders) if isinstance(encoders, dict) else set()
    for location, value in leaves(base.data[STAGES][index]):
        where = (STAGES, index, *location)
        if location[0] == "encoders" and len(location) > 1 and location[1] not in known:
            message = (
                f"all stages have the same encoders; add {dotted(location[:2])} outside of stages"
            )
            yield base.problem(where[:4], message)
            known.add(location[1])  # once for all of its keys
            continue
        for pattern, reason in _FIXED:
            if _matches(location, pattern) and value != value_at(base.data, location, _NOTHING):
                yield base.problem(
                    where, f"got {value!r}, but {reason}; set {dotted(location)} outside of stages"
                )


def override_problems(base: YamlSource) -> Iterator[str]:
    """Overrides outside of stages that change nothing, because every stage gives the key itself."""
    stages: list[Any] = base.data[STAGES]
    for location in dict.fromkeys(base.overridden):
        if location[0] in (STAGES, "name"):  # a stage's name is its own
            continue
        value = value_at(base.data, location, _NOTHING)
        below = [(*location, *rest) for rest, _ in leaves(value)] or [location]
        if all(_gives(stage, leaf) for stage in stages for leaf in below):
            better = ", ".join(dotted((STAGES, n, *location)) for n in range(len(stages)))
            message = f"changes nothing, as every stage has its own; override {better}"
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
    """All values below the mapping `data` that are no mappings, with their locations."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*location, key))
    elif location:
        yield location, data


def _gives(stage: Any, location: Location) -> bool:
    """Whether a stage sets the value at `location`, alone or with a parent of it."""
    for part in location:
        if not isinstance(stage, dict):
            return True  # a plain value or a list stands in place of a parent
        if part not in stage:
            return False
        stage = stage[part]
    return True


def _matches(location: Location, pattern: Sequence[str]) -> bool:
    """Whether `location` is the key `pattern` or below it."""
    pairs = zip(location, pattern, strict=False)
    return len(location) >= len(pattern) and all(want in ("*", part) for part, want in pairs)
