"""Preflight: rules that name nodes, which links are measured, and whole checks by ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.device import Gpu
from mimo.errors import StartError
from mimo.model.recipe_checks import unreadable_inputs
from mimo.parallel.connections import sender_receiver_pairs
from mimo.runtime.ranks import first_host, run_on_cpu
from mimo.slurm import preflight
from mimo.slurm.preflight import Facts, find_faults, report
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.parallel.test_connections import LARGE
from tests.mimo.runs import mimo
from tests.mimo.runtime.conftest import RANKS, as_task_of_srun, free_port

NODES = ("a", "b", "c", "d", "e")

# ------------------------------------------------------------------------------------ rules


def facts_of(nodes: str, field: str, values: Sequence[Any]) -> list[Facts]:
    """Return facts of one rank per node. values: of the field, by rank."""
    pairs = enumerate(zip(nodes, values, strict=True))
    return [Facts(rank, node, **{field: value}) for rank, (node, value) in pairs]


def test_versions_that_differ_and_problems_are_named_with_their_nodes() -> None:
    def faults(*versions: str) -> list[str]:
        nodes = "abc"[: len(versions)]
        return [*find_faults(facts_of(nodes, "same", [{"torch": text} for text in versions]))]

    assert faults("2.9", "2.9", "2.9") == []
    assert faults("2.9", "2.8", "2.9") == ["torch is 2.9 on a, c, but 2.8 on b"]
    full = facts_of("abc", "problems", [["is full"], ["is full"], []])
    assert [*find_faults([*full, None, None])] == ["ranks 3, 4 did not join", "a, b: is full"]


def test_ranks_of_a_node_that_share_a_gpu_are_named() -> None:
    assert [*find_faults(facts_of("aabb", "gpu", ["0", "1", "0", "0"]))] == [
        "b: 2 ranks share a GPU"
    ]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-05,9],login1", "gpu03"),
        ("n[09-10]-ib,gpu[03-05]", "n09-ib"),
        ("gpu[7,9]", "gpu7"),
        ("login1,gpu[03-05]", "login1"),
        ("login1", "login1"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_wrong_clock_is_a_note_that_keeps_no_job_from_starting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report(facts_of("abc", "clock", [1e9 - 0.002, 1e9, 1e9 + 12.5])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["note: c: its clock differs by +12.5 s", "preflight: ok"]


def test_the_least_figure_of_each_name_is_printed_with_its_rank_and_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    speeds = [{"GB/s, tp of language": speed} for speed in (300.0, 310.0, 200.0, 210.0)]
    report(facts_of("aabb", "figures", speeds))
    assert "  GB/s, tp of language: at least 200.00 (rank 2 on b)\n" in capsys.readouterr().out


def test_a_large_job_measures_each_tensor_parallel_group_and_each_edge_of_a_bridge() -> None:
    ring = [(128 + n, 128 + (n + 1) % 8) for n in range(8)]
    links = sender_receiver_pairs(LARGE)
    assert links.keys() == {"tp of language", "bridge of vision"}
    assert len(links["tp of language"]) == 112 * 8
    assert links["tp of language"][:8] == ring
    pairs = links["bridge of vision"]  # three of four stages get no rows
    assert {a for a, _ in pairs} == {*range(128)}
    assert {b for _, b in pairs} == {*range(128, 128 + 224)}, "every rank of the first stage"


# ------------------------------------------------------------------------------ whole checks


def fail_to_load(*_: object) -> None:
    raise StartError("tiny.yaml: cannot be read: Stale file handle")


def fail_to_add(_: int) -> None:
    raise RuntimeError("the sum of 1,024 ones on cuda:0 is 7")


def fail_to_unlink(*_: Any, **__: Any) -> None:
    raise OSError("Read-only file system")


def fail_to_connect(*_: object) -> None:
    raise RuntimeError("no interface ib0")


def check(folder: Path, port: int, odd: str) -> int:
    """One rank, on a node of its own; what it prints goes to `printed_<rank>`."""
    rank = int(os.environ["RANK"])
    as_task_of_srun(port)
    os.environ |= {"SLURMD_NODENAME": NODES[rank], "SLURM_LOCALID": "0"}
    arguments = [f"{odd}=1"] if odd.startswith("train.") else []
    if rank == 2 and odd == "version":
        odd_versions = {**preflight.versions(), "transformers": "0.1"}
        preflight.versions = lambda: odd_versions
    if odd == "machine":  # nodes with GPUs, one with another and without the folder of weights
        name = "A100" if rank == 2 else "H100"
        preflight.device.gpu_of = lambda _: Gpu(name, f"of rank {rank}", 2**36)
        state = preflight.LOADS if rank < 2 else "flash_attn cannot be imported"
        preflight.kernel_states = lambda: {"flash_attn_2": state}
        arguments += ["data.tokenizer=nowhere"] * (rank == 2)
    if rank > 0 and odd == "without gpu":  # rank 0 alone holds the encoder
        preflight.device.gpu_of = lambda _: Gpu("H100", f"of rank {rank}", 2**36)
    if odd == "not shared":  # each node has a run folder of its own
        preflight._VISIBLE_SECONDS = 0.2
        os.chdir(folder if rank < 2 else folder / "node_c")
        arguments.append("train.run_dir=runs")
    if odd == "undeletable":
        Path.unlink = fail_to_unlink
    if odd == "not connected":
        preflight._MEASURE_SECONDS = 0.5
        if rank == 2:
            preflight.device.initialize_distributed = fail_to_connect
    if rank == 2 and odd == "broken":
        preflight.device.gpu_of = fail_to_add
    if odd == "stuck":
        preflight._MEASURE_SECONDS = 0.5
        preflight._measure = lambda *_: time.sleep(60 if rank == 2 else 0)
    if rank == 2 and odd == "recipe":
        arguments = ["train.stepps=3"]
    if odd == "stale":
        preflight.load_phases = fail_to_load
    arguments += ["language.grid.dp=2", "train.micro_batch_size=2", "cluster.gpus_per_node=0"]
    with (
        (folder / f"printed_{rank}").open("w") as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        arguments.append("cluster.ranks_per_node=1")
        return preflight.be_a_rank(folder / "tiny.yaml", arguments, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path)
    tiny.write_recipe(tmp_path)
    (tmp_path / "node_c").mkdir()
    return tmp_path


def test_good_nodes_pass(run_ranks: RunRanks, folder: Path) -> None:
    assert run_on_cpu(check, (folder, free_port(), ""), RANKS, timeout_seconds=60) == [0] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "preflight: 3 ranks on a, b, c\n" in printed
    assert "  GB/s, bridge of vision: at least " in printed
    assert printed.endswith("preflight: ok\n")
    assert not list((folder / "runs" / "tiny" / "launch").iterdir()), "the probe is removed"


def test_a_probe_that_cannot_be_removed_keeps_no_rank_waiting(
    run_ranks: RunRanks, folder: Path
) -> None:
    arguments = folder, free_port(), "undeletable"
    assert run_on_cpu(check, arguments, RANKS, timeout_seconds=60) == [0] * RANKS


@pytest.mark.parametrize(
    ("odd", "faults"),
    [
        # The rule alone has a quick test above.
        pytest.param("version", [" on a, b, but 0.1 on c\n"], marks=pytest.mark.slow),
        (
            "machine",
            [
                " of language is H100 on b, but A100 on c\n",
                "c: data.tokenizer: nowhere cannot be read: [Errno 2]",
                "  kernels: flash_attn_2 loads\n",
                "BROKEN: c: flash_attn cannot be imported\n",
            ],
        ),
        pytest.param(
            "without gpu",
            ["BROKEN: device is CPU on a, but GPU on b, c\n"],
            marks=pytest.mark.slow,
        ),
        ("not shared", ["BROKEN: c: runs/tiny/launch: it does not see a file of rank 0"]),
        ("not connected", ["BROKEN: c: rank 2 cannot connect: no interface ib0\n"]),
        ("broken", ["BROKEN: c: its GPU does not work: the sum of 1,024 ones on cuda:0 is 7\n"]),
        ("stuck", ["BROKEN: c: rank 2 cannot talk within 0.5 s\n"]),
    ],
)
def test_a_node_that_is_not_like_the_others_is_named(
    run_ranks: RunRanks, folder: Path, odd: str, faults: list[str]
) -> None:
    codes = run_on_cpu(check, (folder, free_port(), odd), RANKS, timeout_seconds=60)
    assert codes == [1] * RANKS
    printed = (folder / "printed_0").read_text()
    assert all(fault in printed for fault in faults), printed
    assert "did not join" not in printed
    assert printed.endswith("preflight: do not begin\n")


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


def test_a_rank_that_never_starts_is_named_within_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "_JOIN_SECONDS", 0.3)
    variables = {"MIMO_RENDEZVOUS": f"file://{folder / 'store'}", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert preflight.be_a_rank(folder / "tiny.yaml", [], None) == 1
    assert "BROKEN: rank 1 did not join\n" in capsys.readouterr().out


def test_a_missing_rank_0_is_named_once_on_each_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "_JOIN_SECONDS", 0.3)
    variables = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    for name, value in {**variables, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    for local_rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert preflight.be_a_rank(folder / "tiny.yaml", [], None) == 1
        printed = capsys.readouterr().err
        assert printed.count("BROKEN: rank 1 did not find the store") == 1 - local_rank, printed


def test_empty_folders_and_missing_shards_are_named_with_their_keys(folder: Path) -> None:
    mounted = folder / "mounted"
    mounted.mkdir()
    overrides = [f"data.tokenizer={mounted}", f"data.sources.0.path={mounted}/{{0..3}}.tar"]
    tokenizer, shards = unreadable_inputs(load_recipe(folder / "tiny.yaml", overrides))
    assert tokenizer == f"data.tokenizer: {mounted} is empty"
    assert shards.startswith("data.sources: no shard matches ")


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
