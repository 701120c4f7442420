"""The walks of the documentation lead through functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOPS = sorted(set(re.findall(r"`(\S+\.py):([\w.]+)`", (ROOT / "docs" / "walks.md").read_text())))


def names_of(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Functions, classes and methods that a file defines."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found |= names_of(node.body, f"{node.name}.")
    return found


@pytest.mark.parametrize(("file", "name"), STOPS, ids=lambda part: part)
def test_every_stop_of_a_walk_is_a_function_of_its_file(file: str, name: str) -> None:
    names = names_of(ast.parse((ROOT / file).read_text()).body)
    assert name in names, f"{file} has no {name}: it moved, and docs/walks.md should follow"
