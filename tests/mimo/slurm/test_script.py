"""What scripts say and do; SLURM's commands and `mimo` are stand-ins that note how they are called.

Real jobs on a real SLURM are in the tests of mark `slurm`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mimo.config.cluster import Cluster
from mimo.errors import RecipeError
from mimo.slurm.script import Job, write
from mimo.slurm.submit import array_scripts
from tests.mimo.slurm.jobs import SEVENTEEN, job_of
from tests.mimo.slurm.test_golden import GOLDEN

_STAND_INS = {
    "mimo": 'echo "mimo $*" >>calls\n'
    'if [ -f "$1.code" ]; then read -r code <"$1.code"; exit "$code"; fi',
    "srun": 'echo "srun $*" >>calls; read -r code <srun.code; exit "$code"',
    "scancel": 'echo "scancel $*" >>calls',
    "scontrol": 'echo "scontrol $*" >>calls; [ "$1" = show ] && printf "%s\\n" n0 n1 n2; exit 0',
}


@dataclass
class Stage:
    """A folder in which a job's script runs without SLURM."""

    folder: Path
    job: Job

    def run(self, *arguments: str, srun: int = 0, check: int = 0, job_id: int = 7) -> int:
        """The exit code of the script, with those of srun and of commands of mimo."""
        for name, code in (("srun", srun), ("check", check)):
            (self.folder / f"{name}.code").write_text(f"{code}\n")
        slurm = {"JOB_ID": job_id, "JOB_NODELIST": "n[0-2]"}
        return subprocess.run(
            ["bash", str(self.job.launch / "job.sh"), *arguments],
            env={"PATH": os.environ["PATH"], **{f"SLURM_{k}": str(v) for k, v in slurm.items()}},
            capture_output=True,
            check=False,
        ).returncode

    def calls(self, name: str) -> list[str]:
        """How a command was called, in order."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.split()[0] == name]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return stage_of(tmp_path, "preflight: false")


def stage_of(folder: Path, site: str) -> Stage:
    bin = folder / "bin"
    bin.mkdir(parents=True)
    for name, text in _STAND_INS.items():
        (bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin / name).chmod(0o755)
    job = replace(job_of(folder, SEVENTEEN, site), folder=folder, bin=bin)
    write(job)
    return Stage(folder, job)


def test_a_job_that_is_done_ends_and_is_not_started_again(stage: Stage) -> None:
    assert stage.run(srun=0) == 0
    assert not [call for call in stage.calls("scontrol") if "requeue" in call]
    hosts = (stage.job.launch / "hosts_all").read_text().split()
    assert [hosts.index(host) for host in ("n0", "n1", "n2")] == [0, 1, 9]
    assert len(hosts) == 17


@pytest.mark.parametrize("code", [75, 138, 143])
def test_a_job_that_has_saved_or_not_begun_is_requeued_however_often(
    stage: Stage, code: int
) -> None:
    for _ in range(5):
        assert stage.run(srun=code) == code
    assert stage.calls("scontrol").count("scontrol requeue 7") == 5


def test_a_job_that_fails_is_requeued_as_often_as_the_recipe_says_and_shows_why(
    stage: Stage,
) -> None:
    for number in range(5):
        assert stage.run(srun=137) == 137
        expected = min(number + 1, 3)
        assert stage.calls("scontrol").count("scontrol requeue 7") == expected
    assert stage.calls("mimo").count(f"mimo logs {stage.job.run} --first-error") == 5
    assert stage.run(srun=1, job_id=8) == 1
    assert "scontrol requeue 8" in stage.calls("scontrol"), "another job counts for itself"


@pytest.mark.parametrize("where", ["check", "srun"])
def test_a_wrong_input_is_never_tried_again(stage: Stage, where: str) -> None:
    assert (stage.run(check=2) if where == "check" else stage.run(srun=2)) == 2
    assert not [call for call in stage.calls("scontrol") if "requeue" in call]
    assert bool(stage.calls("srun")) == (where == "srun")


def test_a_link_of_a_chain_leaves_the_rest_to_the_next_and_cancels_it_when_done(
    stage: Stage,
) -> None:
    chain = stage.folder / "chain"
    chain.write_text("6\n7\n8\n9\n")
    assert stage.run(str(chain), srun=75) == 75
    assert not stage.calls("scancel")
    assert not [call for call in stage.calls("scontrol") if "requeue" in call]
    assert stage.run(str(chain), srun=0) == 0
    assert stage.calls("scancel") == ["scancel 8 9"]
    assert stage.run(str(chain), job_id=6, srun=2) == 2, "the first, on another mistake"
    assert stage.calls("scancel")[1:] == ["scancel 7 8 9"]
    assert stage.run(str(chain), job_id=9) == 0
    assert len(stage.calls("scancel")) == 2, "none comes after the last"


def test_a_failed_preflight_keeps_ranks_from_training(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, "restarts: 0")
    assert stage.run(srun=1) == 1
    (call,) = stage.calls("srun")
    assert " preflight " in call


def test_a_job_that_was_submitted_by_hand_notes_itself_once(tmp_path: Path) -> None:
    stage = stage_of(tmp_path / 'a "b" %s \\c', f"{{preflight: false, log_dir: '{tmp_path}'}}")
    for arguments in ((), (), ("", "6_1")):
        assert stage.run(*arguments) == 0
    noted = map(json.loads, (stage.job.launch / "jobs.jsonl").read_text().splitlines())
    first, task = [(line.pop("time")[:2], line) for line in noted]
    script = str(stage.job.launch / "job.sh")
    assert first == ("20", {"job_id": "7", "kind": "by hand", "script": script})
    assert task == ("20", {"job_id": "6_1", "kind": "array", "script": script})


def test_ranks_get_the_first_node_and_a_port_of_the_job_that_is_free(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, "preflight: false")
    srun = stage.folder / "bin/srun"
    srun.write_text('#!/bin/bash\necho "$MASTER_ADDR $MASTER_PORT" >>place\n')
    host, ports = os.uname().nodename, [20000 + 37 * number for number in (7, 8)]
    assert stage.run(job_id=7) == 0
    with socket.create_server(("", ports[1])):
        assert stage.run(job_id=8) == 0
    places = (stage.folder / "place").read_text().splitlines()
    assert places == [f"{host} {ports[0]}", f"{host} {ports[1] + 1}"]


def test_what_a_rank_prints_goes_to_its_log_and_its_exit_code_to_srun(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, "preflight: false")
    srun, mimo = stage.folder / "bin/srun", stage.folder / "bin/mimo"
    srun.write_text('#!/bin/bash\nuntil [ $1 = bash ]; do shift; done; SLURM_PROCID=3 exec "$@"')
    mimo.write_text("#!/bin/bash\n[ $1 = train ] || exit 0; echo out; echo error >&2; exit 75\n")
    for starts in (1, 2):
        assert stage.run() == 75
        assert (stage.job.launch / "rank_3.log").read_text() == "out\nerror\n" * starts


# ------------------------------------------------------------------------------- quoting

_PRINTABLE = st.text(st.characters().filter(str.isprintable), min_size=1, max_size=60)


@settings(max_examples=40)
@given(value=_PRINTABLE)
def test_any_value_of_an_environment_variable_arrives_unchanged(value: str, job: Job) -> None:
    text = _changed(job, {"environment": {"VALUE": value}}).text
    lines = [line for line in text.splitlines() if line.startswith("export ")]
    done = subprocess.run(
        ["bash", "-c", "\n".join([*lines, "/usr/bin/printenv -0 VALUE"])],
        capture_output=True,
        check=True,
    )
    assert done.stdout == f"{value}\0".encode()


@settings(max_examples=25)
@given(path=_PRINTABLE.filter(lambda path: "/" not in path and path not in (".", "..")))
def test_any_folder_is_entered_as_it_is_called(path: str, job: Job) -> None:
    job = replace(job, folder=Path("/nowhere") / path)
    if set(path) & set("\"'\\#"):
        with pytest.raises(RecipeError, match=r"set cluster\.log_dir"):
            _ = job.text
        job = _changed(job, {"log_dir": "/logs"})
    text = job.text
    (line,) = [line for line in text.splitlines() if line.startswith("cd ")]
    (run,) = [line for line in text.splitlines() if line.startswith("run=")]
    script = f'cd() {{ printf "%s\\0" "$@"; }}\n{line}\n{run}\nprintf "%s\\0" "$run"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout == f"/nowhere/{path}\0/nowhere/{path}/runs/tiny\0".encode()


@pytest.mark.parametrize(
    "value", ["a\n#SBATCH --nodes=64", "$(touch /tmp/x)", "a b", "a;b", "`id`", "--x", ""]
)
@pytest.mark.parametrize("key", ["partition", "constraint", "time_limit"])
def test_nothing_but_a_word_becomes_a_directive(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"site.yaml:1: cluster\.{key}: "):
        job_of(tmp_path, site=f"{key}: {_as_yaml(value)}")


@pytest.mark.parametrize("name", ["$(id)", "a\n#SBATCH -N9", "a b", "../x", "-x"])
def test_no_run_has_a_name_that_bash_or_slurm_could_act_on(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="name"):
        job_of(tmp_path, [f"name={_as_yaml(name)}"])


@pytest.mark.parametrize("option", ["--nodes=9", "--ntas=4", "--array=0-9", "--wrap=id"])
def test_what_the_layout_decides_is_no_option(option: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"site.yaml:1: cluster.options.0: got '--"):
        _ = job_of(tmp_path, site=f"options: ['{option}']").text


@pytest.mark.parametrize(
    ("site", "key"),
    [
        ("log_dir: /a'b", "cluster.log_dir"),
        ("container: {runtime: pyxis, image: a, mounts: ['/a,/b:/c']}", "cluster.container.mounts"),
        ("container: {runtime: apptainer, image: --x}", "cluster.container.image"),
        ("{container: {runtime: pyxis, image: a}, log_dir: '/a:b'}", "cluster.container: got"),
        ("reservation: x", "cluster.reservation: this key was removed; give"),
    ],
)
def test_what_slurm_or_a_container_cannot_be_told_is_refused(
    site: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=rf"site.yaml:1: {key}"):
        _ = job_of(tmp_path, site=site).text


def _as_yaml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("job"))


def _changed(job: Job, cluster: dict[str, object]) -> Job:
    (phase,) = job.phased.phases
    section = phase.recipe.cluster.model_copy(update=cluster)
    recipe = phase.recipe.model_copy(update={"cluster": section})
    return replace(job, phased=replace(job.phased, phases=(replace(phase, recipe=recipe),)))


def test_no_variable_that_a_script_uses_is_set_by_a_recipe(job: Job, tmp_path: Path) -> None:
    texts = [path.read_text() for path in GOLDEN.glob("*.sh")]
    texts += [text for _, text in array_scripts([job])]
    matches = re.findall(r"(?<!\\)\$\{?[#!]?([A-Za-z_]\w*)|^ *(\w+)=", "\n".join(texts), re.M)
    used = {name for names in matches for name in names if name}
    assert {"chain", "MASTER_PORT", "PATH", "ranks_of_all", "SLURM_JOB_ID"} <= used
    for name in {*used, "MASTER_ADDR", "RANK", "IFS", "BASH_ENV"}:
        with pytest.raises(ValidationError, match="need this variable|ranks would not find"):
            Cluster(environment={name: "x"})
    usual: dict[str, str] = dict.fromkeys(("http_proxy", "OMP_NUM_THREADS", "runs_of"), "x")
    assert Cluster(environment=usual).environment == usual
    with pytest.raises(RecipeError, match=r"site.yaml:1: cluster\.environment\.run: job scripts"):
        job_of(tmp_path, site="environment: {run: x}")
