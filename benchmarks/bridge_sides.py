"""Bridges on the same ranks and rows, in turns: what every rank executes.

Letters: N rows of one lane, n rows of this rank, H hidden.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import bridge_communicator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bridge import ENCODER, Passage, Way, Workload
from benchmarks.harness import Run, take_turns
from bridge import BridgeEnd, BridgeReceiver, BridgeSender, Exchange, FlatEmbeddings
from mimo.device import (
    backend,
    barrier,
    initialize_distributed,
    local_device,
    set_threads,
    synchronize,
)
from mimo.engines.megatron.config import HyperCommGrid
from mimo.engines.megatron.cpu import adapt_to_machine
from mimo.parallel.grids import LANGUAGE, Link, variables_of
from mimo.parallel.groups import Topology, build_topology, comm_grid
from mimo.runtime.ranks import rank_environment, set_variables

_TIMEOUT_SECONDS = 300
_START_IN_SECONDS = 0.01  # until the common start, long enough for every rank to hear of it
DTYPE = torch.float32

_How = Literal["isend", "irecv"]
_Call = tuple[_How, Tensor, int, dist.ProcessGroup]


class Bridge(ABC):
    """One contestant, seen from one rank.

    values: on an encoder rank the rows that it gives. On a rank of the language model: gradient:
    what it sends back; places: where the rows that it gets belong.
    """

    values: Tensor
    places: Tensor
    gradient: Tensor | None = None

    def __init__(self, workload: Workload, topology: Topology) -> None:
        self.workload, self.rank = workload, topology.rank
        self.encodes = topology.owns(ENCODER)
        self.grid = workload.case.layout.grids[ENCODER if self.encodes else LANGUAGE]
        self.lane = self.grid.coords(self.rank).dp
        if self.encodes:
            self.values = workload.values_of(self.lane, self.grid.dp).to(local_device())

    def prepare(self) -> None:  # noqa: B027
        """Do what is not timed, before every run."""

    @abstractmethod
    def run(self, backward: bool) -> Tensor:
        """Move the rows, and with `backward` their gradients back.

        Returns what arrived at this rank last: the rows on a rank of the language model, and with
        `backward` the gradients on a rank of the encoder.
        """

    def expected(self) -> Tensor:
        """The rows that must arrive at this rank of the language model."""
        return self.workload.values_at(self.rank, self.places.cpu())

    def check(self) -> None:
        """Rows arrive as planned; gradients of twice the rows come back as twice the rows."""
        self.prepare()
        arrived = self.run(backward=False).detach()
        if not self.encodes:
            assert torch.equal(arrived.cpu(), self.expected()), f"{self}: wrong rows arrived"
            if self.gradient is None:
                self.gradient = torch.empty_like(arrived)
            torch.mul(arrived, 2, out=self.gradient)
        self.prepare()
        arrived = self.run(backward=True)
        if self.encodes:
            assert torch.equal(arrived, 2 * self.values), f"{self}: wrong gradients came back"


class OurBridge(Bridge):
    """`bridge` as the training loop uses it."""

    def __init__(self, workload: Workload, topology: Topology) -> None:
        super().__init__(workload, topology)
        groups, grid = topology.bridges[Link(ENCODER)], self.grid
        shares = grid.tp > 1 and (self.encodes or not grid.sp)
        end = BridgeEnd(
            name=ENCODER,
            rank=self.rank,
            forward=groups.forward,
            backward=groups.backward,
            hidden_size=workload.hidden,
            dtype=DTYPE,
            wire_dtype=DTYPE,
            device=local_device(),
            trainable=True,
            gather=topology.modules[grid.module].tp if shares else None,
        )
        self.end = end
        if self.encodes:
            self.sender = BridgeSender(end, self.lane, run_ahead=1)
            self.sizes = workload.runs.split_sizes(self.lane)
            self.values.requires_grad_()
        else:
            self.receiver = BridgeReceiver(end, run_ahead=1, posted_ahead=1)

    def prepare(self) -> None:
        """Make and stage a fresh plan, as training does in the background."""
        self.plan = self.workload.build_plan()
        self.end.stage(self.plan, lambda tensor: tensor.to(self.end.device))

    def run(self, backward: bool) -> Tensor:
        """One step of one microbatch."""
        if not self.encodes:
            self.receiver.begin([self.plan], forward_only=not backward)
            rows, self.places = self.receiver.receive(0)
            if backward:
                rows.backward(self.gradient)
            self.receiver.finish()
            return rows
        self.sender.begin([self.plan], forward_only=not backward)
        values = self.values if backward else self.values.detach()
        token = self.sender.send(0, FlatEmbeddings(values, self.sizes))
        arrived = torch.autograd.grad(token, values)[0] if backward else values
        self.sender.finish()
        return arrived


class TheirBridge(Bridge):
    """Megatron's bridge. Its leaders get complete gradients at no cost, which is in its favour."""

    def __init__(self, workload: Workload, topology: Topology, file: Path | None) -> None:
        super().__init__(workload, topology)
        layout = workload.case.layout
        grids = comm_grid(layout.encoders[ENCODER]), comm_grid(layout.language)
        self.bridge = megatron_bridge(*grids, DTYPE, backend(), file)

    def expected(self) -> Tensor:
        """Every rank of a lane gets all its rows, in their order."""
        return self.workload.values_of(self.lane, self.grid.dp)

    def run(self, backward: bool) -> Tensor:
        """The bridge's calls of one microbatch, in the order of a pipeline schedule."""
        with torch.no_grad():
            if not self.encodes:
                rows = self.bridge.recv_forward()
                if backward:
                    assert self.gradient is not None, "`check` comes first"
                    self.bridge.send_backward(self.gradient)
                return rows
            self.bridge.send_forward(self.values)
            return self.bridge.recv_backward() if backward else self.values


def megatron_bridge(
    source: HyperCommGrid,
    destination: HyperCommGrid,
    dtype: torch.dtype,
    backend: str,
    file: Path | None = None,
) -> Any:
    """Build a `BridgeCommunicator` on two grids, for flat rows (N, H) of one dtype.

    Every rank of the world builds it. The backend that Megatron hard-codes in its group calls is
    mapped to ``backend``. file: a module to take the class from instead of the installed one.
    """
    adapt_to_machine()
    module: Any = bridge_communicator
    if file is not None:
        spec = spec_from_file_location("bridge_communicator_from_file", file)
        assert spec is not None and spec.loader is not None, "the command takes .py files only"
        module = module_from_spec(spec)
        spec.loader.exec_module(module)

    def mapped(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make(*args, **{**kwargs, "backend": backend})

    with ExitStack() as patches:
        for name in ("new_group", "new_subgroups_by_enumeration"):
            patches.enter_context(mock.patch.object(dist, name, mapped(getattr(dist, name))))
        return module.BridgeCommunicator(source, destination, comm_dtype=dtype, tensor_ndim=2)


class BareMessages(Bridge):
    """The floor: isend and irecv of our bridge's messages, in memory that is already allocated.

    No plan, no autograd, no checks, no timeouts. Only where a language rank needs just its slice.
    """

    def __init__(self, workload: Workload, topology: Topology) -> None:
        super().__init__(workload, topology)
        plan, groups = workload.build_plan(), topology.bridges[Link(ENCODER)]
        exchange = plan.sends(self.rank) if self.encodes else plan.receives(self.rank)
        self.places = torch.from_numpy(exchange.index)
        if not self.encodes:
            self.rows = torch.zeros(len(self.places), workload.hidden, device=local_device())
            self.gradient = torch.zeros_like(self.rows)
            self.out = [_calls("irecv", self.rows, exchange, groups.forward)]
            self.back = [_calls("isend", self.gradient, exchange, groups.backward)]
            return
        self.values = self.values[self.places]
        self.rows = torch.zeros_like(self.values)
        self.out = [_calls("isend", self.values, exchange, groups.forward)]
        # Then each replica tells the others the gradients that it got.
        group = topology.modules[ENCODER].tp
        shares: list[_Call] = []
        for sibling in dist.get_process_group_ranks(group):
            if sibling != self.rank:
                share = self.rows.new_zeros(plan.collects(sibling).num_rows, workload.hidden)
                shares.append(("isend", self.rows, sibling, group))
                shares.append(("irecv", share, sibling, group))
        self.back = [_calls("irecv", self.rows, exchange, groups.backward), shares]

    def run(self, backward: bool) -> Tensor:
        """Send all messages of a direction at once, one direction after the other."""
        for calls in self.out + self.back if backward else self.out:
            works = [getattr(dist, how)(part, peer, group) for how, part, peer, group in calls]
            for work in works:
                work.wait()
        return self.rows


def _calls(how: _How, rows: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> list[_Call]:
    """One call per peer; rows (n, H) holds all messages one after the other."""
    parts = rows.split(list(exchange.counts))
    return [(how, part, peer, group) for part, peer in zip(parts, exchange.peers, strict=True)]


def _timed(bridge: Bridge, backward: bool) -> Run:
    """Time a run, from a start that all ranks of the machine agree on until the last is done."""
    bridge.prepare()
    synchronize()
    barrier()
    start = torch.tensor([time.perf_counter() + _START_IN_SECONDS], dtype=torch.float64)
    start = start.to(local_device())
    dist.broadcast(start, src=0)
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    bridge.run(backward)
    synchronize()
    seconds = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return Run(seconds.item())


def _received(bridge: Bridge, backward: bool) -> list[int]:
    """Bytes that each rank of the world receives in one run."""
    bridge.prepare()
    barrier()
    with ReceivedBytes() as received:
        bridge.run(backward)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, received.num_bytes)
    return values


def compete(
    workload: Workload, rounds: int, topology: Topology, rival: Path | None = None
) -> list[Passage]:
    """Check all contestants, count their bytes, then time them; every rank calls it.

    rival: the file of Megatron's bridge; None for the installed one.
    """
    case, rows, layout = workload.case, workload.rows, workload.case.layout
    row_bytes = workload.hidden * DTYPE.itemsize
    bridges: dict[str, Bridge] = {
        "ours": OurBridge(workload, topology),
        "megatron": TheirBridge(workload, topology, rival),
    }
    if case.sp:
        bridges["bare messages"] = BareMessages(workload, topology)
    for bridge in bridges.values():
        bridge.check()
    # A replica of the encoder needs the gradients of all rows of its lane.
    needed: dict[Way, dict[int, int]] = {
        "forward": {rank: workload.needed_rows(rank) for rank in layout.language.ranks},
        "forward + backward": dict.fromkeys(
            layout.encoders[ENCODER].ranks, rows // case.encoder_lanes
        ),
    }
    passages = []
    for way, needed_rows in needed.items():
        backward = way != "forward"
        received = {name: _received(bridge, backward) for name, bridge in bridges.items()}
        turns = {name: partial(_timed, one, backward) for name, one in bridges.items()}
        passages.append(
            Passage(
                name=f"{case}, {rows} rows, {way}",
                runs=take_turns(turns, rounds),
                case=case,
                rows=rows,
                way=way,
                received={
                    name: [num_bytes[rank] for rank in needed_rows]
                    for name, num_bytes in received.items()
                },
                bound=[number * row_bytes for number in needed_rows.values()],
            )
        )
    return passages


def in_world(workload: Workload, rounds: int, rival: Path | None) -> list[Passage]:
    """Be one rank: join the world and `compete`."""
    environment = rank_environment()
    assert environment is not None, "runs inside a launched job"
    rank, world_size = environment.rank, environment.world_size
    set_threads(None, world_size)
    set_variables(variables_of(workload.case.layout, rank))
    initialize_distributed(
        rank, world_size, environment.rendezvous, _TIMEOUT_SECONDS, environment.local_rank
    )
    topology = build_topology(workload.case.layout, _TIMEOUT_SECONDS)
    passages = compete(workload, rounds, topology, rival)
    barrier()
    return passages


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that messages and broadcasts bring to this rank while it is entered.

    It does not matter which call starts them: all are one operator each for PyTorch.
    """

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then pass on. A broadcast brings its tensor to all ranks but its source."""
        if func is torch.ops.c10d.recv_.default:
            self.num_bytes += sum(tensor.nbytes for tensor in args[0])
        elif func is torch.ops.c10d.broadcast_.default:
            tensors, group, source = args[:3]
            if dist.ProcessGroup.unbox(group).rank() != source:
                self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))
