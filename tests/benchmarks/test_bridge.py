"""The benchmark's judgement: bytes that were really counted, bounds, exit codes. No timings."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import bridge as bench
from benchmarks.bridge import Case
from benchmarks.bridge_sides import ReceivedBytes, compete
from benchmarks.harness import Contest, Run, command
from mimo.parallel.groups import build_topology
from tests.conftest import RunRanks

ROWS, HIDDEN = 512, 8
SHAPE_BYTES = 2 * 8  # a 2-d shape in int64


def run_contest(rank: int, case: Case) -> dict[str, Contest]:
    return compete(case, 1, build_topology(case.layout))


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


@pytest.mark.parametrize(
    "case", [Case(1, 1, 4, ROWS, HIDDEN), Case(2, 2, 2, ROWS, HIDDEN)], ids=str
)
def test_our_bridge_sends_the_lower_bound_and_megatrons_sends_every_row_to_every_rank(
    case: Case, run_ranks: RunRanks
) -> None:
    results = run_ranks(run_contest, case.layout.world_size, case)
    assert all(result == results[0] for result in results), "all ranks say the same"
    rows, gradients = (contest.runs for contest in results[0].values())
    assert rows["ours"][0].result == gradients["ours"][0].result == {"bytes / bound": 1.0}
    # The leader receives shape and rows of each encoder lane, the others get both by its broadcast.
    bound = ROWS * HIDDEN * 4
    shapes = rows["megatron"][0].result["bytes / bound"] * bound - case.language_tp * bound
    assert shapes == pytest.approx(SHAPE_BYTES * (case.module_lanes - 1 + case.language_tp))


@pytest.mark.parametrize("module_lanes", [1, 2, 3])
def test_rows_for_a_generator_and_their_gradients_cross_once_like_bare_messages(
    module_lanes: int, run_ranks: RunRanks
) -> None:
    lanes = {"language_lanes": 2, "is_output": True}
    case = Case(1, module_lanes, 2, 256 * module_lanes, HIDDEN, **lanes)
    assert str(case) == f"2×tp2 sp → {module_lanes}×tp1"
    results = run_ranks(run_contest, case.layout.world_size, case)
    for contest in results[0].values():
        assert [*contest.runs] == ["ours", "messages"]
        for (run,) in contest.runs.values():
            assert run.result == {"bytes / bound": 1.0}


def test_a_step_is_planned_for_many_ranks() -> None:
    assert bench.plan_milliseconds(64) > 0


# ------------------------------------------------------------------------- judgement


def missed(
    way: str = "forward",
    ours: tuple[float, ...] = (10.0, 20.0, 10.0),
    received: tuple[float, float] = (1.0, 4.0),
) -> list[str]:
    """Names of missed bounds, if Megatron takes 60, 100 and 40 s. received: bytes over bound."""
    seconds = {"ours": ours, "megatron": (60.0, 100.0, 40.0)}
    runs = {
        name: [Run(taken, result={"bytes / bound": times}) for taken in rounds]
        for (name, rounds), times in zip(seconds.items(), received, strict=True)
    }
    return [bound.name for bound in bench.judge(way, Contest(way, runs)) if not bound.holds]


def test_all_bounds_hold_at_their_limits() -> None:
    assert not missed()
    assert not missed("forward + backward", ours=(20.0, 30.0, 15.0))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"ours": (10.0, 21.0, 10.0)}, "forward: times faster"),
        ({"way": "forward + backward", "ours": (21.0, 34.0, 13.0)}, "backward: times faster"),
        ({"received": (1.1, 4.4)}, "bytes / lower bound"),
        ({"received": (1.0, 3.8)}, "Megatron's bytes"),
    ],
)
def test_each_bound_is_missed_by_name(changed: dict, name: str) -> None:
    (bound,) = missed(**changed)
    assert name in bound


@pytest.mark.parametrize("way", bench._TIMES_FASTER)
def test_rows_for_a_generator_are_judged_by_their_bytes_alone(way: str) -> None:
    def judged(times: float) -> list[tuple[str, bool]]:
        runs = {name: [Run(9.0, result={"bytes / bound": times})] for name in ("ours", "messages")}
        return [(bound.name, bound.holds) for bound in bench.judge(way, Contest(way, runs))]

    name = f"{way}: bytes / lower bound"
    assert (judged(1.0), judged(1.1)) == ([(name, True)], [(name, False)])


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
@pytest.mark.parametrize("limit", [1.01, 0.9])
def test_a_quick_run_writes_tables_and_json_and_exits_1_when_a_bound_is_missed(
    limit: float,
    run_ranks: RunRanks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "_BYTES_OVER_BOUND", limit)
    figures = tmp_path / "new" / "bench.json"
    rival = tmp_path / "rival.py"
    rival.write_text(RIVAL)
    arguments = ["bridge", "--quick", "--rival", str(rival), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.bridge", run_name="__main__")
    code = ended.value.code
    assert isinstance(code, int)
    assert code == (0 if limit > 1 else 1)
    text = capsys.readouterr().out
    assert len([*tmp_path.glob("rival.py.*")]) == 5, "every rank uses it"
    assert text.splitlines()[-1] == f"bounds_kept={1 - code} bounds_missed={code}"
    assert "backend gloo" in text
    found = json.loads(figures.read_text())
    assert f"Megatron's is {rival} (sha256 " in found["title"]
    assert found["bounds"][0]["holds"] == (code == 0)
    assert [*found["runs"]] == [f"1×tp1 → tp4 sp, {way}" for way in bench._TIMES_FASTER]
    for runs in found["runs"].values():
        assert [*runs] == ["ours", "megatron"]
        assert all(own[0]["seconds"] > 0 for own in runs.values())


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
