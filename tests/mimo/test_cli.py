import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mimo.cli import app
from tests.mimo import tiny
from tests.mimo.recipe.test_recipe import RECIPE

HEAVY = ("torch", "megatron", "transformers", "numpy")


def test_check_prints_ranks_grid_lanes_and_microbatches_of_every_module(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
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
    assert [len(row) for row in memory] == [7, 7]
    assert memory[0][5] == "-"  # an encoder has no logits


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "4 samples, up to 512 tokens"),
        (["train.micro_batch_size=1"], "1 sample, up to 128 tokens"),
        (
            ["train.micro_batch_size=1", "data.tokens_per_microbatch=2048"],
            "as many samples as fit, up to 2,048 tokens",
        ),
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
    result = CliRunner().invoke(app, ["check", str(tiny.write_recipe(tmp_path)), *overrides])
    assert result.exit_code == 0, result.output
    assert f"microbatch of a lane: {expected}\n" in result.output


def test_check_prints_the_layout_and_the_environment_of_every_phase(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    phases = "phases=[{name: narrow}, {name: wide, language: {grid: {tp: 2}}}]"
    colocated = ["encoders.vision.placement=colocated", "encoders.vision.grid={tp: 1}"]
    result = CliRunner().invoke(app, ["check", str(path), *colocated, phases])
    assert result.exit_code == 0, result.output
    narrow, wide = " ".join(result.output.split()).split("phase 2 of 2, ")
    assert "phase 1 of 2, narrow: 1 ranks · 3 microbatches per step" in narrow
    assert wide.startswith("wide: 2 ranks · 3 microbatches per step")
    environment = "environment of 2 ranks, 0 the first: CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert environment in wide
    assert environment not in narrow


def test_bad_input_ends_with_exit_code_2_and_a_message_without_traceback(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    result = CliRunner().invoke(app, ["check", str(path), "language.grid.tpp=2", "train.steps=0"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "did you mean 'tp'?" in result.stderr
    assert "train.steps" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_recipe_the_layout_and_the_command_line_load_without_the_engine() -> None:
    code = (
        "import sys, mimo.cli, mimo.layout.grids, mimo.launch.ranks\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
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
        "Prepare": {"check", "prepare", "tiny", "data", "convert"},
        "Train": {"quickstart", "train"},
        "Inspect": {
            *("status", "top", "logs", "report", "compare"),
            *("generate", "evaluate", "checkpoint"),
        },
        "Prove": {"verify", "parity", "replay", "experiment", "bench"},
        "Cluster": {"preflight", "launch"},
    }
