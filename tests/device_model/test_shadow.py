"""The shadow device objects to what a GPU would object to, and to nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.conftest import RunRanks

DEVICE = torch.device("cuda", 0)


def _host() -> Tensor:
    return torch.arange(6.0)


def _device() -> Tensor:
    return torch.ones(6, device=DEVICE)


def _train(x: Tensor) -> None:
    """A forward and a backward with a parameter, as on one device."""
    layer = nn.Linear(6, 2, device=DEVICE)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == DEVICE
    layer.weight.grad.mul_(torch.tensor(2.0))  # a number of the host may take part


def _backward_that_waits() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * float(gradient.sum())

    Waits.apply(_device().requires_grad_()).sum().backward()  # type: ignore[union-attr]


def _reuse_memory() -> None:
    """Memory of a device's tensors is freed, and the host gets it again."""
    for _ in range(200):
        _device()
        _host().tolist()


# An action, and the device's objection: None, or a kind and words of the event.
CASES: dict[str, tuple[Callable[[], object], tuple[str, str] | None]] = {
    "work on the device": (lambda: _train(_device()), None),
    "work on the host": (lambda: _host().nonzero().tolist(), None),
    "memory that changes sides": (_reuse_memory, None),
    "views and slices": (lambda: _device().view(2, 3)[1:, :2].t().contiguous().add_(1), None),
    "a pinned copy": (lambda: _host().pin_memory().to(DEVICE, non_blocking=True), None),
    "all_reduce": (lambda: dist.all_reduce(_device()), None),
    "a barrier on a device": (lambda: dist.barrier(device_ids=[0]), None),
    "a sum across": (lambda: _host() + _device(), ("error", "host and device in aten::add")),
    "a forward across": (lambda: _train(_host()), ("error", "host and device in")),
    "numpy": (lambda: _device().numpy(), ("error", ".numpy()")),
    "all_reduce of the host": (lambda: dist.all_reduce(_host()), ("error", "c10d::allreduce_")),
    "a barrier": (dist.barrier, ("error", "device_ids")),
    "item": (lambda: _device().sum().item(), ("wait", ".item()")),
    "a slice by a tensor": (lambda: _host()[: _device().sum().long()], ("wait", ".item()")),
    "tolist": (lambda: _device().tolist(), ("wait", ".tolist()")),
    "cpu": (lambda: _device().cpu(), ("wait", "to the host")),
    "nonzero": (lambda: _device().nonzero(), ("wait", "nonzero")),
    "a mask as index": (lambda: _device()[_device() > 0], ("wait", "mask")),
    "synchronize": (lambda: torch.cuda.synchronize(), ("wait", "synchronize")),
    "a backward that waits": (_backward_that_waits, ("wait", ".item()")),
    "a pageable copy": (lambda: _host().to(DEVICE), ("blocking copy", "to the device")),
    "torch.tensor": (lambda: torch.tensor([1, 2], device=DEVICE), ("blocking copy", "tensor(")),
    "an index on the host": (lambda: _device()[[0, 1]], ("blocking copy", "index on the host")),
    "copy_ from the host": (lambda: _device().copy_(_host()), ("blocking copy", "copy_")),
    "objects": (
        lambda: dist.all_gather_object([""] * 2, "an object"),
        ("object collective", "all_gather_object"),
    ),
}


def run_cases(rank: int) -> dict[str, list[tuple[str, str, str]]]:
    """(kind, what, site) of the events of each case on this rank."""
    from tests.device_model.shadow import pose_as_device

    record = pose_as_device()
    events = {}
    for name, (call, _) in CASES.items():
        record.events.clear()
        call()
        events[name] = [(event.kind, event.what, event.site) for event in record.events]
    return events


def test_events_are_those_of_a_device(run_ranks: RunRanks) -> None:
    (events, _) = run_ranks(run_cases, 2)
    for name, (_, expected) in CASES.items():
        if expected is None:
            assert events[name] == [], name
        else:
            kind, words = expected
            assert {event[0] for event in events[name]} == {kind}, (name, events[name])
            assert any(words in event[1] for event in events[name]), (name, events[name])
    ((_, _, site),) = events["item"]
    assert site.startswith("tests/device_model/test_shadow.py:"), "the line is named"
