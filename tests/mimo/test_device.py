"""The device is settled before ranks are forked, forking leaves it usable, and copies reach it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mimo import device
from tests.conftest import RunRanks


def cuda_is_unusable(rank: int) -> bool:
    return bool(torch.cuda._is_in_bad_fork())


def test_ranks_may_still_initialise_their_gpu(run_ranks: RunRanks) -> None:
    assert run_ranks(cuda_is_unusable, 2) == [False, False]


@pytest.mark.parametrize(
    ("gpus", "shared", "hidden"),
    [(0, False, False), (1, False, True), (1, True, False), (3, False, False), (8, False, False)],
)
def test_ranks_without_a_gpu_each_run_on_the_cpu_unless_they_may_share_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, shared: bool, hidden: bool
) -> None:
    monkeypatch.setenv(device.SHARE_GPUS, str(int(shared)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "unchanged")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    note = device.choose_before_fork(3)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "unchanged")
    assert (note is not None) == hidden


class _Queue:
    """Stands for a stream, and for the event that it records."""

    device = torch.device("cpu")

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def record(self, stream: Any) -> None:
        self.calls.append("event")

    def wait_event(self, event: Any) -> None:
        self.calls.append("wait")


def test_what_is_computed_waits_for_the_last_copy_and_keeps_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    empty, copy_to = torch.empty, torch.Tensor.to

    def pinned(shape: Any, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return empty(shape, dtype=dtype)

    def copied(
        tensor: torch.Tensor, device: torch.device, non_blocking: bool = False, **settings: Any
    ) -> torch.Tensor:
        if not non_blocking:  # another's, such as of a printed tensor
            return copy_to(tensor, device, **settings)
        calls.append("copy")
        return copy_to(tensor, device, copy=True)

    queue: Any = _Queue(calls)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", lambda: queue)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: calls.append("keep"))
    staging, values = device.Staging(queue), torch.arange(6, dtype=torch.bfloat16).view(3, 2)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    staged = [staging.join([values[:0], values]), staging.copy(values.t()), staging.copy(values)]
    assert calls == ["copy", "event"] * 3
    staging.arrive()
    staging.arrive()
    assert calls[6:] == ["wait", "keep", "keep", "keep", "wait"]
    monkeypatch.undo()
    assert all(one.dtype is torch.bfloat16 for one in staged)
    assert [one.tolist() for one in staged] == [v.tolist() for v in (values, values.t(), values)]


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("CPU", None),
    ],
)
def test_the_peak_follows_from_the_name_of_the_card(
    monkeypatch: pytest.MonkeyPatch, name: str, teraflops: float | None
) -> None:
    monkeypatch.setattr(device, "device_name", lambda: name)
    peak = device.peak_flops()
    assert (peak and peak / 1e12) == teraflops


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_may_initialise_it(run_ranks_on_gpu: RunRanks) -> None:
    assert run_ranks_on_gpu(cuda_is_unusable, 2) == [False, False]


@pytest.mark.gpu
def test_staged_tensors_are_on_the_device_when_they_are_used_and_not_overwritten() -> None:
    stream, host = device.copy_stream(), torch.arange(1 << 24)
    with ThreadPoolExecutor(1) as background:
        staging = device.Staging(stream)
        moved = background.submit(staging.join, [host[:5], host[5:]]).result()
        staging.arrive()
        assert moved.device == device.local_device()
        doubled = moved * 2
        del moved  # its memory may be reused, but only after the line above has run
        background.submit(device.Staging(stream).copy, torch.zeros_like(host)).result()
    assert doubled.cpu().equal(host * 2)


@pytest.mark.gpu
def test_copies_to_the_host_are_of_their_moment_and_there_on_leaving() -> None:
    stream, values = device.copy_stream("host"), torch.zeros(1 << 24, device=device.local_device())
    memory = device.host_memory(4 * len(values))
    busy = torch.randn(4096, 4096, device=values.device)

    def copy(since: device.Timestamp) -> None:
        with device.copying_to_host(stream, since):
            memory.view(torch.float32).copy_(values, non_blocking=True)

    with ThreadPoolExecutor(1) as background:
        for number in range(3):
            for _ in range(20):
                busy = busy @ busy / busy.norm()
            values.fill_(number)  # queued after all that; the host is far ahead
            background.submit(copy, device.record_time()).result()
            assert memory.view(torch.float32).eq(number).all()
