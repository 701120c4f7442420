"""What fp32 leaves open is decided in fp64: rounding passes there, an error as small does not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mimo.check.verify.cells import Cell, SweepCell, sweep_recipe
from mimo.check.verify.compare import Fault
from mimo.check.verify.report import print_table, write_json
from mimo.check.verify.verifier import CellResult, Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from tests.conftest import RunRanks

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart.yaml"
SMALL = 2e-5  # twice the tolerance


# --------------------------------------------------------- faults, applied inside ranks


def err_in_gradients() -> None:
    """Every gradient is a little too large, in any precision."""
    _scale_gradients(lambda dtype: True)


def round_gradients_in_fp32() -> None:
    """Every gradient is off as if by rounding: in fp64 it is right."""
    import torch

    _scale_gradients(lambda dtype: dtype == torch.float32)


def _scale_gradients(concerns: Any) -> None:
    from mimo.engines.megatron import module as model

    finish = model.finish_gradients

    def scaled(chunks: Any, groups: Any, num_loss_tokens: int) -> None:
        finish(chunks, groups, num_loss_tokens)
        for chunk in chunks:
            if concerns(next(chunk.parameters()).dtype):
                chunk.scale_gradients(1 + SMALL)

    model.finish_gradients = scaled


def lengthen_steps_of_distributed_optimizer() -> None:
    """A distributed optimizer's steps are a little too long, a plain one's are right."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from mimo.engines.megatron import module as training

    step = training.step_optimizer

    def longer(optimizer: Any, groups: Any, rate: float, *given: Any) -> Any:
        is_distributed = isinstance(optimizer, DistributedOptimizer)
        return step(optimizer, groups, rate * (1 + SMALL) if is_distributed else rate, *given)

    training.step_optimizer = longer


# ---------------------------------------------------------------------------- tests

ONE_RANK = SweepCell("", "")
DISTRIBUTED = SweepCell("dp2", "", ("distributed optimizer",))


@pytest.fixture(scope="module")
def verifier(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """Shares the one-rank runs; `run_ranks` has started the fork server."""
    return Verifier(tmp_path_factory.mktemp("verify"), "fp32")


def run(verifier: Verifier, cell: SweepCell, fault: Fault) -> CellResult:
    recipe, layout = sweep_recipe(load_recipe(RECIPE), cell)
    result = verifier.run(Cell(cell.name, recipe, layout), fault)
    assert result.failure is None, result.failure
    assert result.comparison is not None
    assert verifier.tolerance < result.comparison.error < 1e-4
    assert result.repeated is not None
    return result


def printed(result: CellResult) -> str:
    stream = io.StringIO()
    print_table(Console(width=200, file=stream), [result], 1e-5)
    return stream.getvalue()


@pytest.mark.slow
def test_what_fp64_does_not_show_is_rounding(verifier: Verifier, tmp_path: Path) -> None:
    result = run(verifier, ONE_RANK, round_gradients_in_fp32)
    assert result.passed
    assert result.repeated is not None
    assert 0 < result.repeated.error < 1e-10
    assert "equal (fp64)" in printed(result)
    path = tmp_path / "report.json"
    write_json(path, [result], RECIPE, "fp32", 1e-5, [])
    report = json.loads(path.read_text())
    assert report["passed"] is True
    (layout,) = report["layouts"]
    assert (layout["verdict"], layout["first_difference"]) == ("equal (fp64)", None)
    assert layout["gradients"].keys() == layout["repeated_in_fp64"]["gradients"].keys()
    assert layout["against_plain_optimizer"] is None


def test_a_small_error_differs_in_fp64_too(verifier: Verifier) -> None:
    result = run(verifier, ONE_RANK, err_in_gradients)
    assert not result.passed
    (decides,) = result.deciding
    assert decides.first is not None
    assert decides.first.what == "gradient"
    assert decides.first.error == pytest.approx(SMALL, rel=0.01)
    assert "DIFFERS (fp64)" in printed(result)
    assert f"first:   {decides.first}" in printed(result)


@pytest.mark.slow
def test_rounding_under_a_distributed_optimizer_is_judged_with_the_plain_one(
    verifier: Verifier,
) -> None:
    result = run(verifier, DISTRIBUTED, round_gradients_in_fp32)
    assert result.passed
    assert result.plain is not None
    assert result.plain.error < verifier.tolerance / 10
    assert "with the plain optimizer: the engine's distributed one has no fp64" in printed(result)


@pytest.mark.slow
def test_a_small_error_of_the_distributed_optimizer_is_not_lost_in_fp64(
    verifier: Verifier,
) -> None:
    result = run(verifier, DISTRIBUTED, lengthen_steps_of_distributed_optimizer)
    assert not result.passed
    assert result.repeated is not None
    assert result.repeated.first is None
    assert result.plain is not None
    assert result.plain.first is not None
    assert result.plain.first.what == "weight"
    assert str(result.plain.first) in printed(result)
