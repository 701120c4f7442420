"""Run both contestants in turns on the same ranks and rows; every rank executes this module.

Letters: n rows of this rank, H hidden.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
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

from benchmarks.bridge import MODULE, Case
from benchmarks.harness import Contest, Run, take_turns
from bridge import (
    BridgeEnd,
    BridgeReceiver,
    BridgeSender,
    ItemRows,
    OutputReceiver,
    OutputSender,
)
from mimo import device
from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.model.step_bridges import stage_ranks
from mimo.parallel.grids import LANGUAGE, variables_of
from mimo.parallel.groups import Topology, build_topology, comm_grid
from mimo.runtime.ranks import rank_environment, set_variables

_TIMEOUT_SECONDS = 300
DTYPE = torch.float32


class Bridge(ABC):
    """One contestant, seen from one rank.

    values: (n, H), the rows that a rank gives; on a rank that gets rows the gradients that it sends
    back, which are set to twice the rows that arrive first.
    """

    values: Tensor

    def __init__(self, case: Case, topology: Topology) -> None:
        self.case, self.rank = case, topology.rank
        self.gives = topology.owns(LANGUAGE if case.is_output else MODULE)
        grid = case.layout.item_grids[MODULE]
        self.lane = grid.coords(self.rank).dp if topology.owns(MODULE) else 0
        if self.gives:
            parts = case.layout.language.size if case.is_output else grid.dp
            numbers = torch.arange(case.rows, dtype=DTYPE).chunk(parts)
            columns = torch.arange(case.hidden, dtype=DTYPE) / case.hidden
            mine = numbers[self.rank if case.is_output else self.lane]
            self.values = (mine[:, None] + columns).to(device.local_device())

    def prepare(self) -> None:  # noqa: B027 (most contestants have nothing to prepare)
        """Do what is not timed, before every run."""

    @abstractmethod
    def run(self, backward: bool) -> Tensor:
        """Move the rows, and with `backward` their gradients back.

        Returns the rows on a rank that gets them, and with `backward` their gradients on one that
        gives them.
        """


class OurBridge(Bridge):
    """`bridge` as the training loop uses it."""

    def __init__(self, case: Case, topology: Topology) -> None:
        super().__init__(case, topology)
        (groups,) = topology.bridges.values()
        # As in training on one machine, gradients go to every replica.
        is_direct, grid = case.module_tp > 1 and not case.is_output, case.layout.item_grids[MODULE]
        lanes = stage_ranks(grid, 0)[:, 0].tolist() if is_direct else []
        self.end = BridgeEnd(
            name=MODULE,
            rank=self.rank,
            forward=groups.forward,
            backward=groups.backward,
            hidden_size=case.hidden,
            dtype=DTYPE,
            wire_dtype=DTYPE,
            device=device.local_device(),
            trainable=True,
            to_language=not case.is_output,
            replicas=lanes,
        )
        self.bridge: Any
        if self.gives:
            self.values.requires_grad_()
            sender = BridgeSender(self.end, self.lane, run_ahead=1)
            self.bridge = OutputSender(self.end, run_ahead=0) if case.is_output else sender
        elif case.is_output:
            self.bridge = OutputReceiver(self.end, self.lane)
        else:
            self.bridge = BridgeReceiver(self.end, run_ahead=1, posted_ahead=1)

    def prepare(self) -> None:
        """Make and stage a fresh plan, as training does in the background."""
        self.plan = self.case.build_plan()
        self.end.stage(self.plan, lambda tensor: tensor.to(self.end.device))

    def run(self, backward: bool) -> Tensor:
        """One step of one microbatch."""
        bridge = self.bridge
        bridge.begin([self.plan], forward_only=not backward)
        if self.gives:
            arrived = values = self.values if backward else self.values.detach()
            rows = ItemRows(values, self.case.runs.rows_of_lane(self.lane))
            token = bridge.send(0, values if self.case.is_output else rows)
            if backward:
                (arrived,) = torch.autograd.grad(token, values)
        elif self.case.is_output:
            arrived = bridge.receive(0)
            bridge.answer(0, self.values if backward else arrived)
        else:
            arrived, _ = bridge.receive(0)
            if backward:
                arrived.backward(self.values)
        bridge.finish()
        return arrived


class BareMessages(Bridge):
    """The messages of a generator's rows alone, between contiguous memory that exists."""

    def __init__(self, case: Case, topology: Topology) -> None:
        super().__init__(case, topology)
        plan, (self.groups,) = case.build_plan(), topology.bridges.values()
        self.exchange = (plan.returns if self.gives else plan.collects)(self.rank)
        size = self.exchange.num_rows, case.hidden
        self.arrived = torch.empty(size, device=device.local_device())

    def run(self, backward: bool) -> Tensor:
        """Start the messages of each way in one batch."""
        ways = [(self.groups.forward, self.gives), (self.groups.backward, not self.gives)]
        for group, sends in ways[: 1 + backward]:
            call, memory = (dist.isend, self.values) if sends else (dist.irecv, self.arrived)
            parts = zip(memory.split(self.exchange.counts), self.exchange.peers, strict=True)
            calls = [dist.P2POp(call, part, peer, group) for part, peer in parts]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        return self.arrived


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

        grids = comm_grid(case.layout.encoders[MODULE]), comm_grid(case.layout.language)
        names = ("new_group", "new_subgroups_by_enumeration")
        calls: dict[str, Any] = {name: mapped(getattr(dist, name)) for name in names}
        with mock.patch.multiple(dist, **calls):
            self.bridge = build(*grids, comm_dtype=DTYPE, tensor_ndim=2)

    def run(self, backward: bool) -> Tensor:
        """The bridge's calls of one microbatch, in the order of a pipeline schedule."""
        with torch.no_grad():
            if not self.gives:
                rows = self.bridge.recv_forward()
                if backward:
                    self.bridge.send_backward(self.values)
                return rows
            self.bridge.send_forward(self.values)
            return self.bridge.recv_backward() if backward else self.values


def compete(
    case: Case, rounds: int, topology: Topology, rival: Path | None = None
) -> dict[str, Contest]:
    """Check both contestants, count their bytes, then time them each way; every rank calls it.

    rival: the file of Megatron's bridge; None for the installed one.
    """
    bridges: dict[str, Bridge] = {"ours": OurBridge(case, topology)}
    if case.is_output:
        bridges["messages"] = BareMessages(case, topology)
    else:
        bridges["megatron"] = TheirBridge(case, topology, rival)
    for name, bridge in bridges.items():
        bridge.prepare()
        rows = bridge.run(backward=False).detach()
        if not bridge.gives:
            bridge.values = 2 * rows
        bridge.prepare()
        gradients = bridge.run(backward=True)
        if bridge.gives:
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

    Each row must reach one rank at the other end; each gradient every replica of its encoder.
    """
    bridge.prepare()
    device.barrier()
    with ReceivedBytes() as received:
        bridge.run(backward)
    at_end = received.num_bytes if bridge.gives == backward else 0
    total = torch.tensor(at_end, device=device.local_device())
    dist.all_reduce(total)
    case = bridge.case
    num_rows = case.rows * (case.module_tp if backward else 1)
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
