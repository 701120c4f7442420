"""Experiments of the tiny recipe, trained for real."""

from __future__ import annotations

import csv
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mimo.errors import EXIT_CONTINUE
from mimo.report.experiment_results import follow
from mimo.report.experiment_runs import Run, num_steps
from mimo.report.runs import read_curves
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.disturbed import disturbing
from tests.mimo.runs import ADAM, command, mimo, run

FILE = """
name: real
recipe: tiny.yaml
set:
  train.micro_batch_size: 2
  train.optimizer: adam
  train.learning_rate: 0.003
  train.log_every: 4
  encoders.vision.grid: {dp: 2}
layouts:
  - {name: split, language.grid: {dp: 2}}
  - {name: shared, encoders.vision.placement: colocated, language.grid: {tp: 2}}
steps: 30
"""


@pytest.mark.slow
def test_layouts_follow_each_other_and_one_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    tiny.write_samples(tmp_path)
    tiny.write_recipe(tmp_path)
    file = tmp_path / "real.yaml"
    file.write_text(FILE)
    folder = tmp_path / "runs" / "real"
    first = Run(folder, "split", 1)
    job = subprocess.Popen(command("experiment", file), stdout=subprocess.PIPE)
    while num_steps(first.curves()) < 5 and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == EXIT_CONTINUE
    assert 5 <= num_steps(first.curves()) < 30

    done = mimo("experiment", file, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 layouts follow the losses of split" in done.stdout
    with (folder / "results.csv").open() as lines:
        rows = {row["layout"]: row for row in csv.DictReader(lines)}
    assert {row["at_step"] for row in rows.values()} != {"1"}
    for name, row in rows.items():
        sent, least = (float(row[f"bridge{of}_bytes_vision_forward"]) for of in ("", "_least"))
        # A rank that encodes what it needs itself sends it to the other one of its lane alone.
        assert sent == least if name == "split" else least / 2 < sent < 2 * least
        assert float(row["memory_gib_language"]) > 0
        assert float(row["seconds_language_forward"]) > 0
    assert (folder / "index.html").stat().st_size > 100_000


def double_the_encoder(*_: object) -> None:
    """Runs inside ranks."""
    from mimo.engines.megatron.module import MegatronModule

    finish = MegatronModule.finish_gradients

    def finish_doubled(self: MegatronModule, num_loss_tokens: float) -> None:
        finish(self, num_loss_tokens if self.name == "language" else num_loss_tokens / 2)  # type: ignore[arg-type]

    MegatronModule.finish_gradients = finish_doubled  # type: ignore[method-assign]


@pytest.mark.slow
def test_doubled_gradients_of_an_encoder_do_not_follow(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    for name in ("reference", "again"):
        grid = "language.grid.dp=2" if name == "again" else "language.grid.dp=1"
        run(run_ranks, recipe, *ADAM, f"name={name}", grid, "train.micro_batch_size=2")
    train = disturbing(monkeypatch, f"{__name__}:double_the_encoder", None)
    assert train(recipe, [*ADAM, "name=doubled", "train.micro_batch_size=2"]) == 0
    reference, again, doubled = (
        read_curves(tmp_path / "runs" / name / "metrics.jsonl")
        for name in ("reference", "again", "doubled")
    )
    assert follow(again, reference, "fp32").problem == ""
    assert "grad_norm" in follow(doubled, reference, "fp32").problem
