"""Training across two hosts, by the commands that `mimo launch --hosts` prints.

The encoder and one lane of the language model are on the first host, the other lane on the second.
Together they train as one host does; with the link between them cut, both end and say so.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.runtime.run_files import incidents
from tests.conftest import RunRanks
from tests.hosts import INTERFACE, Host, two_hosts
from tests.mimo.runs import LAYOUT, metrics, mimo, run
from tests.ranks import MarkedJob

pytestmark = pytest.mark.slow
SITE = f"""
gpus_per_node: 0
ranks_per_node: 2
environment: {{GLOO_SOCKET_IFNAME: {INTERFACE}, NCCL_SOCKET_IFNAME: {INTERFACE}}}
"""
TIMEOUT_SECONDS = 6


def lines_of(hosts: list[Host], recipe: Path, *overrides: str) -> list[str]:
    """What to start on each host, for one job of three ranks."""
    names = ",".join(host.name for host in hosts)
    site = recipe.with_name("site.yaml")
    site.write_text(SITE)
    printed = mimo("launch", recipe, *LAYOUT, *overrides, "--cluster", site, "--hosts", names)
    lines = printed.stdout.splitlines()
    assert [re.findall(r"nproc-per-node=(\d)", line) for line in lines] == [["2"], ["1"]], printed
    return lines


def start(
    hosts: list[Host], recipe: Path, job: MarkedJob, lines: list[str]
) -> list[subprocess.Popen[bytes]]:
    """The line of each host."""
    return [
        host.start(["bash", "-c", line], log_of(recipe, host), job.environment)
        for host, line in zip(hosts, lines, strict=True)
    ]


def log_of(recipe: Path, host: Host) -> Path:
    return recipe.parent / f"{host.name}.log"


def test_two_hosts_train_as_one_does(run_ranks: RunRanks, recipe: Path, tmp_path: Path) -> None:
    job = MarkedJob()
    with two_hosts(tmp_path) as hosts:
        lines = lines_of(hosts, recipe, "name=two")
        look = [line.replace("mimo.cli.main train", "mimo.cli.main preflight") for line in lines]
        looks = start(hosts, recipe, job, look)
        assert [look.wait(120) for look in looks] == [0, 0], log_of(recipe, hosts[0]).read_text()
        assert "preflight: 3 ranks on first, second\n" in log_of(recipe, hosts[0]).read_text()
        agents = start(hosts, recipe, job, lines)
        codes = [agent.wait(120) for agent in agents]
        printed = "".join(log_of(recipe, host).read_text() for host in hosts)
    assert codes == [0, 0], printed
    assert not job.leftovers()
    run(run_ranks, recipe, "name=one", *LAYOUT)
    single, double = (
        [(line["loss"], line["grad_norm"]) for line in metrics(recipe, name)]
        for name in ("one", "two")
    )
    assert single == double
    variables = load_recipe(tmp_path / "runs/two/recipe.yaml").cluster.environment
    assert variables["GLOO_SOCKET_IFNAME"] == INTERFACE


def test_a_host_that_preflight_finds_broken_is_named_on_hosts_without_slurm(
    recipe: Path, tmp_path: Path
) -> None:
    job = MarkedJob()
    with two_hosts(tmp_path) as hosts:
        lines = lines_of(hosts, recipe, "name=broken")
        looks = [line.replace("mimo.cli.main train", "mimo.cli.main preflight") for line in lines]
        looks[1] = looks[1].replace("name=broken", "name=broken train.stepps=3")
        codes = [agent.wait(120) for agent in start(hosts, recipe, job, looks)]
        printed = [log_of(recipe, host).read_text() for host in hosts]
    assert codes == [1, 1], printed
    assert not job.leftovers()
    assert re.search(r"BROKEN: second: .*did you mean 'steps'", printed[0], re.DOTALL), printed
    assert "preflight: do not begin\n" in printed[0]


def test_a_host_that_is_cut_off_ends_the_run_on_both_and_each_says_so(
    recipe: Path, tmp_path: Path
) -> None:
    job, run_dir = MarkedJob(), tmp_path / "runs" / "cut"
    settings = ("name=cut", "train.steps=100000", f"bridge.timeout_seconds={TIMEOUT_SECONDS}")
    with two_hosts(tmp_path) as hosts:
        agents = start(hosts, recipe, job, lines_of(hosts, recipe, *settings))
        while not (run_dir / "metrics.jsonl").exists() or len(metrics(recipe, "cut")) < 3:
            ended = [log_of(recipe, h).read_text() for h in hosts if agents[0].poll() is not None]
            assert not ended, ended
            time.sleep(0.1)
        hosts[1].cut()
        cut = time.monotonic()
        try:
            codes = [agent.wait(60) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
        assert time.monotonic() - cut < TIMEOUT_SECONDS + 30
        printed = [log_of(recipe, host).read_text() for host in hosts]
    assert codes == [1, 1]
    assert not job.leftovers()
    origin = "no message gets through between first (rank 0, 1) and second (rank 2)"
    assert all(origin in text for text in printed), printed
    (incident,) = incidents(run_dir)
    assert incident["kind"] == "hang"
    assert origin in incident["text"]
    shown = mimo("logs", run_dir, "--first-error").stdout
    assert origin in shown.splitlines()[0]
