"""Fixtures of plans: tiny recipes whose data are indexed once for each test file."""

from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from tests.mimo import drawings, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny recipe; its subfolder `drawn` has one with generated images."""
    folder = tmp_path_factory.mktemp("plan")
    tiny.write_samples(folder)
    tiny.open_sources(load_recipe(tiny.write_recipe(folder)))
    (folder / "drawn").mkdir()
    drawings.write_recipe(folder / "drawn")
    return folder
