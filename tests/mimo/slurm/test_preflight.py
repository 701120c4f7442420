"""Preflight: rules that name nodes, which links are measured, and whole checks by ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from mimo.device import Gpu
from mimo.errors import StartError
from mimo.runtime.ranks import RankEnv, hosts_of, run_on_cpu
from mimo.slurm import preflight
from mimo.slurm.preflight import Facts, find_faults, links_of, report_lines
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.parallel.test_connections import LARGE
from tests.mimo.runs import mimo
from tests.mimo.runtime.conftest import RANKS, as_task_of_srun, free_port

NODES = ("a", "b", "c", "d", "e")

# ------------------------------------------------------------------------------------ rules


def facts_of(nodes: str, **values: Sequence[Any]) -> list[Facts]:
    """One rank for each node; values: of one field, by rank."""
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return [Facts(rank, node, **rows[rank]) for rank, node in enumerate(nodes)]


def test_versions_that_differ_are_named_with_their_nodes_the_rarest_first() -> None:
    def faults(*versions: str) -> list[str]:
        nodes = "abc"[: len(versions)]
        return [*find_faults(facts_of(nodes, same=[{"torch": version} for version in versions]))]

    assert faults("2.9", "2.9", "2.9") == []
    assert faults("2.9", "2.8", "2.9") == ["torch is 2.8 on b, but 2.9 on a, c"]


def test_ranks_of_a_node_that_share_a_gpu_and_nodes_with_one_problem_are_named() -> None:
    assert [*find_faults(facts_of("aabb", gpu=["0", "1", "0", "0"]))] == ["b: 2 ranks share a GPU"]
    full = facts_of("abc", problems=[["is full"], ["is full"], []])
    assert [*find_faults(full)] == ["a, b: is full"]


def test_absent_ranks_are_named_with_the_nodes_without_any_rank() -> None:
    ranks = [*facts_of("nn", clock=[0.0, 0.0]), None, None]
    assert [*find_faults(ranks, ["n", "m"])] == ["ranks 2, 3 did not join", "m: no rank joined"]


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("gpu[03-05,9],login1", ["gpu03", "gpu04", "gpu05", "gpu9", "login1"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("one", ["one"]),
        ("", []),
    ],
)
def test_a_node_list_is_expanded(nodes: str, hosts: list[str]) -> None:
    assert [*hosts_of(nodes)] == hosts


def test_a_wrong_clock_is_a_note_that_keeps_no_job_from_starting() -> None:
    lines = [*report_lines(facts_of("abc", clock=[1e9 - 0.002, 1e9, 1e9 + 12.5]), [])]
    assert lines[1:] == ["note: c: its clock differs by +12.5 s", "preflight: ok"]


def test_the_least_bandwidth_of_each_name_is_printed_with_its_rank() -> None:
    name = "tp of language"
    facts = facts_of("aabb", speeds=[{name: 1e9 * n} for n in (300, 310, 200, 210)])
    assert [*report_lines(facts, [])][1] == "  tp of language: at least 200.00 GB/s (rank 2)"


def test_a_large_job_measures_each_tensor_parallel_group_and_each_edge_of_a_bridge() -> None:
    links = links_of(LARGE)
    assert links.keys() == {"tp of language", "bridge of vision"}
    assert len(links["tp of language"]) == 112 * 8
    assert links["tp of language"][:8] == [(128 + n, 128 + (n + 1) % 8) for n in range(8)]
    pairs, senders = links["bridge of vision"], range(128)  # three of four stages get no rows
    assert {a for a, _ in pairs} == {*senders}
    assert {b for _, b in pairs} == {*range(128, 128 + 224)}, "every rank of the first stage"


# ------------------------------------------------------------------------------ whole checks


def fail_to_load(*_: object) -> None:
    raise StartError("tiny.yaml: cannot be read: Stale file handle")


def check(folder: Path, port: int, odd: str) -> int:
    """One rank, on a node of its own; what it prints goes to `printed_<rank>`."""
    from mimo.runtime.ranks import rank_environment

    rank = int(os.environ["RANK"])
    as_task_of_srun(port)
    os.environ |= {"SLURMD_NODENAME": NODES[rank], "SLURM_LOCALID": "0"}
    arguments = [f"{odd}=1"] if odd.startswith("train.") else []
    if rank == 2 and odd == "version":
        odd_versions = {**preflight.versions(), "transformers": "0.1"}
        preflight.versions = lambda: odd_versions
    if odd == "kernels":  # nodes with GPUs, one of them with a package built for another torch
        state = preflight.LOADS if rank < 2 else "flash_attn cannot be imported"
        preflight.device.gpu_of = lambda _: Gpu("H100", f"of rank {rank}", 2**36)
        preflight.kernel_states = lambda: {"flash_attn_2": state}
    if rank == 2 and odd == "recipe":
        arguments = ["train.stepps=3"]
    if odd == "stale":
        preflight.load_phases = fail_to_load
    environment = rank_environment()
    assert environment is not None
    arguments += ["language.grid.dp=2", "train.micro_batch_size=2", "cluster.gpus_per_node=0"]
    with (
        (folder / f"printed_{rank}").open("w") as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        arguments.append("cluster.ranks_per_node=1")
        return preflight.be_a_rank(folder / "tiny.yaml", arguments, None, environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path)
    tiny.write_recipe(tmp_path)
    return tmp_path


def test_good_nodes_pass(run_ranks: RunRanks, folder: Path) -> None:
    assert run_on_cpu(check, (folder, free_port(), ""), RANKS, timeout_seconds=60) == [0] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "preflight: 3 ranks on a, b, c\n" in printed
    assert "  bridge of vision: at least " in printed
    assert printed.endswith("preflight: ok\n")
    assert not list((folder / "runs" / "tiny" / "launch").iterdir()), "the probe is removed"


def test_a_node_with_other_versions_is_named(run_ranks: RunRanks, folder: Path) -> None:
    codes = run_on_cpu(check, (folder, free_port(), "version"), RANKS, timeout_seconds=60)
    assert codes == [1] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "BROKEN: transformers is 0.1 on c, but " in printed
    assert printed.endswith("preflight: do not begin\n")


def test_kernels_are_told_and_a_node_on_which_they_do_not_load_is_named(
    run_ranks: RunRanks, folder: Path
) -> None:
    codes = run_on_cpu(check, (folder, free_port(), "kernels"), RANKS, timeout_seconds=60)
    assert codes == [1] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "kernels: flash_attn_2 loads\n" in printed
    assert "BROKEN: c: flash_attn cannot be imported\n" in printed


def test_a_node_that_cannot_read_the_recipe_is_named_and_a_wrong_recipe_is_bad_input(
    run_ranks: RunRanks, folder: Path
) -> None:
    codes = run_on_cpu(check, (folder, free_port(), "recipe"), RANKS, timeout_seconds=60)
    assert codes == [1] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "BROKEN: c: " in printed
    assert "did you mean 'steps'" in printed
    codes = run_on_cpu(check, (folder, free_port(), "train.stepps"), RANKS, timeout_seconds=60)
    assert codes == [2] * RANKS
    assert (folder / "printed_0").read_text().count("did you mean 'steps'") == 1
    codes = run_on_cpu(check, (folder, free_port(), "stale"), RANKS, timeout_seconds=60)
    assert codes == [1] * RANKS, "all are tried again"


@pytest.mark.parametrize(
    "lists",
    [
        {"STEP_NODELIST": "node[1-2]"},
        {f"JOB_NODELIST_HET_GROUP_{n}": f"node{n + 1}" for n in range(2)},
    ],
    ids=["job", "heterogeneous"],
)
def test_a_node_that_never_starts_is_named_within_the_time(
    lists: dict[str, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preflight, "_JOIN_SECONDS", 0.3)
    for name, nodes in {"STEP_NODELIST": "node1", **lists}.items():
        monkeypatch.setenv(f"SLURM_{name}", nodes)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    environment = RankEnv(0, 2, 0, f"file://{folder / 'store'}")
    assert preflight.be_a_rank(folder / "tiny.yaml", [], None, environment) == 1
    printed = capsys.readouterr().out
    assert "BROKEN: rank 1 did not join\nBROKEN: node2: no rank joined\n" in printed


@pytest.mark.slow
def test_the_command_checks_this_machine(folder: Path) -> None:
    done = mimo("preflight", folder / "tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("preflight: ok\n")
    assert mimo("preflight", folder / "tiny.yaml", "train.stepps=3").returncode == 2
    site = folder / "site.yaml"
    site.write_text("gpus_per_node: 8\n")
    done = mimo("preflight", folder / "tiny.yaml", "--cluster", site)
    assert done.returncode == 1
    assert "it sees no GPU, but cluster.gpus_per_node asks for them" in done.stdout
