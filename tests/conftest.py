"""Fixtures: real ranks for a test's function, in a tenth of a second."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mimo.launch import rank_environment, rank_variables
from mimo.rank_processes import RankProcesses, warm_up

RunRanks = Callable[..., list[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    from mimo.device import has_gpu  # late: torch takes seconds to import

    if not has_gpu():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """`run_ranks(function, world_size, *args, timeout_seconds=60) -> results by rank`.

    Every rank calls `function(rank, *args)`, one thread each, in an initialised process group of
    the CPU. `function` is at the top level of its module; arguments and results are pickled.
    A rank's exception fails the test with its traceback, a hang with the stacks of every rank.
    """
    # Tests run on the CPU also where there is a GPU, and a fork server must not initialise CUDA.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    warm_up(["mimo.megatron.preload", "mimo.train", "transformers", "pytest", "torch.distributed"])

    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value

    def run(
        function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="mimo-ranks-") as directory:
            environment = {
                **rank_variables(Path(directory)),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            with RankProcesses(
                _in_process_group,
                (function, args, timeout_seconds),
                world_size,
                environment,
                stack_dir=Path(directory),
            ) as ranks:
                return ranks.results(timeout_seconds)

    return run


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
