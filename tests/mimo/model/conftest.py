"""The tiny data and recipe of `tests.mimo.tiny`, for the tests of a module or for one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mimo import tiny


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tiny.write_samples(directory)
    return tiny.write_recipe(directory)


@pytest.fixture(scope="module")
def two_encoder_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny_two")
    tiny.write_samples(directory, videos_per_sample=tiny.VIDEOS_PER_SAMPLE)
    return tiny.write_recipe(directory)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path)
    return tiny.write_recipe(tmp_path)
