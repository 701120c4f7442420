"""No layout deadlocks under NCCL's rules, and each former deadlock is detected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mimo.check.compare import Fault
from mimo.check.layouts import SWEEP, Cell, SweepCell, sweep_recipe
from mimo.check.verify import CellResult, Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.device_model.nccl import behave_like_nccl
from tests.mimo.check.cells import SPARSE
from tests.mimo.check.draws import draws_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SWEPT = {cell.name: cell for cell in SWEEP}
# Layouts with a module on ranks of its own, as other bridges exchange everything in one batch: one
# for each order of messages and for each set of groups. Left out are those that differ from one of
# these only in what sends nothing, such as clipping or adapters. `test_verify*.py` compares some of
# them with one rank; `mimo verify --layouts sweep` runs all.
LAYOUTS = """
dp2 → dp2 · overlap | dp3 → dp2 · clipped | dp2 → dp3 · recompute | dp4 → pp2 dp2 · blocks of lanes
dp2 → tp2 | 1 rank → tp2 sp | tp2 → tp4 sp | tp2 dp2 → tp2 sp dp2 · replicated
dp2 → pp2 | dp2 → pp3 · selective recompute | pp2 → pp3 | 1 rank → pp2 vpp2
dp3 → tp2 sp pp2 vpp2 | tp2 dp2 → tp2 sp pp2 · recompute | dp3 → tp2 sp pp2 · unpacked · recompute
dp3 → cp2 dp2 | tp2 sp → tp2 cp2 sp · recompute | dp3 → tp2 cp2 · replicated | dp2 → cp2 pp2 vpp2
dp2 → tp2 sp etp2 ep2 dp2 | tp2 → pp2 dp2 ep2 · overlap
dp2 → cp2 pp2 · distributed optimizer · gathered late
dp2 → pp3 · only the projector learns | dp2 → tp2 sp pp2 · frozen language
dp3 + 1 rank → tp2 sp dp2 | dp2 + colocated → cp2 | colocated + dp2 → pp2 vpp2 dp2
fsdp dp3 → fsdp tp2 sp dp2 | fsdp dp2 → fsdp tp2 sp · replicated
fsdp dp4 replicate2 → fsdp dp2 replicate2 · reduced each time
fsdp dp2 → fsdp dp3 · only the projector learns
fsdp dp3 → tp2 sp pp2 · recompute | dp2 → fsdp tp2 sp | pp2 → fsdp dp2 · distributed optimizer
1 rank → dp2 → dp3 · recompute | 1 rank → tp2 sp → dp2 | dp2 → tp2 cp2 sp → dp2 · replicated
dp2 → pp2 → dp2 · recompute | dp2 → tp2 sp pp2 → dp2 · prompt | dp2 → dp2 → dp2 · blocks of lanes
colocated tp2 → tp2 sp pp2 → dp2 | dp2 → cp2 → colocated | dp2 → tp2 → dp2 · frozen generator
none → pp2 → dp2 · frozen language · prompt | fsdp → fsdp tp2 sp → dp3 · recompute
"""
WITH_BRIDGE = {
    name: SWEPT[name] for line in LAYOUTS.split("\n") if line for name in line.split(" | ")
}


_SOON = 4.0  # seconds after which a known deadlock counts as one

# ---------------------------- former defects, put back inside ranks like a GPU's


def exchange_shapes() -> None:
    """Stages tell each other shapes and wait for the device, with receives far ahead."""
    behave_like_nccl(limit_seconds=_SOON)
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from bridge import BridgeReceiver
    from mimo.engines.megatron.schedule import PlannedCommunicator

    def communicate(self: Any, **call: Any) -> Any:
        self.config.variable_seq_lengths = self.config.batch_p2p_sync = True
        return P2PCommunicator._communicate(self, **call)

    PlannedCommunicator._communicate = communicate  # type: ignore[method-assign]
    BridgeReceiver.posted_ahead = property(lambda self: 2, lambda self, value: None)  # type: ignore[assignment]


def ask_for_gradients_when_rows_are_sent() -> None:
    """The receives wait on the device long before the language model can send."""
    behave_like_nccl(one_queue=True, limit_seconds=_SOON)
    _ask_early()


def _ask_early() -> None:
    from bridge import BridgeSender, communicator

    posted: dict[Any, Any] = {}
    forward, start = BridgeSender._forward, communicator.start_receiving

    def send(self: Any, microbatch: int, values: Any) -> Any:
        token = forward(self, microbatch, values)
        if self._expects_gradients:
            plan, end = self._plans[microbatch], self.end
            into = values.new_empty(plan.held_rows[self.lane], end.hidden_size)
            exchange = plan.collects(end.rank)
            posted[microbatch] = start(end, microbatch, "gradients", exchange, into)
        return token

    def receive(end: Any, microbatch: int, kind: Any, exchange: Any, into: Any) -> Any:
        if kind == "rows":
            return start(end, microbatch, kind, exchange, into)
        transfer = posted.pop(microbatch)
        transfer.wait()
        into.copy_(transfer.into)
        return transfer

    BridgeSender._forward = send  # type: ignore[method-assign]
    communicator.start_receiving = receive


def connect_nobody() -> None:
    """Each pair of ranks would connect at its first message, in the middle of a step."""
    behave_like_nccl(limit_seconds=_SOON)
    _leave_unconnected()


def connect_where_gradients_are_asked_for_early() -> None:
    """The first receive of gradients blocks a host that has more rows to send before they come."""
    behave_like_nccl(connects_late=True, limit_seconds=_SOON)
    _leave_unconnected()
    _ask_early()


def _leave_unconnected() -> None:
    from mimo.parallel import groups

    for name in ("connect_all", "connect_bridge", "connect_stages"):
        setattr(groups, name, lambda *unused, **named: None)


def in_one_queue() -> None:
    """One queue per device: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for."""
    behave_like_nccl(one_queue=True)


def one_ahead() -> None:
    """Hold the language model to the order of a schedule that runs one microbatch ahead."""
    behave_like_nccl()
    _expect_order(ahead=1)


def not_ahead() -> None:
    """Hold it to one that waits for the gradient of each microbatch."""
    behave_like_nccl()
    _expect_order(ahead=0)


def _expect_order(ahead: int) -> None:
    from bridge import OutputSender

    forward, backward, finish = OutputSender._forward, OutputSender._backward, OutputSender.finish
    events = list[tuple[str, int]]()

    def send(self: Any, microbatch: int, *rest: Any) -> Any:
        events.append(("rows", microbatch))
        return forward(self, microbatch, *rest)

    def wait(self: Any, microbatch: int, *rest: Any) -> Any:
        events.append(("gradients", microbatch))
        return backward(self, microbatch, *rest)

    def check_order(self: Any) -> None:
        finish(self)
        steps, expected = range(len(events) // 2 + ahead), list[tuple[str, int]]()
        for m in steps:
            expected += [("rows", m)] * (m < steps.stop - ahead)
            expected += [("gradients", m - ahead)] * (m >= ahead)
        assert len(events) > 2, "several microbatches"
        assert events == expected
        events.clear()

    OutputSender._forward, OutputSender._backward = send, wait  # type: ignore[method-assign]
    OutputSender.finish = check_order  # type: ignore[method-assign]


# ---------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def verifier(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """Shares the one-rank runs; `run_ranks` has started the fork server."""
    return Verifier(tmp_path_factory.mktemp("device-model"), "fp32")


def recipe_for(verifier: Verifier, cell: SweepCell) -> Recipe:
    """Modules of transformers and diffusers need a checkpoint; the quickstart has none."""
    if cell.generator is not None:
        return draws_recipe(verifier.folder)
    if cell.needs_experts:
        return load_recipe(RECIPES / "quickstart.yaml", SPARSE)
    if "fsdp" not in cell.name:
        return load_recipe(RECIPES / "quickstart.yaml")
    folder = verifier.folder / "checkpoint"
    if not folder.exists():
        write_tiny(TinyCheckpoint("qwen3_vl"), folder)
    return load_recipe(RECIPES / "qwen3_vl_tiny.yaml", [f"init_from={folder}"])


def run(
    verifier: Verifier, cell: SweepCell, fault: Fault, run_ahead: int | None = None
) -> CellResult:
    recipe, layout = sweep_recipe(recipe_for(verifier, cell), cell)
    if run_ahead is not None:
        encoders = {
            name: encoder.model_copy(update={"run_ahead": run_ahead})
            for name, encoder in recipe.encoders.items()
        }
        recipe = recipe.model_copy(update={"encoders": encoders})
    return verifier.run(Cell(cell.name, recipe, layout), fault)


def check(result: CellResult) -> None:
    assert result.comparison is not None, result.failure
    assert result.passed, str(result.comparison.first)


@pytest.mark.parametrize(
    "cell",
    quick_values(WITH_BRIDGE, "dp2 → pp2 → dp2 · recompute"),
)
def test_a_layout_with_a_bridge_takes_the_steps_of_one_rank_under_the_rules_of_nccl(
    verifier: Verifier, cell: SweepCell
) -> None:
    check(run(verifier, cell, behave_like_nccl))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run_ahead"), [("dp2 → pp2", 1), ("dp2 → dp3 · recompute", 6), ("pp2 → pp3", 6)]
)
def test_an_explicit_run_ahead_is_as_safe_as_the_automatic_one(
    verifier: Verifier, name: str, run_ahead: int
) -> None:
    check(run(verifier, SWEPT[name], behave_like_nccl, run_ahead))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run_ahead"),
    [
        ("pp2 → pp3", None),
        ("dp3 → tp2 sp pp2 vpp2", None),
        ("tp2 dp2 → tp2 sp pp2 · recompute", None),
        ("dp2 → dp3 · recompute", 6),
        ("1 rank → tp2 sp → dp2", None),
    ],
)
def test_no_message_holds_up_the_one_queue_of_a_device_for_ever(
    verifier: Verifier, name: str, run_ahead: int | None
) -> None:
    check(run(verifier, SWEPT[name], in_one_queue, run_ahead))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("1 rank → dp2 → 1 rank", one_ahead),
        ("none → tp2 sp → 1 rank", one_ahead),
        ("dp2 → pp2 → dp2 · recompute", one_ahead),
        ("fsdp dp2 → fsdp dp2 → dp2 · reduced each time", one_ahead),
        ("dp3 → pp2 vpp2 → dp2", not_ahead),
    ],
)
def test_the_language_model_runs_one_microbatch_ahead_unless_it_is_interleaved(
    verifier: Verifier, name: str, order: Fault
) -> None:
    check(run(verifier, SWEPT[name], order))


@pytest.mark.parametrize(
    ("fault", "name", "reason"),
    [
        pytest.param(
            exchange_shapes,
            "dp2 → pp2",
            r"torch\.cuda\.synchronize waits for ever for .* in bridge\.vision\.0\.forward",
            id="shapes are exchanged",
        ),
        pytest.param(
            ask_for_gradients_when_rows_are_sent,
            "pp2 → pp3",
            r"one queue is held up: .* in bridge\.vision\.0\.backward",
            id="gradients are asked for with rows",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            connect_nobody,
            "dp2 → dp3 · recompute",
            r"connects in the middle of a step: .* in bridge\.vision\.0\.",
            id="pairs are not connected before the step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            connect_where_gradients_are_asked_for_early,
            "pp2 → pp3",
            r"first message of this pair never connects: .* in bridge\.vision\.0\.",
            id="pairs connect when gradients are asked for with rows",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_deadlock_of_a_device_is_found_and_its_messages_are_named(
    verifier: Verifier, fault: Fault, name: str, reason: str
) -> None:
    result = run(verifier, SWEPT[name], fault)
    assert result.failure is not None, f"{result.verdict}: the defect has no effect"
    assert re.search(rf"Deadlock: .*{reason}", result.failure), result.failure
