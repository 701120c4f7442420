"""Training across two hosts, by torchrun: as on one, and with the link between them cut.

The encoder has a rank on the first host, the language model two lanes on the second.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mimo.train.incidents import incidents
from tests.conftest import RunRanks
from tests.hosts import INTERFACE, Host, two_hosts
from tests.mimo import tiny
from tests.mimo.runs import LAYOUT, metrics, run
from tests.ranks import MarkedJob

pytestmark = pytest.mark.slow
PORT = 29400
RANKS_OF = {"first": 1, "second": 2}


# How the agents of torchrun meet. Those of the first end by themselves on a host that is cut off.
STATIC = ("--node-rank={number}", "--master-addr=first", f"--master-port={PORT}")
C10D = ("--rdzv-backend=c10d", f"--rdzv-endpoint=first:{PORT}", "--local-addr={name}")


def start(
    hosts: list[Host], recipe: Path, job: MarkedJob, meet: Sequence[str], *overrides: str
) -> list[subprocess.Popen[bytes]]:
    """torchrun on each host, for one job of three ranks."""
    agents = []
    for number, host in enumerate(hosts):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-id=tiny"),
            *(option.format(number=number, name=host.name) for option in meet),
            f"--nproc-per-node={RANKS_OF[host.name]}",
        ]
        command = [*torchrun, "-m", "mimo.cli", "train", str(recipe), *overrides]
        variables = {**job.environment, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        log = recipe.parent / f"{host.name}.log"
        agents.append(host.start(command, Path.cwd(), log, variables))
    return agents


@pytest.mark.parametrize("meet", [STATIC, C10D], ids=["static", "c10d"])
def test_two_hosts_train_as_one_does(
    run_ranks: RunRanks, tmp_path: Path, meet: Sequence[str]
) -> None:
    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    job = MarkedJob()
    with two_hosts(tmp_path) as hosts:
        agents = start(hosts, recipe, job, meet, "name=two", *LAYOUT)
        codes = [agent.wait(120) for agent in agents]
        told = "".join((tmp_path / f"{host.name}.log").read_text() for host in hosts)
        assert codes == [0, 0], told
    assert not job.leftovers()
    run(run_ranks, recipe, "name=one", *LAYOUT)
    one, two = ([(line["loss"], line["grad_norm"]) for line in metrics(recipe, name)]
                for name in ("one", "two"))  # fmt: skip
    assert one == two


def test_a_host_that_is_cut_off_ends_the_run_on_both_and_is_named(tmp_path: Path) -> None:
    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    job, run_dir = MarkedJob(), tmp_path / "runs" / "cut"
    settings = ["name=cut", *LAYOUT, "train.steps=100000", "bridge.timeout_seconds=6"]
    with two_hosts(tmp_path) as hosts:
        agents = start(hosts, recipe, job, STATIC, *settings)
        logs = [tmp_path / f"{host.name}.log" for host in hosts]
        while not (run_dir / "metrics.jsonl").exists() or len(metrics(recipe, "cut")) < 3:
            assert all(agent.poll() is None for agent in agents), [log.read_text() for log in logs]
            time.sleep(0.2)
        hosts[1].cut()
        cut = time.monotonic()
        try:
            codes = [agent.wait(60) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
        took = time.monotonic() - cut
    print(codes, took, [log.read_text() for log in logs], incidents(run_dir))
    assert 0
