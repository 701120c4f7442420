"""Preflight: rules that name nodes, which links are measured, and whole checks by ranks."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from mimo.device import Gpu
from mimo.errors import StartError
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.runtime.ranks import RankEnv, hosts_of, run_on_cpu
from mimo.slurm import node_checks, preflight
from mimo.slurm.node_checks import Facts, links_of
from mimo.slurm.preflight import Finding, Report, absent, differences
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import mimo
from tests.mimo.runtime.conftest import RANKS, as_task_of_srun, free_port

NODES = ("a", "b", "c", "d", "e")
# 128 encoder ranks, and 896 of a language model on four stages.
LARGE = Layout(
    GridSpec(LANGUAGE, tp=8, sp=True, pp=4, dp=28, rank_offset=128),
    {"vision": GridSpec("vision", dp=128)},
    1024,
)

# ------------------------------------------------------------------------------------ rules


def test_the_nodes_that_differ_are_the_fewer_ones_and_a_tie_names_no_node() -> None:
    def versions(*versions: str) -> list[Finding]:
        nodes = zip(NODES, versions, strict=False)
        return [*differences([Facts(n, node, {"torch": v}) for n, (node, v) in enumerate(nodes)])]

    assert versions("2.9", "2.9", "2.9") == []
    assert versions("2.8", "2.9", "2.9") == [
        Finding("torch is 2.8, but 2.9 on 2 other nodes", node="a")
    ]
    assert versions("2.8", "2.9") == [Finding("torch differs: 2.8 on a; 2.9 on b")]


def test_ranks_of_a_node_that_share_a_gpu_are_named() -> None:
    facts = [Facts(rank, NODES[rank // 2], gpu=f"gpu {rank % 2 * (rank < 2)}") for rank in range(4)]
    assert [*differences(facts)] == [Finding("ranks 2, 3 share a GPU", node="b")]


def test_absent_ranks_are_named_with_the_nodes_without_any_rank() -> None:
    report = Report(["n1", "n1", "", ""], [*absent(["n1", "n1", "", ""], ["n1", "n2"])])
    assert report.findings == [
        Finding("ranks 2, 3 did not join"),
        Finding("no rank joined", node="n2"),
    ]
    assert report.exclude == ["n2"]
    assert not [*absent(["n1"], ["n1"])]


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


def lines_of(nodes: str, **results: object) -> list[str]:
    return [*Report([*nodes], **results).lines()]  # type: ignore[arg-type]


def test_a_finding_about_several_nodes_is_printed_once_and_all_nodes_are_not_excluded() -> None:
    findings = [Finding("is full", node) for node in ("b", "a")]
    assert lines_of("abcde", findings=findings)[1:] == [
        "BROKEN: b, a: is full",
        "leave out: --exclude=a,b",
        "preflight: do not begin",
    ]
    assert lines_of("ab", findings=findings)[1:2] == ["BROKEN: all nodes: is full"]


def test_a_wrong_clock_is_a_note_that_keeps_no_job_from_starting() -> None:
    lines = lines_of("abc", clocks={"a": -0.002, "b": 0.0, "c": 12.5})
    assert lines[1:] == ["note: c: its clock is 12.5 s ahead of the others'", "preflight: ok"]


def test_each_kind_of_link_has_its_median_and_its_slowest_bandwidth() -> None:
    speeds = [("tp of language", [n, n + 1], 1e9 * speed) for n, speed in ((0, 300), (2, 200))]
    assert lines_of("aabb", speeds=speeds)[1] == (
        "  tp of language: 2 links, 250.00 GB/s, at least 200.00 (ranks 2, 3)"
    )


def test_a_large_job_measures_each_tensor_parallel_group_and_each_edge_of_a_bridge() -> None:
    links = links_of(LARGE)
    # Three of four stages get no rows; 112 groups of eight.
    assert Counter(kind for kind, _ in links) == {"tp of language": 112, "bridge of vision": 1}
    assert links[0][1] == tuple((128 + n, 128 + (n + 1) % 8) for n in range(8))
    (_, pairs), senders = links[-1], range(128)
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
        odd_versions = {**node_checks.versions(), "transformers": "0.1"}
        node_checks.versions = lambda: odd_versions
    if odd == "kernels":  # nodes with GPUs, one of them with a package built for another torch
        states = {
            "flash_attn_2": node_checks.LOADS if rank < 2 else "flash_attn cannot be imported"
        }
        node_checks.gpu_of = lambda _: Gpu("H100", f"of rank {rank}", 2**36, 2**36)
        node_checks.kernel_states = lambda: states
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


def test_good_nodes_pass_and_leave_a_table(run_ranks: RunRanks, folder: Path) -> None:
    assert run_on_cpu(check, (folder, free_port(), ""), RANKS, timeout_seconds=60) == [0] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "preflight: 3 ranks, 3 nodes: a, b, c\n" in printed
    assert "  bridge of vision: 1 link, " in printed
    assert printed.endswith("preflight: ok\n")
    launch = folder / "runs" / "tiny" / "launch"
    assert [path.name for path in launch.iterdir()] == ["preflight.json"]
    table = json.loads((launch / "preflight.json").read_text())
    assert table["ok"]
    assert table["nodes"] == ["a", "b", "c"]
    ((kind, ranks, speed),) = table["speeds"]
    assert (kind, ranks) == ("bridge of vision", [0, 1, 2])
    assert speed > 0
    assert all(abs(ahead) < 1 for ahead in table["clocks"].values())


def test_a_node_with_other_versions_is_named(run_ranks: RunRanks, folder: Path) -> None:
    codes = run_on_cpu(check, (folder, free_port(), "version"), RANKS, timeout_seconds=60)
    assert codes == [1] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "BROKEN: c: transformers is 0.1, but " in printed
    assert printed.endswith("leave out: --exclude=c\npreflight: do not begin\n")
    table = json.loads((folder / "runs/tiny/launch/preflight.json").read_text())
    assert table["exclude"] == ["c"]


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
    assert "leave out: --exclude=node2\n" in printed
    table = json.loads((folder / "runs/tiny/launch/preflight.json").read_text())
    assert (table["ok"], table["exclude"]) == (False, ["node2"])


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
