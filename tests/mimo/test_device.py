"""The device is settled before ranks are forked, and forking leaves it usable."""

from __future__ import annotations

import os

import pytest
import torch

from mimo import device
from tests.conftest import RunRanks


def cuda_is_unusable(rank: int) -> bool:
    return bool(torch.cuda._is_in_bad_fork())


def test_ranks_may_still_initialise_their_gpu(run_ranks: RunRanks) -> None:
    assert run_ranks(cuda_is_unusable, 2) == [False, False]


@pytest.mark.parametrize(
    ("gpus", "ranks", "hidden"), [(0, 3, False), (1, 3, True), (3, 3, False), (8, 3, False)]
)
def test_ranks_without_a_gpu_each_run_on_the_cpu_and_say_so(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, hidden: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "unchanged")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    note = device.choose_before_fork(ranks)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "unchanged")
    assert (note is not None) == hidden
