"""Run both bridges in turns on the same ranks and rows; every rank executes this module.

Letters: N rows of the global microbatch, n rows of this rank, H hidden.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import bridge_communicator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bridge import ENCODER, Case
from benchmarks.harness import Contest, Run, take_turns
from bridge import BridgeEnd, BridgeReceiver, BridgeSender, FlatEmbeddings
from mimo import device
from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.parallel.grids import Link, variables_of
from mimo.parallel.groups import Topology, build_topology, comm_grid
from mimo.runtime.ranks import rank_environment, set_variables

_TIMEOUT_SECONDS = 300
DTYPE = torch.float32


class Bridge(ABC):
    """One contestant, seen from one rank.

    values: (n, H), the rows that an encoder rank gives; on a rank of the language model the
    gradients that it sends back, which are set to twice the rows that arrive first.
    """

    values: Tensor

    def __init__(self, case: Case, topology: Topology) -> None:
        self.case, self.rank = case, topology.rank
        self.encodes = topology.owns(ENCODER)
        if self.encodes:
            encoder = case.layout.encoders[ENCODER]
            self.lane = encoder.coords(self.rank).dp
            numbers = torch.arange(case.rows, dtype=DTYPE).chunk(encoder.dp)[self.lane]
            columns = torch.arange(case.hidden, dtype=DTYPE) / case.hidden
            self.values = (numbers[:, None] + columns).to(device.local_device())

    def prepare(self) -> None:  # noqa: B027
        """Do what is not timed, before every run."""

    @abstractmethod
    def run(self, backward: bool) -> Tensor:
        """Move the rows, and with `backward` their gradients back.

        Returns the rows on a rank of the language model, and with `backward` their gradients on a
        rank of the encoder.
        """


class OurBridge(Bridge):
    """`bridge` as the training loop uses it."""

    def __init__(self, case: Case, topology: Topology) -> None:
        super().__init__(case, topology)
        groups = topology.bridges[Link(ENCODER)]
        self.end = BridgeEnd(
            name=ENCODER,
            rank=self.rank,
            forward=groups.forward,
            backward=groups.backward,
            hidden_size=case.hidden,
            dtype=DTYPE,
            wire_dtype=DTYPE,
            device=device.local_device(),
            trainable=True,
            gather=topology.modules[ENCODER].tp if self.encodes and case.encoder_tp > 1 else None,
        )
        if self.encodes:
            self.sender = BridgeSender(self.end, self.lane, run_ahead=1)
            self.sizes = case.runs.split_sizes(self.lane)
            self.values.requires_grad_()
        else:
            self.receiver = BridgeReceiver(self.end, run_ahead=1, posted_ahead=1)

    def prepare(self) -> None:
        """Make and stage a fresh plan, as training does in the background."""
        self.plan = self.case.build_plan()
        self.end.stage(self.plan, lambda tensor: tensor.to(self.end.device))

    def run(self, backward: bool) -> Tensor:
        """One step of one microbatch."""
        if not self.encodes:
            self.receiver.begin([self.plan], forward_only=not backward)
            rows, _ = self.receiver.receive(0)
            if backward:
                rows.backward(self.values)
            self.receiver.finish()
            return rows
        self.sender.begin([self.plan], forward_only=not backward)
        values = self.values if backward else self.values.detach()
        token = self.sender.send(0, FlatEmbeddings(values, self.sizes))
        arrived = torch.autograd.grad(token, values)[0] if backward else values
        self.sender.finish()
        return arrived


class TheirBridge(Bridge):
    """Megatron's bridge. Its leaders get complete gradients at no cost, which is in its favour.

    file: to take the class from instead of the installed module. The backend that Megatron
    hard-codes in its group calls is mapped to ours.
    """

    def __init__(self, case: Case, topology: Topology, file: Path | None) -> None:
        super().__init__(case, topology)
        adapt_to_machine()
        build: Any = bridge_communicator.BridgeCommunicator
        if file is not None:
            build = run_path(str(file))["BridgeCommunicator"]

        def mapped(make: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: make(*args, **{**kwargs, "backend": device.backend()})

        grids = comm_grid(case.layout.encoders[ENCODER]), comm_grid(case.layout.language)
        with ExitStack() as patches:
            for name in ("new_group", "new_subgroups_by_enumeration"):
                patches.enter_context(mock.patch.object(dist, name, mapped(getattr(dist, name))))
            self.bridge = build(*grids, comm_dtype=DTYPE, tensor_ndim=2)

    def run(self, backward: bool) -> Tensor:
        """The bridge's calls of one microbatch, in the order of a pipeline schedule."""
        with torch.no_grad():
            if not self.encodes:
                rows = self.bridge.recv_forward()
                if backward:
                    self.bridge.send_backward(self.values)
                return rows
            self.bridge.send_forward(self.values)
            return self.bridge.recv_backward() if backward else self.values


def compete(
    case: Case, rounds: int, topology: Topology, rival: Path | None = None
) -> dict[str, Contest]:
    """Check both bridges, count their bytes, then time them each way; every rank calls it.

    rival: the file of Megatron's bridge; None for the installed one.
    """
    bridges: dict[str, Bridge] = {
        "ours": OurBridge(case, topology),
        "megatron": TheirBridge(case, topology, rival),
    }
    for name, bridge in bridges.items():
        bridge.prepare()
        rows = bridge.run(backward=False).detach()
        if not bridge.encodes:
            bridge.values = 2 * rows
        bridge.prepare()
        gradients = bridge.run(backward=True)
        if bridge.encodes:
            assert torch.equal(gradients, 2 * bridge.values), f"{name}: wrong gradients came back"
    contests = {}
    for way, backward in (("forward", False), ("forward + backward", True)):
        turns = {
            name: partial(_timed, bridge, backward, _times_bound(bridge, backward))
            for name, bridge in bridges.items()
        }
        contests[way] = Contest(f"{case}, {way}", take_turns(turns, rounds, prints=False))
    return contests


def _timed(bridge: Bridge, backward: bool, times_bound: float) -> Run:
    """Return the slowest rank's time of a run that all ranks begin together."""
    bridge.prepare()
    device.synchronize()
    device.barrier()
    started = time.perf_counter()
    bridge.run(backward)
    device.synchronize()
    seconds = torch.tensor(time.perf_counter() - started, device=device.local_device())
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return Run(seconds.item(), result={"bytes / bound": times_bound})


def _times_bound(bridge: Bridge, backward: bool) -> float:
    """Return the bytes that the receiving ranks get in a run, as a multiple of the lower bound.

    Each row must reach one rank of the language model; each gradient every replica of its encoder.
    """
    bridge.prepare()
    device.barrier()
    with ReceivedBytes() as received:
        bridge.run(backward)
    at_end = received.num_bytes if bridge.encodes == backward else 0
    total = torch.tensor(at_end, device=device.local_device())
    dist.all_reduce(total)
    case = bridge.case
    num_rows = case.rows * (case.encoder_tp if backward else 1)
    return total.item() / (num_rows * case.hidden * DTYPE.itemsize)


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that messages and broadcasts bring to this rank, whatever starts them."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.recv_.default:
            self.num_bytes += sum(tensor.nbytes for tensor in args[0])
        elif func is torch.ops.c10d.broadcast_.default:
            tensors, group, source = args[:3]  # a broadcast brings them to all but the source
            if dist.ProcessGroup.unbox(group).rank() != source:
                self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def in_world(case: Case, rounds: int, rival: Path | None) -> dict[str, Contest]:
    """Be one rank: join the world and `compete`."""
    environment = rank_environment()
    assert environment is not None, "runs inside a launched job"
    rank, world_size = environment.rank, environment.world_size
    device.set_threads(None, world_size)
    set_variables(variables_of(case.layout, rank))
    device.initialize_distributed(
        rank, world_size, environment.rendezvous, _TIMEOUT_SECONDS, environment.local_rank
    )
    contests = compete(case, rounds, build_topology(case.layout, _TIMEOUT_SECONDS), rival)
    device.barrier()
    return contests
