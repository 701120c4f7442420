"""What a machine with a GPU shows of this project in twenty minutes, unattended.

Command:   make gpu-check            (or: python -m benchmarks.gpu)
Hardware:  one NVIDIA GPU; ranks share it, by the multi-process service (MPS) where it is installed
Result:    parts of it, on an H100 with torch 2.15, NCCL 2.30.7: docs/performance.md, docs/tests.md;
           runs/gpu_check/index.html and gpu_check.json say what a run has found

It prints versions and kernels, trains five small jobs on the GPU and on the CPU and compares their
losses, compares the speed of one stack of Qwen3-VL-8B's width with transformers, and runs the tests
that are marked `gpu`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_speed import QWEN3_VL_8B, Stack, compare_speed, read_steps
from examples.digits.scans import prepare_digits
from mimo.device import SHARE_GPUS
from mimo.report.page import Part, Section, render
from mimo.report.tables import Table, number, percent, show, write

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/gpu_check")
RECIPE = ROOT / "recipes/qwen3_vl_tiny.yaml"
STEPS = 12
LOSS_TOLERANCE = 0.03  # relative, of the mean loss; bf16 keeps three digits
TOTAL_SECONDS = 1200.0
_COMMAND_SECONDS = 150.0
_LEAST_TEST_SECONDS = 300.0
_PROBLEMS = "failure", "error"  # elements of a JUnit file

_COLOCATED = "encoders.vision={placement: colocated, grid: {tp: 1, dp: 2}, encode_group: 1}"
JOBS = {
    "disjoint": ["language.grid={tp: 1, dp: 2}"],
    "tp2 sp": ["language.grid={tp: 2, sp: true, dp: 1}"],
    "pp2": ["language.grid={pp: 2, dp: 1}"],
    "colocated in groups": ["language.grid={tp: 1, dp: 2}", _COLOCATED],
    "fsdp": ["language.engine=fsdp", "encoders.vision.engine=fsdp"],
}
"""Overrides of the recipe; every job has two or three ranks."""
CPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Check:
    """One attempt. value: what is worth knowing. seconds: of the whole attempt."""

    name: str
    passed: bool
    value: str
    seconds: float


def attempt(name: str, work: Callable[[], tuple[bool, str]]) -> Check:
    """Call ``work``, which returns whether it passed and what is worth knowing; print the check."""
    start = time.monotonic()
    try:
        passed, value = work()
    except (RuntimeError, OSError) as failure:
        passed, value = False, str(failure)
    check = Check(name, passed, value, time.monotonic() - start)
    print(check, flush=True)
    return check


def command(
    *words: object, folder: Path, variables: Mapping[str, str], seconds: float = _COMMAND_SECONDS
) -> str:
    """The output of a command. Raises RuntimeError with its last lines if it fails or hangs."""
    try:
        done = subprocess.run(
            [*map(str, words)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took longer than {seconds:g} s") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise RuntimeError(f"exit code {done.returncode}: {' / '.join(lines)}")
    return done.stdout


def mimo(*words: object, folder: Path, variables: Mapping[str, str]) -> None:
    """Run `mimo`; raises like `command`."""
    command(sys.executable, "-m", "mimo.cli.main", *words, folder=folder, variables=variables)


def versions(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The GPU, libraries and kernels, looked up in a process of its own."""
    code = (
        "import json, torch\n"
        "from mimo.device import device_name, library_versions\n"
        "from mimo.ops.acceleration import kernel_states\n"
        "from mimo.runtime.run_files import versions\n"
        "kernels = {f'kernel {name}': state for name, state in kernel_states().items()}\n"
        "facts = {'device': device_name(), **versions(), **library_versions(), **kernels}\n"
        "print(json.dumps(facts))\n"
    )
    output = command(sys.executable, "-c", code, folder=folder, variables=variables)
    return json.loads(output.splitlines()[-1])


@contextmanager
def shared_gpu(folder: Path) -> Iterator[dict[str, str]]:
    """Variables for ranks that share a GPU; the multi-process service runs meanwhile."""
    variables = {SHARE_GPUS: "1"}
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield variables
        return
    for name in ("PIPE", "LOG"):
        place = (folder / f"mps_{name.lower()}").resolve()
        place.mkdir(exist_ok=True)
        variables[f"CUDA_MPS_{name}_DIRECTORY"] = str(place)
    environment = {**os.environ, **variables}
    subprocess.run([control, "-d"], env=environment, check=False)
    try:
        yield variables
    finally:
        subprocess.run([control], input="quit\n", text=True, env=environment, check=False)


def train(name: str, device: str, folder: Path, variables: Mapping[str, str]) -> list[float]:
    """The losses of a job, by step. Raises like `command`."""
    run = f"{name.replace(' ', '_')}_{device}"
    mimo(
        *("train", RECIPE, f"name={run}", *JOBS[name], "train.precision=bf16"),
        *(f"train.steps={STEPS}", "train.warmup_steps=2", "train.log_every=1"),
        folder=folder,
        variables=variables,
    )
    return [step["loss"] for step in read_steps(folder / "runs" / run)]


def compare_losses(on_gpu: Sequence[float], on_cpu: Sequence[float]) -> float:
    """Largest difference of two runs' losses, relative to their mean; else infinity."""
    if len(on_gpu) != len(on_cpu) or not on_cpu:
        return math.inf
    differences = [abs(a - b) for a, b in zip(on_gpu, on_cpu, strict=True)]
    largest = max(differences, key=lambda value: math.inf if math.isnan(value) else value)
    return math.inf if math.isnan(largest) else largest / statistics.mean(on_cpu)


def run_jobs(names: Sequence[str], folder: Path, gpu: Mapping[str, str]) -> list[Check]:
    """Train each job on the GPU and on the CPU, at the same time, and compare their losses."""
    mimo("tiny", "qwen3_vl", "checkpoints/qwen3_vl_tiny", folder=folder, variables=CPU)
    prepare_digits(folder / "datasets/digits", num_train=400, num_validation=40, num_test=40)
    checks = []
    with ThreadPoolExecutor(1) as beside:
        on_cpu = {name: beside.submit(train, name, "cpu", folder, CPU) for name in names}
        for name in names:

            def compare(name: str = name) -> tuple[bool, str]:
                error = compare_losses(train(name, "gpu", folder, gpu), on_cpu[name].result())
                return error <= LOSS_TOLERANCE, f"largest difference of losses {error:.2e}"

            checks.append(attempt(f"train {name}", compare))
    return checks


def run_tests(folder: Path, variables: Mapping[str, str], seconds: float) -> list[Check]:
    """Run the tests that are marked `gpu`: one check for all, one for each failure."""
    start, report = time.monotonic(), (folder / "tests.xml").resolve()
    words = "-m", "pytest", "-m", "gpu", "-q", "-p", "no:xdist", f"--junitxml={report}"
    failure = ""
    try:
        command(sys.executable, *words, folder=ROOT, variables=variables, seconds=seconds)
    except RuntimeError as error:
        failure = str(error)
    if not report.exists():
        return [Check("tests", False, failure, time.monotonic() - start)]
    return read_tests(report, failure, time.monotonic() - start)


def read_tests(report: Path, failure: str, seconds: float) -> list[Check]:
    """The checks that a JUnit file holds; see `run_tests`."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    problems = [(case, problem) for case in cases for problem in case if problem.tag in _PROBLEMS]
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(problems) - num_skipped
    summary = f"{passed} passed, {len(problems)} failed, {num_skipped} skipped {failure}".strip()
    checks = [Check("tests", not failure and passed > 0, summary, seconds)]
    for case, problem in problems:
        message = problem.get("message", "").partition("\n")[0]
        name = f"{case.get('classname')}::{case.get('name')}"
        checks.append(Check(name, False, message, float(case.get("time", 0))))
    return checks


def main(
    folder: Path = FOLDER,
    jobs: Sequence[str] = tuple(JOBS),
    stack: Stack = QWEN3_VL_8B,
    tests: bool = True,
    gpu_needed: bool = True,
) -> int:
    """Check the machine and write the page; 0 if all passed, 2 without a GPU.

    gpu_needed: false to try the checks themselves on a CPU.
    """
    start, folder = time.monotonic(), folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with shared_gpu(folder) as variables:
        facts = versions(folder, variables)
        for name, value in facts.items():
            print(f"{name}: {value}", flush=True)
        if gpu_needed and facts["device"] == "CPU":
            print("gpu-check needs a GPU, and torch sees none here", file=sys.stderr)
            return 2
        checks = run_jobs(jobs, folder, variables)
        speeds = dict[str, Any]()

        def compare() -> tuple[bool, str]:
            run = partial(mimo, "train", folder=folder, variables=variables)
            speeds.update(compare_speed(stack, folder, run))
            return True, f"{speeds['ratio']:.2f} x transformers"

        checks.append(attempt("speed", compare))
        if tests:
            left = TOTAL_SECONDS - (time.monotonic() - start)
            checks += run_tests(folder, variables, max(left, _LEAST_TEST_SECONDS))
    conclude(folder, facts, checks, speeds, time.monotonic() - start)
    return int(not all(check.passed for check in checks))


def conclude(
    folder: Path,
    facts: Mapping[str, str],
    checks: Sequence[Check],
    speeds: Mapping[str, Any],
    seconds: float,
) -> None:
    """Print a table, and write the JSON file and the page."""
    rows = [
        (check.name, "passed" if check.passed else "FAILED", check.value, f"{check.seconds:.0f} s")
        for check in checks
    ]
    table = Table(("check", "result", "", "time"), rows, words=True)
    show(table)
    content = {"versions": facts, "speed": speeds, "seconds": seconds}
    content["checks"] = [asdict(check) for check in checks]
    (folder / "gpu_check.json").write_text(json.dumps(content, indent=1))
    tiles = {"device": facts["device"], "time": f"{seconds:.0f} s"}
    tiles["passed"] = f"{sum(check.passed for check in checks)} of {len(checks)}"
    contestants = Table(
        ("", "tokens/s", "MFU"),
        [
            (name, number(speed["tokens_per_second"]), percent(speed["mfu"]))
            for name, speed in speeds.get("contestants", {}).items()
        ],
    )
    sections = (
        Section("Checks", tables=(table,)),
        Section("Speed of one stack", tables=(contestants,), note=speeds.get("note", "")),
        Section("Versions", tables=(Table(("", ""), [*facts.items()], words=True),)),
    )
    write(folder / "index.html", render("GPU check", [Part("", tiles, sections)]))


if __name__ == "__main__":
    sys.exit(main())
