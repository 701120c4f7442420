"""Fixtures of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mimo import tiny


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A tiny recipe with its samples beside it."""
    tiny.write_samples(tmp_path)
    return tiny.write_recipe(tmp_path)
