"""Families are found by the name in the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.families.registry import encoder_family
from tests.mimo.config.test_recipe import RECIPE


def test_what_families_share_is_no_family(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(path, ["encoders.vision.family=_patches"])
    with pytest.raises(RecipeError, match="unknown family '_patches'") as caught:
        encoder_family(recipe, "vision")
    assert "qwen3_vl" in str(caught.value)
    assert "_patches" not in str(caught.value).split(";")[1]
