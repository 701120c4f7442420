"""Writes docs/recipe_keys.md: every key of a recipe, with what it takes and what it means.

Types, limits and defaults are the schema's, the sentences are the docstrings of its fields.

    python -m tests.recipe_keys docs/recipe_keys.md
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mimo.config.schema import Recipe
from mimo.families.registry import ENCODERS, GENERAL, GENERATORS, LANGUAGES, family_names

_INTRO = """\
# Recipe keys

Generated from the schema by `python -m tests.recipe_keys docs/recipe_keys.md`; edit the
docstrings of the fields, not this file. [recipes.md](recipes.md) explains how recipes are read.

`<name>` is a name of your choice, `[]` an entry of a list. A key with the default *required* has to
be given, unless the checkpoint that `init_from` names provides it. A list `phases` may override
these keys: see [phases.md](phases.md).
"""


def recipe_keys() -> str:
    """The page, as Markdown."""
    parts = [_INTRO]
    for model, places in _sections(Recipe, "", {}).items():
        parts.append(_section("##", model, places, _summary(model)))
    for families, module, place in (
        (families_in(LANGUAGES), "language", "language.model"),
        (families_in(ENCODERS), "encoder", "encoders.<name>.model"),
        (families_in(GENERATORS), "generator", "generators.<name>.model"),
    ):
        parts.append(f"## Settings of {module} families\n\nKeys under `{place}`.\n")
        parts += [_section("###", f.Settings, [name], "") for name, f in families.items()]
    return "\n".join(parts)


def families_in(package: str) -> dict[str, Any]:
    """Import the families with code of their own, by name."""
    names = (name for name in family_names(package) if name != GENERAL)
    return {name: importlib.import_module(f"{package}.{name}") for name in names}


def _sections(
    model: type[BaseModel], place: str, places: dict[type[BaseModel], list[str]]
) -> dict[type[BaseModel], list[str]]:
    """Return every model of keys below ``model``, with the places in a recipe where it stands."""
    places.setdefault(model, []).append(place)
    for name, field in model.model_fields.items():
        key = f"{place}.{name}" if place else name
        for below, suffix in _models_in(field.annotation, ""):
            _sections(below, key + suffix, places)
    return places


def _models_in(annotation: Any, suffix: str) -> Iterator[tuple[type[BaseModel], str]]:
    """The models in a field's type, and how an entry is named: `.<name>` or `[]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, suffix
    kind = getattr(annotation, "__origin__", None)
    suffix += {dict: ".<name>", tuple: "[]"}.get(kind, "") if isinstance(kind, type) else ""
    for argument in get_args(annotation):
        yield from _models_in(argument, suffix)


def _section(level: str, model: type[BaseModel], places: list[str], summary: str) -> str:
    heading = ", ".join(f"`{place}`" for place in places if place) or "The whole recipe"
    schemas = model.model_json_schema()
    lines = [f"{level} {heading}", ""]
    lines += [summary, ""] if summary else []
    lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        takes = _takes(schemas["properties"][name], schemas.get("$defs", {}))
        meaning = " ".join(_description(model, name).split())
        cells = [f"`{name}`", takes, _default(field), meaning]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _summary(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _description(model: type[BaseModel], name: str) -> str:
    """The docstring of a field; of the class that it is inherited from where it gives none."""
    for base in model.__mro__:
        fields = base.model_fields if issubclass(base, BaseModel) else {}
        if name in fields and fields[name].description:
            return fields[name].description or ""
    raise AssertionError(f"{model.__module__}.{model.__name__}.{name} has no docstring")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    if field.default_factory is not None:
        return "*derived*"
    if isinstance(field.default, BaseModel):
        return "its own defaults"
    return f"`{json.dumps(field.default)}`"


def _takes(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a JSON schema accepts, in words."""
    if "$ref" in schema:
        return "mapping of keys"
    for combined in ("anyOf", "oneOf"):
        if combined in schema:
            return " or ".join(_takes(one, definitions) for one in schema[combined])
    if "const" in schema or "enum" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{choice}`" for choice in choices)
    match schema.get("type"):
        case "boolean":
            return "`true` or `false`"
        case "integer" | "number" as kind:
            return f"{kind} {_limits(schema)}".strip()
        case "array" if "prefixItems" in schema:
            entries = schema["prefixItems"]
            return f"list of {len(entries)}: {_takes(entries[0], definitions)}"
        case "array":
            return f"list of {_takes(schema['items'], definitions)}"
        case "object":
            return "mapping"
        case kind:
            return str(kind)


def _limits(schema: dict[str, Any]) -> str:
    """`1 to 64`, or what is there of `> 0 and ≤ 1`."""
    if "minimum" in schema and "maximum" in schema:
        return f"{schema['minimum']:,.12g} to {schema['maximum']:,.12g}"
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " and ".join(
        f"{word} {schema[key]:,.12g}" for key, word in words.items() if key in schema
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(recipe_keys(), encoding="utf-8")
