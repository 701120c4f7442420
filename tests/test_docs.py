"""The documentation names what is there: files, links, commands, recipe keys and functions."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mimo.cli.main import app
from tests.recipe_keys import recipe_keys

ROOT = Path(__file__).resolve().parent.parent
# The changelog names what is gone, too.
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)

_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_FILE = re.compile(
    r"(?<![\w/.-])(?:mimo|bridge|data|encoders|recipes|docs|tests)/[\w/.-]*(?![\w/.*<{-])"
)
_EXTRA = re.compile(r"pip install '\.\[([a-z]+)\]'")
_COMMAND = re.compile(r"(?:^|`)mimo ([a-z][a-z-]*)", re.MULTILINE)


def test_the_page_of_recipe_keys_is_that_of_the_schema() -> None:
    page = ROOT / "docs" / "recipe_keys.md"
    assert page.read_text(encoding="utf-8") == recipe_keys(), (
        f"run: python -m tests.recipe_keys {page.relative_to(ROOT)}"
    )


def test_every_shipped_recipe_is_listed() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for recipe in sorted(ROOT.glob("recipes/*.yaml")):
        assert f"(../recipes/{recipe.name})" in page, recipe.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_is_there(page: Path) -> None:
    assert not list(_wrong(page))


WRONG = ("[x](nowhere.md)", "see `mimo/nowhere.py`", "tests/nowhere", "mimo fly away")
FOREIGN = ("`data/train-*.tar`", "/data/train.tar", "runs/mimo/x.py", "https://a.b/mimo/x.py")


@pytest.mark.parametrize("text", [*WRONG, "`pip install '.[nothing]'`", *FOREIGN])
def test_the_search_finds_what_is_not_there_and_leaves_files_of_others(
    text: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(list(_wrong(page))) == (text not in FOREIGN)


def _wrong(page: Path) -> Iterator[str]:
    """Links, files and commands on a page that do not exist."""
    text = page.read_text(encoding="utf-8")
    for target in _LINK.findall(text):
        if not (page.parent / target).exists():
            yield f"link to {target}"
    for name in _FILE.findall(_LINK.sub("", text)):
        if not (ROOT / name.rstrip(".")).exists():
            yield f"file {name}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in _EXTRA.findall(text):
        if name not in extras:
            yield f"extra {name}"
    for name in _COMMAND.findall(text):
        if name not in _commands():
            yield f"command mimo {name}"


def _commands() -> set[str]:
    functions = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback is not None
    }
    return functions | {group.name for group in app.registered_groups if group.name}


# Functions that the walks of the documentation lead through.
STOPS = sorted(set(re.findall(r"`(\S+\.py):([\w.]+)`", (ROOT / "docs" / "walks.md").read_text())))


@pytest.mark.parametrize(("file", "name"), STOPS, ids=lambda part: part)
def test_every_stop_of_a_walk_is_a_function_of_its_file(file: str, name: str) -> None:
    scope: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        names = {getattr(node, "name", ""): node for node in ast.iter_child_nodes(scope)}
        assert part in names, f"{file} has no {name}: it moved, and docs/walks.md should follow"
        scope = names[part]
