"""What a machine with a GPU shows of this project in ten minutes, unattended.

Command:   make gpu-check            (or: python -m benchmarks.gpu)
Hardware:  one NVIDIA GPU; ranks share it, by the multi-process service (MPS) where it is installed
Result:    not measured yet; runs/gpu_check/index.html and gpu_check.json say what was found

It prints versions and kernels, trains five small jobs on the GPU and on the CPU and compares their
losses, compares the speed of one stack of Qwen3-VL-8B's width with transformers, and runs the tests
that are marked `gpu`. The stack trains in bf16 on sequences of equal length, so neither side pads.
Ours keeps weights and optimizer state in fp32 beside the bf16 weights, transformers' model keeps
all of it in bf16. The vocabulary is small, so that nearly all work is in the layers.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train import write_shard
from data.text.digits import DIGITS, conversation, write_tokenizer
from examples.digits.scans import prepare_digits
from mimo.device import SHARE_GPUS
from mimo.report.page import Part, Section, render
from mimo.report.tables import Table, number, percent, show, write

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/gpu_check")
RECIPE = ROOT / "recipes/qwen3_vl_tiny.yaml"
STEPS = 12
LOSS_TOLERANCE = 0.03  # relative, of the mean loss; bf16 keeps three digits
TOTAL_SECONDS = 600.0
_COMMAND_SECONDS = 150.0
_LEAST_TEST_SECONDS = 120.0
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
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [metrics["loss"] for metrics in map(json.loads, lines) if "loss" in metrics]


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
            start = time.monotonic()
            try:
                error = compare_losses(train(name, "gpu", folder, gpu), on_cpu[name].result())
                passed, value = error <= LOSS_TOLERANCE, f"largest difference of losses {error:.2e}"
            except (RuntimeError, OSError) as failure:
                passed, value = False, str(failure)
            checks.append(Check(f"train {name}", passed, value, time.monotonic() - start))
            print(checks[-1], flush=True)
    return checks


@dataclass(frozen=True)
class Stack:
    """Sizes of the layers, and of a step: microbatches of `sequences` with about `words` tokens."""

    num_layers: int = 4
    hidden_size: int = 4096
    ffn_hidden_size: int = 12288
    num_attention_heads: int = 32
    num_query_groups: int = 8
    head_size: int = 128
    words: int = 2000
    sequences: int = 4
    microbatches: int = 2
    steps: int = 12
    precision: str = "bf16"


_SIZES = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_size"
_WARM_UP_STEPS = 3
QWEN3_VL_8B = Stack()
"""The width of Qwen3-VL-8B's language model, with 4 of its 36 layers."""


def compare_speed(stack: Stack, folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Tokens per second and MFU of ours and of transformers, one after the other."""
    recipe = write_stack(stack, folder / "stack")
    mimo("train", recipe, folder=folder, variables=variables)
    lines = (folder / "stack/runs/stack/metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line][_WARM_UP_STEPS:]
    ours = statistics.median(step["tokens_per_second"] for step in steps)
    mfu = steps[-1]["mfu"] and statistics.median(step["mfu"] for step in steps)
    length = round(steps[0]["tokens"] / (stack.sequences * stack.microbatches))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        attention, theirs = pool.submit(transformers_rate, stack, length).result()
    ratio = ours / theirs
    return {
        "ratio": ratio,
        "contestants": {
            "ours": {"tokens_per_second": ours, "mfu": mfu},
            f"transformers, {attention}": {
                "tokens_per_second": theirs,
                "mfu": mfu and mfu / ratio,
            },
        },
        "note": f"{stack}; {length} tokens to a sequence",
    }


def write_stack(stack: Stack, folder: Path) -> Path:
    """Write a step's samples of equally many tokens, and our recipe: the language model alone."""
    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer")
    rng = np.random.default_rng(0)

    def digits() -> str:
        return " ".join(DIGITS[n] for n in rng.integers(len(DIGITS), size=stack.words // 2))

    def sample(number: int) -> dict[str, Any]:
        content = json.dumps({"messages": conversation([], digits(), digits())}).encode()
        return {"__key__": f"sample{number:04d}", "json": content}

    num_samples = stack.sequences * stack.microbatches
    write_shard(folder / "train-00000.tar", map(sample, range(num_samples)))
    half = stack.head_size // 2
    side = 5 * half // 16  # as Qwen3-VL divides 64: 24, 20, 20
    model = {name: getattr(stack, name) for name in _SIZES.split()}
    model["mrope_section"] = [half - 2 * side, side, side]
    content = {
        "name": "stack",
        "language": {"family": "qwen3", "grid": {"dp": 1}, "model": model},
        "data": {
            "sources": [{"path": str(folder / "train-*.tar")}],
            "tokenizer": str(folder / "tokenizer"),
            "sequence_length": 2 * stack.words,
        },
        "train": {
            "steps": stack.steps,
            "global_batch_size": stack.sequences * stack.microbatches,
            "micro_batch_size": stack.sequences,
            "precision": stack.precision,
            "learning_rate": 1e-4,
            "log_every": 1,
            "run_dir": str(folder / "runs"),
        },
    }
    path = folder / "stack.yaml"
    path.write_text(json.dumps(content))  # which is YAML as well
    return path


def transformers_rate(stack: Stack, length: int) -> tuple[str, float]:
    """Name of the attention, and median tokens per second of transformers' Qwen3; in a process."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from mimo.device import local_device, synchronize
    from mimo.ops.acceleration import has_function

    device = local_device(0)
    has_flash = device.type == "cuda" and has_function("flash_attn", "flash_attn_varlen_func")
    attention = "flash_attention_2" if has_flash else "sdpa"
    config = Qwen3Config(
        vocab_size=64,
        num_hidden_layers=stack.num_layers,
        hidden_size=stack.hidden_size,
        intermediate_size=stack.ffn_hidden_size,
        num_attention_heads=stack.num_attention_heads,
        num_key_value_heads=stack.num_query_groups,
        head_dim=stack.head_size,
    )
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.bfloat16
    )
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (stack.sequences, length), device=device)
    rates = []
    for _ in range(stack.steps):
        synchronize()
        start = time.perf_counter()
        for _ in range(stack.microbatches):
            (model(input_ids=ids, labels=ids, use_cache=False).loss / stack.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        rates.append(ids.numel() * stack.microbatches / (time.perf_counter() - start))
    return attention, statistics.median(rates[_WARM_UP_STEPS:])


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
        begun = time.monotonic()
        try:
            speeds = compare_speed(stack, folder, variables)
            value = f"{speeds['ratio']:.2f} x transformers"
            checks.append(Check("speed", True, value, time.monotonic() - begun))
        except (RuntimeError, OSError) as failure:
            speeds = dict[str, Any]()
            checks.append(Check("speed", False, str(failure), time.monotonic() - begun))
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
    content = {
        "versions": facts,
        "checks": [asdict(check) for check in checks],
        "speed": speeds,
        "seconds": seconds,
    }
    (folder / "gpu_check.json").write_text(json.dumps(content, indent=1))
    tiles = {"device": facts["device"], "time": f"{seconds:.0f} s"}
    tiles["passed"] = f"{sum(check.passed for check in checks)} of {len(checks)}"
    contestants = Table(
        ("", "tokens/s", "MFU"),
        [
            (name, number(one["tokens_per_second"]), percent(one["mfu"]))
            for name, one in speeds.get("contestants", {}).items()
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
