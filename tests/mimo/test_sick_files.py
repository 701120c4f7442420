"""Files that a file system does not give: nothing is known of them, so a job is tried again."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.cli.main import app
from mimo.errors import InputError, file_system_failed
from tests.mimo.model.test_fsdp_runs import make

FILES = {
    "recipe": "recipe.yaml",
    "shard": "train-00000.tar",
    "tokenizer": "tokenizer.json",
    "settings of the tokenizer": "tokenizer_config.json",
    "configuration": "config.json",
    "processor": "preprocessor_config.json",
}


CODES = ((errno.ESTALE, 1), (errno.EIO, 1), (errno.EACCES, 2))


def failing(name: str, opened: Callable[..., Any], code: int) -> Callable[..., Any]:
    def fail(file: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(file, str | os.PathLike) and Path(file).name == name:
            raise OSError(code, os.strerror(code), str(file))
        return opened(file, *args, **settings)

    return fail


OPENING = ((builtins, "open"), (io, "open"), (os, "open"))
LOOKING = ((os, "stat"), (os, "scandir"))


@contextmanager
def sick(
    name: str, code: int, functions: Sequence[tuple[ModuleType, str]] = OPENING
) -> Iterator[None]:
    """Inside, no file of that name can be opened, or none can be looked at."""
    with ExitStack() as stack:
        for module, function in functions:
            fails = failing(name, getattr(module, function), code)
            stack.enter_context(mock.patch.object(module, function, fails))
        yield


@pytest.mark.parametrize("name", FILES.values(), ids=FILES)
def test_a_file_system_that_fails_is_no_bad_input_and_a_file_without_rights_is(
    tmp_path: Path, name: str
) -> None:
    recipe = make(tmp_path, "qwen3_vl")
    for code, ends_with in CODES:
        with sick(name, code):
            result = CliRunner().invoke(app, ["data", "index", str(recipe)])
        assert result.exit_code == ends_with, result.output
        assert name in result.output
        assert os.strerror(code) in result.output
        assert "Traceback" not in result.output
    assert CliRunner().invoke(app, ["data", "index", str(recipe)]).exit_code == 0


@pytest.mark.parametrize("name", [FILES["recipe"], FILES["shard"], "shards"])
def test_a_file_that_cannot_even_be_looked_at_is_not_taken_for_missing(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "shards").mkdir()
    recipe = make(tmp_path / "shards", "qwen3_vl")
    with sick(name, errno.ESTALE, LOOKING):
        result = CliRunner().invoke(app, ["data", "index", str(recipe)])
    assert result.exit_code == 1, result.output
    assert "Stale file handle" in result.output


def test_what_a_library_says_of_a_file_system_in_its_own_words_is_understood() -> None:
    def wrapped(code: int) -> Exception:
        error = OSError("Can't load the tokenizer")
        error.__context__ = OSError(code, os.strerror(code))  # transformers says no `from`
        return error

    assert file_system_failed(wrapped(errno.ESTALE))
    assert not file_system_failed(wrapped(errno.ENOENT))
    assert not file_system_failed(ValueError("of nothing"))


def test_weights_that_a_run_starts_from_are_no_bad_input_either(tmp_path: Path) -> None:
    recipe = load_recipe(make(tmp_path, "qwen3_vl"))
    for code, ends_with in CODES:
        with (
            sick("model.safetensors", code),
            pytest.raises(InputError, match=r"recipe.yaml:\d+: init_from: .* cannot be") as caught,
        ):
            initial_weights(recipe)
        assert caught.value.exit_code == ends_with
    assert initial_weights(recipe) is not None
