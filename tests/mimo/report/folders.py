"""Run folders made by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mimo.runtime.heartbeat import RankState

RECIPE = """\
name: made
data: {sources: [{path: a.tar, weight: 3.0}, {path: b.tar}]}
train: {steps: 100, learning_rate: 0.1}
"""


def make_run(
    folder: Path,
    recipe: str = RECIPE,
    num_steps: int = 100,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write a run with loss 200 - n at step n, every tenth step measured and the last line cut.

    metrics: further ones of every step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(num_steps):
            line = {
                "step": step,
                "loss": 200.0 - step,
                "lr": 0.1,
                "tokens_per_second": 1000.0 + step % 3,
                "mfu": None,
                "epochs": {"0": step / 100, "1": 0.5},
                **(metrics or {}),
            }
            if step % 10 == 9:
                line |= {"seconds_vision_encode": 2.0, "seconds_vision_encode_max": 3.0}
                line |= {"seconds_vision_bridge_wait": 2.0, "idle_fraction": 0.5}
            file.write(json.dumps(line) + "\n")
            if step % 50 == 49:
                file.write(json.dumps({"step": step + 1, "validation_loss": 7.0}) + "\n")
        file.write('{"step": 100, "loss": 9')
    return folder


def write_state(folder: Path, rank: int, **state: Any) -> None:
    """Write the file of a rank that answers, or of a rank that failed."""
    state = {"who": "vision, lane 0", "host": "a", "step": 3, "activity": "update", **state}
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(RankState(rank, **state)))
    (folder / "ranks" / f"rank_{rank}.json").write_text(text)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, lines: str) -> Path:
    """Install a command that runs ``lines`` of the shell; return its file."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program
