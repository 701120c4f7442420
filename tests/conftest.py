"""Fixtures: real ranks for a test's function, in a tenth of a second."""

import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mimo.engines.megatron import WARNINGS
from mimo.runtime.processes import run_processes, warm_up
from mimo.runtime.ranks import (
    rank_environment,
    rank_variables,
    run_on_cpu,
    set_variables,
    warm_up_on_cpu,
)

RunRanks = Callable[..., list[Any]]

# What ranks of tests import. Once, before they are forked, as it takes a small one longer than to
# train: the engines, all families, and the tests' own helpers with what these import.
PRELOAD = (
    "mimo.engines.megatron.preload",
    "mimo.engines.megatron.api",
    "mimo.train.rank",
    "mimo.check.steps",
    "mimo.model.fsdp",
    *(f"encoders.{name}" for name in ("gemma3", "qwen3_vl", "qwen_vl", "transformers", "whisper")),
    *(f"generators.{name}" for name in ("lumina2", "qwen_image")),
    *(
        f"mimo.families.languages.{name}"
        for name in (
            *("causal_lm", "gemma3", "qwen2_5", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"),
            "transformers",
        )
    ),
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gemma3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "siglip")
    ),
    "mimo.model.generators",
    "diffusers.models.transformers.transformer_qwenimage",
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
    "transformers.tokenization_utils_tokenizers",
    "diffusers.models.transformers",
    *(f"PIL.{name}ImagePlugin" for name in ("Bmp", "Gif", "Jpeg", "Png", "Ppm")),
    "tests.conftest",
    "tests.preload",
    "tests.mimo.runs",
    "tests.mimo.tiny",
)

# How long an example takes says more of the machine than of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    if not Path("/proc/driver/nvidia").exists():
        # Whatever starts ranks first: without a driver, a look at CUDA is no good before a fork.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    # pytest begins every test with filters of its own.
    for message, module in WARNINGS:
        for category in ("UserWarning", "DeprecationWarning"):
            config.addinivalue_line("filterwarnings", f"ignore:{message}:{category}:{module}")


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # `mimo check` froze all objects, and libraries report what is left over


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Workers take file after file: the longest ones first, or one of them is the last, alone.
    seconds = Counter[Path]()
    for item in items:
        seconds[item.path] += 5 * (item.get_closest_marker("slow") is not None)
        seconds[item.path] += 120 * (item.get_closest_marker("slurm") is not None)
    items.sort(key=lambda item: -seconds[item.path])
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    from mimo.device import has_gpu  # late: torch takes seconds to import

    if not has_gpu():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture(scope="module", autouse=True)
def _leave_the_world_of_one() -> Iterator[None]:
    """To generate joins a world of one in this process: to the tests of other files it is unknown.

    Which of them a worker runs afterwards is a matter of time.
    """
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """`run_ranks(function, world_size, *args, timeout_seconds=180) -> results by rank`.

    Every rank calls `function(rank, *args)`, one thread each, in an initialised process group of
    the CPU. `function` is at the top level of its module; arguments and results are pickled.
    A rank's exception fails the test with its traceback, a hang with the stacks of every rank.
    """
    warm_up_on_cpu(PRELOAD)

    def run(
        function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 180
    ) -> list[Any]:
        args = (function, args, timeout_seconds)
        return run_on_cpu(_in_process_group, args, world_size, timeout_seconds)

    return run


@pytest.fixture(scope="session")
def run_ranks_on_gpu() -> Iterator[RunRanks]:
    """The same on this machine's GPUs with NCCL; with fewer GPUs than ranks, ranks share them.

    The fork server of `run_ranks` sees no GPU, so that of these ranks belongs to another process.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as starter:

        def run(
            function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 240
        ) -> list[Any]:
            job = (function, args, timeout_seconds)
            return starter.submit(_start_on_gpu, job, world_size, timeout_seconds).result()

        yield run


def _start_on_gpu(job: tuple[Any, ...], world_size: int, timeout_seconds: float) -> list[Any]:
    from mimo.device import SHARE_GPUS

    set_variables()  # as the command line does: else Megatron's imports look for GPUs by CUDA
    warm_up(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        variables = {**rank_variables(Path(folder)), SHARE_GPUS: "1"}
        args = _in_process_group, job, world_size, variables, timeout_seconds, Path(folder)
        return run_processes(*args)


def _in_process_group(
    function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float
) -> Any:
    import torch

    from mimo.device import initialize_distributed

    torch.set_num_threads(1)
    env = rank_environment()
    assert env is not None
    # Longer than the test may take: a hang is reported with stacks, not as a timeout of one rank.
    initialize_distributed(env.rank, env.world_size, env.rendezvous, 2 * timeout_seconds)
    return function(env.rank, *args)
