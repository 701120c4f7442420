import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mimo.checkpoint.hf.tiny import FAMILIES, PIPELINES
from mimo.cli.main import app
from tests.mimo import tiny
from tests.mimo.config.test_recipe import RECIPE

HEAVY = ("torch", "megatron", "transformers", "numpy")


def write_recipe(folder: Path) -> Path:
    """The tiny recipe and its data."""
    tiny.write_samples(folder)
    return tiny.write_recipe(folder)


def test_check_prints_ranks_grid_lanes_and_microbatches_of_every_module(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    overrides = ["encoders.vision.grid.dp=2", "language.grid={tp: 2, sp: true}"]
    result = CliRunner().invoke(app, ["check", str(path), *overrides])
    assert result.exit_code == 0, result.output
    assert "4 ranks · 3 microbatches per step" in result.output
    vision, language, *memory = (
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in result.output.splitlines()
        if line.startswith("│")
    )
    assert vision == ["vision", "0-1", "tp 1 · cp 1 · pp 1 · dp 2", "2"]
    assert language == ["language", "2-3", "tp 2 · sp · cp 1 · pp 1 · dp 1", "1"]
    assert [row[0] for row in memory] == ["vision", "language"]
    assert [len(row) for row in memory] == [9, 9]
    assert memory[0][6] == "-"  # an encoder has no logits


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "4 samples, up to 512 tokens"),
        (
            [
                "train.micro_batch_size=1",
                "data.tokens_per_microbatch=2048",
                "data.rows_per_microbatch=1024",
            ],
            "as many samples as fit, up to 2,048 tokens and 1,024 rows",
        ),
    ],
)
def test_check_prints_the_size_of_a_microbatch(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    result = CliRunner().invoke(app, ["check", str(write_recipe(tmp_path)), *overrides])
    assert result.exit_code == 0, result.output
    assert f"microbatch of a lane: {expected}\n" in result.output


def test_check_prints_the_layout_of_every_phase(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    phases = "phases=[{name: narrow}, {name: wide, language: {grid: {tp: 2}}}]"
    colocated = ["encoders.vision.placement=colocated", "encoders.vision.grid={tp: 1}"]
    result = CliRunner().invoke(app, ["check", str(path), *colocated, phases])
    assert result.exit_code == 0, result.output
    narrow, wide = " ".join(result.output.split()).split("phase 2 of 2, ")
    assert "phase 1 of 2, narrow: 1 ranks · 3 microbatches per step" in narrow
    assert wide.startswith("wide: 2 ranks · 3 microbatches per step")


def test_bad_input_ends_with_exit_code_2_and_a_message_without_traceback(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    result = CliRunner().invoke(app, ["check", str(path), "language.grid.tpp=2", "train.steps=0"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "did you mean 'tp'?" in result.stderr
    assert "train.steps" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sources.0.path={folder}/none-*.tar", "data.sources.0.path: no shard matches"),
        ("data.validation=[{{path: {folder}/none.tar}}]", "data.validation.0.path: no shard"),
        ("data.tokenizer={folder}/none", "data.tokenizer: .*none does not exist"),
        ("data.tokenizer={folder}/tiny.yaml", "data.tokenizer: .*tiny.yaml is a file; give its fo"),
        ("data.sequence_length=16", "data.sources.0.path: 4 of 12 samples are longer than seq"),
        ("train.micro_batch_size=13", "data.sources have 12 samples together"),
    ],
)
def test_check_opens_shards_tokenizer_and_index(
    tmp_path: Path, override: str, message: str
) -> None:
    path = write_recipe(tmp_path)
    overrides = ["train.global_batch_size=13"] if "size=13" in override else []
    overrides.append(override.format(folder=tmp_path))
    for command in (["data", "index", str(path)], ["check", str(path)]):
        assert CliRunner().invoke(app, command).exit_code == 0
    result = CliRunner().invoke(app, ["check", str(path), *overrides])
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr), result.stderr


def test_check_notes_missing_indexes_and_builds_none(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    for _ in range(2):
        result = CliRunner().invoke(app, ["check", str(path), "data.sequence_length=16"])
        assert result.exit_code == 0
        assert f"note: {tmp_path}/train-*.tar: not indexed yet" in result.stdout
    result = CliRunner().invoke(app, ["check", str(path), "data.prepare=digits"])
    assert "this key was removed; `python -m examples.digits` writes" in result.stderr


@pytest.mark.parametrize("override", ["train.stps=3", "phases=[{name: a, train: {stps: 3}}]"])
def test_an_unknown_key_is_refused_before_slow_imports(tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE + f"init_from: {tmp_path}\n")
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys\nfrom mimo.cli.main import app\n"
        f"try:\n    app(['check', {str(path)!r}, {override!r}])\n"
        f"finally:\n    print([name for name in {HEAVY[:3]} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "stps: unknown key; did you mean 'steps'?" in result.stderr
    assert result.stdout.strip() == "[]"


def test_the_recipe_the_layout_and_the_command_line_load_without_the_engine() -> None:
    code = (
        "import sys, mimo.cli.main, mimo.parallel.grids, mimo.runtime.ranks\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_families_load_without_megatron() -> None:
    """A check of a recipe reads their settings; only building one needs the engine."""
    code = (
        "import importlib, pkgutil, sys, encoders, mimo.families.languages as languages\n"
        "for package in (encoders, languages):\n"
        "    for module in pkgutil.iter_modules(package.__path__):\n"
        "        importlib.import_module(f'{package.__name__}.{module.name}')\n"
        "print([name for name in sys.modules if name.startswith('megatron')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_help_lists_every_command_in_a_group_of_its_purpose() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"TERMINAL_WIDTH": "100"})
    groups = dict[str, set[str]]()
    for line in result.output.splitlines():
        if title := re.match(r"╭─ (\w+) ─", line):
            group = groups.setdefault(title[1], set())
        elif name := re.match(r"│ ([a-z]\S*) ", line):
            group.add(name[1])
    del groups["Options"]
    assert groups == {
        "Prepare": {"check", "plan", "tiny", "data", "convert"},
        "Train": {"train"},
        "Inspect": {"status", "logs", "report", "compare", "generate", "evaluate", "checkpoint"},
        "Prove": {"verify", "parity", "replay", "experiment"},
        "Cluster": {"preflight", "launch"},
    }


def test_the_help_of_tiny_names_every_family() -> None:
    result = CliRunner().invoke(app, ["tiny", "--help"])
    text = " ".join(result.output.replace("│", " ").split())
    assert f"One of {', '.join(FAMILIES)}. Or {', '.join(PIPELINES)}, a folder" in text
