"""Preflight: rules that name nodes, which pairs talk, and whole checks by ranks of fake nodes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import pytest

from mimo.device import Gpu
from mimo.errors import StartError
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.runtime.ranks import RankEnv, hosts_of, run_on_cpu
from mimo.slurm import preflight
from mimo.slurm.links import Link, Measured, Pair, best_of, pairs_of, rounds_of
from mimo.slurm.verdict import (
    Facts,
    Finding,
    absent,
    differences,
    in_words,
    odd_clocks,
    skews,
    slow,
    to_exclude,
)
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import mimo
from tests.mimo.runtime.conftest import RANKS, as_task_of_srun, free_port

NODES = ("a", "b", "c", "d", "e")
# 128 encoder ranks, and 896 of a language model on four stages, on nodes of eight.
LARGE = Layout(
    GridSpec(LANGUAGE, tp=8, sp=True, pp=4, dp=28, rank_offset=128),
    {"vision": GridSpec("vision", dp=128)},
    1024,
)
ON_NODES_OF_8 = [f"node{rank // 8}" for rank in range(1024)]


def links(gigabytes: Callable[[str, str], float], pairs: list[tuple[int, int]]) -> list[Link]:
    """One rank a node."""
    return [Link(Pair("nodes", a, b), 20e-6, 1e9 * gigabytes(NODES[a], NODES[b])) for a, b in pairs]


RING = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]

# ------------------------------------------------------------------------------------ rules


def test_a_slow_node_is_named_and_not_its_neighbours() -> None:
    found = [*slow(links(lambda a, b: 2.0 if "c" in (a, b) else 20.0, RING), NODES)]
    assert [one.node for one in found if not one.is_note] == ["c"]
    assert found[0].text == "slow between nodes: 2.00 GB/s, the median node has 20.00 GB/s"


def test_a_slow_node_of_three_is_named_though_two_of_three_links_are_slow() -> None:
    ring = [(0, 1), (1, 2), (2, 0)]
    found = [*slow(links(lambda a, b: 2.0 if "c" in (a, b) else 20.0, ring), NODES)]
    assert [one.node for one in found if not one.is_note] == ["c"]


def test_of_two_nodes_nobody_is_blamed_and_even_links_are_no_news() -> None:
    assert not [*slow(links(lambda *_: 0.1, [(0, 1)]), NODES)]
    assert not [*slow(links(lambda a, b: 10.0 + 8.0 * (a == "a"), RING), NODES)]


def test_one_slow_link_of_good_nodes_is_a_note_that_names_both() -> None:
    found = [*slow(links(lambda a, b: 1.0 if (a, b) == ("b", "c") else 20.0, RING), NODES)]
    assert found == [Finding("slow link of ranks 1 on b and 2 on c: 1.00 GB/s", is_note=True)]


def test_a_node_inside_of_which_one_rank_is_slow_is_named() -> None:
    pairs = [(rank, rank - rank % 4 + (rank + 1) % 4) for rank in range(12)]
    node_of = [NODES[rank // 4] for rank in range(12)]
    own = [Link(Pair("tp", a, b), 5e-6, 2e9 if 6 in (a, b) else 3e11) for a, b in pairs]
    found = [one for one in slow(own, node_of) if not one.is_note]
    assert [(one.node, one.text) for one in found] == [
        ("b", "slow within a node: 2.00 GB/s, the median node has 300.00 GB/s")
    ]


def test_a_late_node_is_named_but_not_for_microseconds() -> None:
    def late(seconds: float) -> list[str]:
        own = links(lambda *_: 20.0, RING)
        own = [
            replace(one, latency_seconds=seconds) if 1 in (one.pair.a, one.pair.b) else one
            for one in own
        ]
        return [one.node for one in slow(own, NODES) if not one.is_note]

    assert late(5e-3) == ["b"]
    assert late(0.5e-3) == []


def test_what_differs_is_the_fault_of_fewer_nodes_and_of_none_in_a_tie() -> None:
    def versions(*found: str) -> list[Finding]:
        own = zip(NODES, found, strict=False)
        return [*differences(Facts(n, node, {"torch": one}) for n, (node, one) in enumerate(own))]

    assert versions("2.9", "2.9", "2.9") == []
    assert versions("2.8", "2.9", "2.9") == [
        Finding("torch is 2.8, but 2.9 on 2 other nodes", node="a")
    ]
    assert versions("2.8", "2.9") == [Finding("torch differs: 2.8 on a; 2.9 on b")]


def test_ranks_of_a_node_that_share_a_gpu_are_named() -> None:
    facts = [Facts(rank, NODES[rank // 2], gpu=f"gpu {rank % 2 * (rank < 2)}") for rank in range(4)]
    assert [*differences(facts)] == [Finding("ranks 2, 3 share a GPU", node="b")]


def test_ranks_that_do_not_come_are_named_with_the_nodes_of_which_none_came() -> None:
    found = [*absent({0: "n1", 1: "n1"}, ["n1", "n2"], 4)]
    assert [one.text for one in found] == [
        "ranks 2, 3 did not join, those of n2 among them",
        "none of its ranks joined",
    ]
    assert to_exclude(found, ["n1"]) == ["n2"]
    assert not [*absent({0: "n1"}, ["n1"], 1)]


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("gpu[03-05,9],login1", ["gpu03", "gpu04", "gpu05", "gpu9", "login1"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("one", ["one"]),
        ("", []),
    ],
)
def test_a_node_list_is_unfolded(nodes: str, hosts: list[str]) -> None:
    assert [*hosts_of(nodes)] == hosts


def test_a_clock_that_is_ahead_is_a_note_and_the_median_is_the_measure() -> None:
    clocks = {0: [10.0, 20.0], 1: [10.001, 20.002], 2: [22.5, 32.5]}
    ahead = skews(clocks, NODES)
    assert ahead == pytest.approx({"a": -0.0015, "b": 0.0, "c": 12.4985}, abs=1e-6)
    assert [*odd_clocks(ahead)] == [
        Finding("its clock is 12.5 s ahead of the others'", "c", is_note=True)
    ]


def test_a_sentence_of_several_nodes_is_said_once_and_all_nodes_are_nobody_to_leave_out() -> None:
    found = [Finding("is full", node) for node in ("b", "a")]
    assert in_words(found, NODES) == ["BROKEN: b, a: is full", "leave out: --exclude=a,b"]
    assert in_words(found, NODES[:2]) == ["BROKEN: all nodes: is full"]


def test_the_node_in_several_talks_that_failed_is_to_be_left_out() -> None:
    failed = [Measured([], [], now=Pair("nodes", a, b), error="lost") for a, b in ((0, 1), (1, 2))]
    found = [*preflight.failed_talks(dict(enumerate(failed)), NODES)]
    assert to_exclude(found, NODES) == ["b"]
    assert to_exclude(preflight.failed_talks({0: failed[0]}, NODES), NODES) == []


def test_ranks_of_one_node_that_cannot_talk_are_told_and_one_pair_blames_nobody() -> None:
    stuck = Measured([], [], now=Pair("tp of language", 0, 1))
    (found,) = preflight.failed_talks({0: stuck, 1: stuck}, ("a", "a"))
    assert found.text.startswith("rank 0 on a and rank 1 on a cannot talk (tp of language)")
    assert not found.node


# ------------------------------------------------------------------------------------ pairs


def test_a_large_job_tries_neighbours_of_tp_groups_and_each_two_nodes_of_an_edge_once() -> None:
    pairs = pairs_of(LARGE, ON_NODES_OF_8)
    kinds = Counter(pair.kind for pair in pairs)
    # 112 groups of eight; 16 nodes of encoders to the 28 nodes of the first stage.
    assert kinds["tp of language"] == 112 * 8
    assert kinds["bridge of vision"] == 16 * 28
    crossed = Counter(
        (ON_NODES_OF_8[one.a], ON_NODES_OF_8[one.b]) for one in pairs if "bridge" in one.kind
    )
    assert set(crossed) == {
        (f"node{a}", f"node{b}") for a, b in product(range(16), range(16, 16 + 28))
    }
    # Not always the same rank of a node.
    assert len({one.a for one in pairs if "bridge" in one.kind}) == 128


def test_at_one_time_a_rank_and_the_network_of_a_node_have_one_pair() -> None:
    pairs = pairs_of(LARGE, ON_NODES_OF_8)
    rounds = rounds_of(pairs, ON_NODES_OF_8)
    assert sorted(map(str, chain.from_iterable(rounds))) == sorted(map(str, pairs))
    for pairs in rounds:
        ranks = Counter(rank for pair in pairs for rank in (pair.a, pair.b))
        assert max(ranks.values()) == 1
        across = [p for p in pairs if ON_NODES_OF_8[p.a] != ON_NODES_OF_8[p.b]]
        nodes = Counter(ON_NODES_OF_8[rank] for pair in across for rank in (pair.a, pair.b))
        assert max(nodes.values(), default=1) == 1
    assert len(rounds) < 60  # 28 at least


# ------------------------------------------------------------------------------ whole checks


def fail_to_load(*_: object) -> None:
    raise StartError("tiny.yaml: cannot be read: Stale file handle")


def check(folder: Path, port: int, odd: str) -> int:
    """One rank, on a node of its own; what it prints goes to `printed_<rank>`."""
    from mimo.runtime.ranks import rank_environment
    from mimo.slurm import facts

    rank = int(os.environ["RANK"])
    as_task_of_srun(port)
    os.environ |= {"SLURMD_NODENAME": NODES[rank], "SLURM_LOCALID": "0"}
    arguments = [f"{odd}=1"] if odd.startswith("train.") else []
    if rank == 2 and odd == "version":
        found = {**facts.versions(), "transformers": "0.1"}
        facts.versions = lambda: found
    if odd == "kernels":  # nodes with GPUs, one of them with a package built for another torch
        states = {"flash_attn_2": facts.LOADS if rank < 2 else "flash_attn cannot be imported"}
        facts.gpu_of = lambda _: Gpu("H100", f"of rank {rank}", 2**36, 2**36)
        facts.kernel_states = lambda: states
    if rank == 2 and odd == "recipe":
        arguments = ["train.stepps=3"]
    if odd == "stale":
        preflight.load_phases = fail_to_load
    preflight.slow = lambda *_: ()  # three nodes that share busy cores are slow by chance
    environment = rank_environment()
    assert environment is not None
    arguments += ["language.grid.dp=2", "train.micro_batch_size=2", "cluster.gpus_per_node=0"]
    with (
        (folder / f"printed_{rank}").open("w") as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        given = [*arguments, "cluster.ranks_per_node=1"]
        return preflight.be_a_rank(folder / "tiny.yaml", given, None, environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path)
    tiny.write_recipe(tmp_path)
    return tmp_path


def test_of_what_a_pair_measured_twice_the_best_counts() -> None:
    pair, other = Pair("nodes", 0, 1), Pair("nodes", 1, 2)
    links = [Link(pair, 2e-3, 1e9), Link(other, 1e-4, 1e8), Link(pair, 1e-4, 1e8)]
    assert best_of(links) == [Link(pair, 1e-4, 1e9), Link(other, 1e-4, 1e8)]


def test_good_nodes_pass_and_leave_a_table(run_ranks: RunRanks, folder: Path) -> None:
    assert run_on_cpu(check, (folder, free_port(), ""), RANKS, timeout_seconds=60) == [0] * RANKS
    printed = (folder / "printed_0").read_text()
    assert "preflight: 3 ranks, 3 nodes: a, b, c\n" in printed
    assert "bridge of vision, between nodes: 2 pairs" in printed
    assert printed.endswith("preflight: ok\n")
    launch = folder / "runs" / "tiny" / "launch"
    assert [path.name for path in launch.iterdir()] == ["preflight.json"]
    table = json.loads((launch / "preflight.json").read_text())
    assert table["ok"]
    assert table["nodes"] == ["a", "b", "c"]
    assert {(one["pair"]["a"], one["pair"]["b"]) for one in table["links"]} >= {(0, 1), (0, 2)}
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
    assert "BROKEN: rank 1 did not join, those of node2 among them" in printed
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
