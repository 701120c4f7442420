"""The benchmark's judgement: bytes that were really counted, bounds, exit codes. No timings."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import bridge as bench
from benchmarks.bridge import CASES, Case, Passage, Way, Workload, bounds
from benchmarks.bridge_planning import StepTime, time_step
from benchmarks.bridge_sides import ReceivedBytes, compete
from benchmarks.harness import Bound, Run, command
from mimo.parallel.groups import build_topology
from tests.conftest import RunRanks

ROWS, HIDDEN = 64, 8
ROW_BYTES = HIDDEN * 4
SHAPE_BYTES = 2 * 8  # a 2-d shape in int64


def run_contest(rank: int, case: Case) -> list[Passage]:
    return compete(Workload(case, ROWS, HIDDEN), 1, build_topology(case.layout))


def measured(run_ranks: RunRanks, case: Case) -> list[Passage]:
    """Forward, and forward and backward; all ranks say the same."""
    results = run_ranks(run_contest, case.layout.world_size, case)
    for result in results[1:]:
        assert result == results[0]
    return results[0]


def known_traffic(rank: int) -> list[int]:
    """Bytes of one call after the other; then again under the CPU adapter's torch mode."""
    from mimo.engines.megatron.cpu import adapt_to_machine

    tensor = torch.zeros(10)  # 40 bytes

    def pass_on() -> None:
        dist.send(tensor, dst=1) if rank == 0 else dist.recv(tensor, src=0)

    def swap() -> None:
        operations = [
            dist.P2POp(dist.isend, tensor[:5], 1 - rank),
            dist.P2POp(dist.irecv, torch.zeros(5), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    counts = []
    for adapt in (lambda: None, adapt_to_machine):
        adapt()
        for call in (pass_on, swap, lambda: dist.broadcast(tensor, src=0)):
            with ReceivedBytes() as received:
                call()
            counts.append(received.num_bytes)
    return counts


def test_bytes_are_counted_once_whichever_call_brings_them(run_ranks: RunRanks) -> None:
    source, other = run_ranks(known_traffic, 2)
    assert source == 2 * [0, 20, 0]
    assert other == 2 * [40, 20, 40]


def test_ours_is_at_the_lower_bound_and_others_deliver_every_row_to_every_rank(
    run_ranks: RunRanks,
) -> None:
    rows, gradients = measured(run_ranks, Case(1, 1, 4, 1))
    assert sum(rows.bound) == ROWS * ROW_BYTES
    assert rows.received["ours"] == rows.bound
    # The leader receives shape and rows, the others get both by its broadcast.
    assert rows.received["megatron"] == [ROWS * ROW_BYTES + SHAPE_BYTES] * 4
    assert gradients.received["ours"] == gradients.bound == [ROWS * ROW_BYTES]


@pytest.mark.parametrize(
    "case",
    [Case(1, 2, 4, 1), Case(2, 2, 2, 1), Case(1, 1, 2, 2), Case(1, 1, 2, 1, sp=False)],
    ids=str,
)
def test_every_layout_is_checked_by_content_and_reaches_its_lower_bound(
    case: Case, run_ranks: RunRanks
) -> None:
    rows, gradients = measured(run_ranks, case)
    needed = ROWS * (1 if case.sp else case.language_tp)
    assert sum(rows.bound) == needed * ROW_BYTES
    assert sum(rows.received["ours"]) == sum(rows.bound)
    assert sum(rows.received["megatron"]) >= case.language_tp * ROWS * ROW_BYTES
    assert ("bare messages" in rows.received) == case.sp
    if case.sp:
        for one in (rows, gradients):
            assert one.received["bare messages"] == one.received["ours"] == one.bound


@pytest.mark.parametrize("packed", [False, True])
def test_the_step_that_is_timed_has_all_parts_of_planning(packed: bool) -> None:
    found = time_step(64, packed, repeats=1)
    assert (found.samples > 32 * 4) if packed else (found.samples == 32 * 4)
    assert found.ms > 0


# ------------------------------------------------------------------------- judgement


def passage(
    way: Way = "forward",
    case: Case = CASES[0],
    ours: tuple[float, ...] = (10.0, 20.0, 10.0),
    received: tuple[int, int] = (25, 100),
) -> Passage:
    """Megatron takes 60, 100 and 40 seconds; each rank needs 25 bytes."""
    runs = {"ours": ours, "megatron": (60.0, 100.0, 40.0)}
    bytes_of = {name: 4 * [own] for name, own in zip(runs, received, strict=True)}
    timed = {name: [*map(Run, own)] for name, own in runs.items()}
    return Passage(way, timed, case, 8192, way, bytes_of, 4 * [25])


FORWARD, BOTH = passage(), passage("forward + backward", ours=(20.0, 30.0, 15.0))
PLAN = StepTime(1024, False, 2048, ms=50.0)


def missed(*changed: Passage, plan: StepTime = PLAN) -> list[str]:
    results = bounds(changed or (FORWARD, BOTH), [plan])
    return [bound.name for bound in results if not bound.holds]


def test_all_bounds_hold_at_their_limits() -> None:
    assert not missed()


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (passage(ours=(10.0, 21.0, 10.0)), "forward: times faster"),
        (passage("forward + backward", ours=(21.0, 34.0, 13.0)), "backward: times faster"),
        (passage(received=(27, 110)), "bytes / lower bound"),
        (passage(received=(25, 97)), "Megatron's bytes"),
        ({"plan": replace(PLAN, ms=50.1)}, "plan for 1024 ranks"),
    ],
)
def test_each_bound_is_missed_by_name(changed: Passage | dict, name: str) -> None:
    (one,) = missed(**changed) if isinstance(changed, dict) else missed(changed)
    assert name in one


def test_layouts_and_growth_that_the_bounds_do_not_speak_of_are_not_judged() -> None:
    for other in (CASES[-1], CASES[3]):  # without sp; tp 2
        assert not missed(passage(case=other, ours=(100.0,) * 3))
    assert not missed(plan=replace(PLAN, num_ranks=16384, ms=99.0))
    assert not missed(plan=replace(PLAN, packed=True, ms=99.0))


# --------------------------------------------------------------------------- command

# Stands for another version of Megatron's module, and leaves a file for each rank that uses it.
RIVAL = """
import os
from pathlib import Path
from megatron.core.pipeline_parallel import bridge_communicator

class BridgeCommunicator(bridge_communicator.BridgeCommunicator):
    def __init__(self, *given, **named):
        Path(f"{__file__}.{os.getpid()}").touch()
        super().__init__(*given, **named)
"""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("limit", [1e9, -1.0])
def test_the_command_writes_tables_and_json_and_exits_1_when_a_bound_is_missed(
    limit: float,
    run_ranks: RunRanks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One small layout from the start of its ranks to the exit code; its time is not judged."""
    only = Bound("plan, any time", 1.0, limit, at_most=True)
    monkeypatch.setattr(bench, "bounds", lambda *_: [only])
    monkeypatch.setattr(bench, "ROWS", (ROWS, ROWS // 4))
    monkeypatch.setattr(bench, "HIDDEN", HIDDEN)
    monkeypatch.setattr(bench, "PLAN_RANKS", (64, 128))
    figures = tmp_path / "new" / "bench.json"
    rival = tmp_path / "rival.py"
    rival.write_text(RIVAL)
    monkeypatch.setattr(bench, "CASES", (Case(1, 1, 2, 1),))
    arguments = ["bridge", "--rounds", "1", "--rival", str(rival), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.bridge", run_name="__main__")
    code = ended.value.code
    assert isinstance(code, int)
    assert code == (0 if only.holds else 1)
    text = capsys.readouterr().out
    assert f"Megatron's bridge: {rival} (sha256 " in text
    assert len([*tmp_path.glob("rival.py.*")]) == 2 * 3, "every rank uses it, in both sizes"
    assert ("missed" in text.partition("what must hold")[2].partition("bounds_kept")[0]) == code
    assert text.splitlines()[-1] == f"bounds_kept={1 - code} bounds_missed={code}"
    assert "backend gloo" in text
    assert "were mapped to the backend of ours" in " ".join(text.split())
    found = json.loads(figures.read_text())
    assert found["bounds"] == [{**asdict(only), "holds": only.holds}]
    case = Case(1, 1, 2, 1)
    ways = ("forward", "forward + backward")
    names = [f"{case}, {rows} rows, {way}" for rows in (ROWS, ROWS // 4) for way in ways]
    assert [*found["runs"]] == names
    for runs in found["runs"].values():
        assert [*runs] == ["ours", "megatron", "bare messages"]
        assert all(own[0]["seconds"] > 0 for own in runs.values())
    (plans,) = found["tables"].values()
    assert [plan["num_ranks"] for plan in plans] == [64, 64, 128, 128]


@pytest.mark.parametrize("source", [None, "x = 1"])
def test_a_rival_without_a_bridge_is_refused_with_exit_code_2(
    source: str | None, tmp_path: Path
) -> None:
    rival = tmp_path / "rival.py"
    if source is not None:
        rival.write_text(source)
    result = CliRunner().invoke(command(bench.main), ["--rival", str(rival)])
    assert result.exit_code == 2
    assert "--rival: got " in result.stderr
    assert "needs a .py file with class BridgeCommunicator" in result.stderr


def test_the_launcher_does_not_load_the_engine_nor_print_its_warnings() -> None:
    code = "import sys, benchmarks.bridge; sys.exit('megatron' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
