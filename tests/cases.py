"""Which cases of a test `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """For `parametrize`: cases that are their names; all but the chosen ones are slow.

    Choose so that each capability which the cases show, such as an axis of a grid, is in one.
    """
    return quick_values({name: name for name in names}, *chosen)


def quick_values(cases: Mapping[str, Any], *chosen: str) -> list[Any]:
    """The same for cases by name."""
    assert chosen, "one case at least is quick"
    assert not (missing := set(chosen) - set(cases)), f"no such cases: {sorted(missing)}"
    return [
        pytest.param(case, id=name, marks=() if name in chosen else pytest.mark.slow)
        for name, case in cases.items()
    ]
