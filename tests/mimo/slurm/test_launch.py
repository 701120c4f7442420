"""`mimo launch` without a SLURM: sites, what is written and what is not, chains, arrays, hosts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mimo.cli.main import app
from mimo.errors import RecipeError
from mimo.report.runs import jobs_of
from mimo.slurm.script import prepare
from tests.mimo.slurm.jobs import SEVENTEEN, WIDE, write_recipe

# Notes how it is called, and numbers jobs from 41 on.
_SBATCH = """#!/bin/bash
echo "$*" >>calls
echo "$((40 + $(wc -l <calls)));cluster"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe, on a host without SLURM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin-without-slurm")
    write_recipe(tmp_path)
    return tmp_path


@pytest.fixture
def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a stand-in for sbatch; what it was called with is in `calls`."""
    bin = folder / "bin"
    bin.mkdir()
    (bin / "sbatch").write_text(_SBATCH)
    (bin / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    return folder


def launch(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["launch", "tiny.yaml", *WIDE, *arguments])


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------- --cluster FILE


@pytest.mark.parametrize("around", ["", "cluster:\n"])
def test_a_site_lies_over_the_recipe_and_overrides_over_both(folder: Path, around: str) -> None:
    site = folder / "site.yaml"
    with (folder / "tiny.yaml").open("a") as file:
        file.write("cluster: {partition: old, qos: low, environment: {A: '1', B: '2'}}\n")
    keys = ["partition: new", "account: us", "environment: {B: '3'}"]
    indent = "  " if around else ""
    site.write_text(around + "".join(f"{indent}{key}\n" for key in keys))
    recipe = prepare(folder / "tiny.yaml", [*WIDE, "cluster.account=them"], site).recipe
    cluster = recipe.cluster
    assert (cluster.partition, cluster.qos, cluster.account) == ("new", "low", "them")
    assert cluster.environment == {"A": "1", "B": "3"}
    line = 2 if around else 1
    assert recipe.problem(("cluster", "partition"), "x").startswith(f"{site}:{line}: ")
    assert recipe.problem(("cluster", "qos"), "x").startswith(f"{folder / 'tiny.yaml'}:")
    assert "override" in recipe.problem(("cluster", "account"), "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qos: a\npartitoin: b\n", "site.yaml:2: cluster.partitoin: .*'partition'"),
        ("cluster:\n  restarts: many\n", "site.yaml:2: cluster.restarts: "),
        ("cluster: {qos: a}\ntrain: {steps: 3}\n", "site.yaml:2: cluster.train: unknown key"),
        ("a: [1\n", "site.yaml:[12]: not valid YAML"),
        ("- a\n", "site.yaml:1: "),
        ("gpus_per_node: 0\n", "site.yaml.*gpus_per_node 0 means"),
    ],
)
def test_a_mistake_in_a_site_is_shown_with_its_line(folder: Path, text: str, message: str) -> None:
    site = folder / "site.yaml"
    site.write_text(text)
    with pytest.raises(RecipeError, match=message):
        prepare(folder / "tiny.yaml", WIDE, site)


# --------------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    ("option", "start"),
    [("--dry-run", "#!/bin/bash\n"), ("--explain", "node"), ("--hosts=a", "cd ")],
)
def test_looking_at_a_job_writes_nothing(slurm: Path, option: str, start: str) -> None:
    before = files_of(slurm)
    result = launch(option)
    assert result.exit_code == 0, result.output
    assert files_of(slurm) == before
    assert result.stdout.startswith(start)


def test_a_script_is_written_beside_the_recipe_as_launched(slurm: Path) -> None:
    result = launch("train.steps=7", "cluster.partition=gpu")
    launched = slurm / "runs/tiny/launch"
    assert files_of(launched) == {"job.sh", "recipe.yaml", "placement.txt"}
    assert f"sbatch {launched}/job.sh" in result.stdout
    again = prepare(launched / "recipe.yaml").recipe
    assert (again.train.steps, again.cluster.partition) == (7, "gpu")
    assert not (slurm / "calls").exists()


def test_without_slurm_the_same_command_trains_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLD", "")  # and so is put back
    site, called = Path("site.yaml"), []

    def train(*given: object, site: Path) -> int:
        called.append((*given, site, os.environ["TOLD"]))
        return 75

    monkeypatch.setattr("mimo.train.main.main", train)
    site.write_text("environment: {TOLD: of site}")
    result = launch("train.steps=7", "--cluster=site.yaml")
    assert result.exit_code == 75, result.output
    assert called == [(Path("tiny.yaml"), [*WIDE, "train.steps=7"], site, "of site")]
    assert "training on this machine" in result.stdout


def test_ranks_on_hosts_read_the_site_as_well(folder: Path) -> None:
    (folder / "site.yaml").write_text("restarts: many")
    result = CliRunner().invoke(app, ["train", "tiny.yaml", "--cluster=site.yaml"])
    assert result.exit_code == 2
    assert "site.yaml:1: cluster.restarts: " in result.stderr


def test_without_slurm_nothing_is_submitted(folder: Path) -> None:
    result = launch("--submit")
    assert result.exit_code == 2
    assert "sbatch: not found" in result.stderr


# ------------------------------------------------------------------------------- submit


def test_a_job_can_be_explained_and_submitted_at_once(slurm: Path) -> None:
    printed = launch("--explain", "--submit").stdout
    assert printed.startswith(launch("--explain").stdout)
    assert "submitted 41;" in printed


def test_a_submitted_job_is_noted_with_its_number(slurm: Path) -> None:
    assert launch("--submit").exit_code == 0
    script = slurm / "runs/tiny/launch/job.sh"
    assert (slurm / "calls").read_text() == f"--parsable {script}\n"
    noted = json.loads((script.parent / "jobs.jsonl").read_text())
    assert noted.pop("time").startswith("20")
    assert noted == {"job_id": "41", "kind": "job", "script": str(script)}
    own = {"job_id": "42", "kind": "by hand"}
    with (slurm / "bin/sbatch").open("a") as file:  # a job that begins at once
        file.write(f"""echo '{json.dumps(own)}' >>{script.parent}/jobs.jsonl\n""")
    assert launch("--submit").exit_code == 0
    run = script.parent.parent
    expected = [("41", "job"), ("42", "job")]
    assert [(job["job_id"], job["kind"]) for job in jobs_of(run)] == expected
    with (script.parent / "jobs.jsonl").open("a") as file:
        file.write(f"{json.dumps(own)}\n")  # a job that is late
    assert [(job["job_id"], job["kind"]) for job in jobs_of(run)] == expected


def test_links_of_a_chain_wait_for_each_other(slurm: Path) -> None:
    assert launch("--submit", "--chain=3").exit_code == 0
    calls = (slurm / "calls").read_text().splitlines()
    after = [[word for word in call.split() if "dependency" in word] for call in calls]
    assert after == [[], ["--dependency=afterany:41"], ["--dependency=afterany:42"]]
    (chain,) = {Path(call.split()[-1]) for call in calls}
    assert chain.read_text().split() == ["41", "42", "43"]
    noted = (slurm / "runs/tiny/launch/jobs.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in noted] == ["chain"] * 3


def test_an_array_is_of_runs_that_ask_for_the_same(slurm: Path) -> None:
    for number, more in enumerate(["", "", "cluster: {qos: high}\n"], start=2):
        text = (slurm / "tiny.yaml").read_text().replace("name: tiny", f"name: other{number}")
        (slurm / f"{number}.yaml").write_text(text + more)
    recipes = ("--array", "2.yaml", "3.yaml", "4.yaml")
    shown = launch("--dry-run", *recipes).stdout
    result = launch("--submit", *recipes)
    assert result.exit_code == 0, result.output
    assert "submitted 41_0, 41_1, 41_2, 42_0" in result.stdout
    runs = slurm / "runs"
    jobs = [
        (runs / name / "launch/job.sh").read_text()
        for name in ("tiny", "other2", "other3", "other4")
    ]
    arrays = [(runs / name / "launch/array.sh").read_text() for name in ("tiny", "other4")]
    assert shown == "".join([*jobs, *arrays])
    assert "#SBATCH --array=0-2\n" in arrays[0]
    assert "#SBATCH --qos=high\n" in arrays[1]
    (runs / "other3/launch/job.sh").write_text('echo "$0 is $2"')
    numbers = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "51"}
    environment = {**os.environ, **numbers}
    subprocess.run(["bash", runs / "tiny/launch/array.sh"], env=environment, check=True)
    printed = (runs / "other3/launch/job_51.out").read_text()
    assert printed == f"{runs}/other3/launch/job.sh is 41_2\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--submit", "--array", "tiny.yaml"], "two runs of the array are called tiny"),
        (["--chain=2"], "add --submit"),
        (["--hosts=a", "--submit"], "hosts without SLURM"),
        (["--dry-run", "--submit"], "--dry-run only prints"),
        (["--submit", "--array", "--hetjob"], "no arrays of heterogeneous jobs"),
    ],
)
def test_what_does_not_go_together_is_refused(
    slurm: Path, arguments: list[str], message: str
) -> None:
    result = launch(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (slurm / "calls").exists()


def test_what_slurm_says_to_a_job_that_it_refuses_is_shown(slurm: Path) -> None:
    text = "#!/bin/bash\necho 'invalid partition specified: x' >&2; exit 1\n"
    (slurm / "bin/sbatch").write_text(text)
    result = launch("--submit")
    assert result.exit_code == 2
    assert "invalid partition specified: x" in result.stderr
    assert not (slurm / "runs/tiny/launch/jobs.jsonl").exists()


# ------------------------------------------------------------------------------- --hosts


def lines_of(result: Result) -> list[list[str]]:
    """The words of each host's line."""
    assert result.exit_code == 0, result.output
    return [shlex.split(line, comments=True) for line in result.stdout.splitlines()]


def test_each_host_gets_a_line_of_torchrun_with_its_number_of_ranks(folder: Path) -> None:
    lines = lines_of(launch(*SEVENTEEN, "--hosts=a,b,c", "cluster.environment={X: 'a $(b)'}"))
    assert len(lines) == 3
    for number, (words, count) in enumerate(zip(lines, (1, 8, 8), strict=True)):
        assert words[:3] == ["cd", str(folder), "&&"]
        assert "X=a $(b)" in words
        start = words.index("--nnodes=3")
        assert Path(words[start - 1]).name == "torchrun"
        assert words[start + 1 : words.index("-m")] == [
            f"--node-rank={number}",
            f"--nproc-per-node={count}",
            "--master-addr=a",
            "--master-port=29500",
        ]
        assert words[-1] == "cluster.environment={X: 'a $(b)'}"


def test_lines_of_hosts_set_what_the_script_of_a_job_sets(folder: Path) -> None:
    Path("site.yaml").write_text(
        "{venv: env, modules: [cuda/12, 'my gcc'], cpus_per_rank: 6, "
        "environment: {HF_HUB_OFFLINE: '0'}}"
    )
    (words,) = lines_of(launch("--hosts=a", "--cluster=site.yaml"))
    modules = ["module", "load", "cuda/12", "&&", "module", "load", "my gcc", "&&"]
    assert words[:11] == ["cd", str(folder), "&&", *modules]
    at = words.index("--nnodes=1")
    assert dict(word.split("=") for word in words[11 : at - 1]) == {
        "HF_HUB_OFFLINE": "0",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "6",
    }
    assert words[at - 1] == f"{folder}/env/bin/torchrun"
    assert words[-2:] == ["--cluster", "site.yaml"]


def test_hosts_start_apptainer_but_not_a_container_that_only_srun_knows(folder: Path) -> None:
    image = "cluster.container={image: x.sif, runtime: "
    (words,) = lines_of(launch("--hosts=a", f"{image}apptainer}}"))
    at = words.index("apptainer")
    assert words[at : at + 3] == ["apptainer", "exec", f"--pwd={folder}"]
    assert words[words.index("x.sif") :][:2] == ["x.sif", "torchrun"]
    result = launch("--hosts=a", f"{image}pyxis}}")
    assert result.exit_code == 2
    assert "cluster.container.runtime: got 'pyxis'" in result.stderr


def test_another_number_of_hosts_is_refused(folder: Path) -> None:
    for hosts in ("a,b", "a,b,b"):
        result = launch(*SEVENTEEN, f"--hosts={hosts}")
        assert result.exit_code == 2
        assert "need 3 different hosts" in result.stderr
