"""`mimo verify` as a command: exit codes, what it prints and writes, and doubtful errors."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mimo.check.verify as command
from mimo.check.compare import Fault
from mimo.check.layouts import Cell, SweepCell
from mimo.check.verify import CellResult, Verifier, print_results, write_results
from mimo.cli.main import app
from tests.conftest import RunRanks
from tests.mimo.check.cells import RECIPE, run_cell
from tests.mimo.check.test_verify_faults import average_encoder_gradients

SMALL = 2e-5  # twice the tolerance
UNEVEN = ["language.grid={dp: 1}", "encoders.vision.grid.dp=2"]


def verify(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", str(RECIPE), *arguments])


class FaultyVerifier(Verifier):
    """Every layout has a bug."""

    def run(self, cell: Cell, fault: object = None) -> CellResult:
        return super().run(cell, average_encoder_gradients)


def test_an_equal_layout_ends_with_0_and_every_error_in_the_json(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "report.json"
    result = verify(*UNEVEN, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "the recipe: vision dp2 (fan-in lanes) → language 1 rank = 3 ranks" in result.output
    assert "adam_eps 0.001 instead of 1e-08" in result.output
    assert "[1/1] equal" in result.output
    assert "1 of 1 layouts take the steps of one rank" in result.output
    report = json.loads(path.read_text())
    assert report["passed"] is True
    assert report["precision"] == "fp32"
    (layout,) = report["layouts"]
    assert layout["ranks"] == 3
    assert layout["grids"]["vision"]["dp"] == 2
    comparison = layout["comparison"]
    assert comparison["first"] is None
    assert [sorted(s) for s in comparison["scalars"]] == [["grad_norm", "loss", "loss_tokens"]] * 2
    gradients, weights = comparison["gradients"], comparison["weights"]
    assert gradients.keys() == weights.keys()
    assert "vision.merger.linear_fc2.weight" in gradients
    assert "language.decoder.layers.3.mlp.linear_fc2.weight" in gradients
    errors = [e for tensors in (gradients, weights) for es in tensors.values() for e in es]
    assert 0 < max(errors) <= 1e-5


@pytest.mark.slow
def test_each_phase_is_compared_with_its_layout_and_frozen_parts(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    adapt, everything = "language: {freeze: true}", "language: {grid: {pp: 2, dp: 1}}"
    phases = f"phases=[{{name: adapt, {adapt}}}, {{name: all, {everything}}}]"
    path = tmp_path / "report.json"
    result = verify(phases, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "phase 1 of 2, adapt\nthe recipe: vision 1 rank" in result.output
    assert "[2/2] equal   all: the recipe's layout" in result.output
    first, second = json.loads(path.read_text())["layouts"]
    names = [f"{phase}: the recipe's layout" for phase in ("adapt", "all")]
    assert [first["name"], second["name"]] == names
    assert (first["grids"]["language"]["dp"], second["grids"]["language"]["pp"]) == (2, 2)
    learns = [
        any(n.startswith("language.") and e for n, e in s["comparison"]["gradients"].items())
        for s in (first, second)
    ]
    assert learns == [False, True]


def test_a_difference_ends_with_1_and_names_the_first_parameter_with_both_values(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Verifier", FaultyVerifier)
    path = tmp_path / "report.json"
    result = verify(*UNEVEN, "--json", str(path))
    assert result.exit_code == 1
    assert "[1/1] DIFFERS" in result.output
    assert "0 of 1 layouts take the steps of one rank" in result.output
    first = json.loads(path.read_text())["layouts"][0]["comparison"]["first"]
    assert first["name"] == "vision.patch_embed.weight"
    assert first["got"] == pytest.approx(first["expected"] / 2, rel=1e-3)
    expected = (
        f"first:   step 1: gradient of vision.patch_embed.weight at {first['index']} on vision, "
        f"rank {first['where'].split()[2]} (stage 0 · "
    )
    assert expected in result.output
    assert f"{first['got']:.9g}, expected {first['expected']:.9g}" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["language.grid.tpp=2"], "did you mean 'tp'?"),
        (["language.grid.dp=3"], "train.global_batch_size"),
        (["language.model.num_query_groups=3"], "must be a multiple of num_query_groups"),
        (["--max-ranks", "2"], "--max-ranks 2: no layout with language.grid.dp fits"),
        (["language.grid={dp: 1}", "--max-ranks", "1"], "the modules need 2 ranks, but got 1"),
        (["--max-ranks", "1", "--layouts", "sweep"], "every layout of the sweep needs more ranks"),
        (["encoders={}", "--layouts", "sweep"], "a recipe with an encoder or a generator"),
        (["--precision", "bf16"], "--precision"),
        (["--layouts", "sweep", "--full"], "sweep has its own layouts; remove --full"),
    ],
)
def test_bad_input_ends_with_2_and_a_message_before_any_rank_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "warm_up_on_cpu", lambda preload: pytest.fail("ranks would start"))
    result = verify(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_json_path_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = verify("--json", str(tmp_path))
    assert result.exit_code == 2
    assert f"--json {tmp_path}: Is a directory" in result.output


# ------------------------------------- rounding, or an error as small: fp64 decides


def err_in_gradients() -> None:
    """Every gradient is a little too large, in any precision."""
    _scale_gradients(lambda dtype: True)


def round_gradients_in_fp32() -> None:
    """Every gradient is off as if by rounding: in fp64 it is right."""
    import torch

    _scale_gradients(lambda dtype: dtype == torch.float32)


def _scale_gradients(concerns: Any) -> None:
    from mimo.engines.megatron.module import MegatronModule

    finish = MegatronModule.finish_gradients

    def scaled(module: Any, num_loss_tokens: int) -> None:
        finish(module, num_loss_tokens)
        for chunk in module.chunks if module.optimizers else ():
            if concerns(next(chunk.parameters()).dtype):
                chunk.scale_gradients(1 + SMALL)

    MegatronModule.finish_gradients = scaled  # type: ignore[method-assign]


def lengthen_steps_of_distributed_optimizer() -> None:
    """A distributed optimizer's steps are a little too long, a plain one's are right."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from mimo.engines.megatron.module import MegatronModule

    update = MegatronModule.update

    def longer(module: Any, rate: float, *args: Any, **named: Any) -> Any:
        if isinstance(module.optimizers[0], DistributedOptimizer):
            rate *= 1 + SMALL
        return update(module, rate, *args, **named)

    MegatronModule.update = longer  # type: ignore[method-assign]


ONE_RANK = SweepCell("", "")
DISTRIBUTED = SweepCell("dp2", "", ("distributed optimizer",))


def run_doubtful(verifier: Verifier, cell: SweepCell, fault: Fault) -> CellResult:
    result = run_cell(verifier, cell, fault)
    assert result.failure is None, result.failure
    assert result.comparison is not None
    assert verifier.tolerance < result.comparison.error < 1e-4
    assert result.repeated is not None
    return result


def printed(result: CellResult) -> str:
    with redirect_stdout(io.StringIO()) as stream:
        print_results([result], 1e-5)
    return stream.getvalue()


@pytest.mark.slow
def test_an_error_that_fp64_does_not_show_is_rounding(verifier: Verifier, tmp_path: Path) -> None:
    result = run_doubtful(verifier, ONE_RANK, round_gradients_in_fp32)
    assert result.passed
    assert result.repeated is not None
    assert 0 < result.repeated.error < 1e-10
    assert "equal (fp64)" in printed(result)
    path = tmp_path / "report.json"
    write_results(path, [result])
    report = json.loads(path.read_text())
    assert report["passed"] is True
    (layout,) = report["layouts"]
    gradients = [layout[run]["gradients"] for run in ("comparison", "repeated_in_fp64")]
    assert gradients[0].keys() == gradients[1].keys()
    assert layout["against_plain_optimizer"] is None


def test_a_small_error_differs_in_fp64_too(verifier: Verifier) -> None:
    result = run_doubtful(verifier, ONE_RANK, err_in_gradients)
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
    result = run_doubtful(verifier, DISTRIBUTED, round_gradients_in_fp32)
    assert result.passed
    assert result.plain is not None
    assert result.plain.error < verifier.tolerance / 10
    assert "fp32, distributed against plain optimizer on this layout: error" in printed(result)


@pytest.mark.slow
def test_a_small_error_of_the_distributed_optimizer_is_not_lost_in_fp64(
    verifier: Verifier,
) -> None:
    result = run_doubtful(verifier, DISTRIBUTED, lengthen_steps_of_distributed_optimizer)
    assert not result.passed
    assert result.repeated is not None
    assert result.repeated.first is None
    assert result.plain is not None
    assert result.plain.first is not None
    assert result.plain.first.what == "weight"
    assert str(result.plain.first) in printed(result)
