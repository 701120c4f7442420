"""Two bridges on the same ranks and rows, in alternating runs: what every rank executes.

Letters: N rows of one lane, n rows of this rank, H hidden.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bridge import BridgeEnd, BridgeReceiver, BridgeSender, FlatEmbeddings
from mimo.bench.bare_messages import BareMessages
from mimo.bench.bridge_result import Contest, Rival, Traffic
from mimo.bench.bridge_workload import ENCODER, Case, Delivery, Workload
from mimo.bench.received import count_received
from mimo.device import (
    backend,
    barrier,
    initialize_distributed,
    local_device,
    set_threads,
    synchronize,
)
from mimo.engines.megatron.rival_bridge import MegatronBridge
from mimo.launch.ranks import rank_environment
from mimo.layout.grids import LANGUAGE
from mimo.layout.groups import Topology, build_topology, comm_grid
from mimo.layout.levels import Link

_TIMEOUT_SECONDS = 300
_START_IN_SECONDS = 0.01  # until the common start, long enough for every rank to hear of it
DTYPE = torch.float32


class Contestant(Protocol):
    """One bridge, seen from one rank."""

    def prepare(self) -> None:
        """Do what is not timed, before every run."""

    def run(self, backward: bool) -> Tensor:
        """Move the rows, and with `backward` their gradients back.

        Returns what arrived at this rank last: the rows on a rank of the language model, and with
        `backward` the gradients on a rank of the encoder.
        """
        ...

    def check(self) -> None:
        """Raise AssertionError if rows or gradients are not what they must be."""


class OurBridge:
    """`bridge` as the training loop uses it."""

    def __init__(self, workload: Workload, topology: Topology, delivery: Delivery) -> None:
        self.workload = workload
        self.delivery: Delivery = delivery
        layout, rank = workload.case.layout, topology.rank
        groups = topology.bridges[Link(ENCODER)]
        self.encodes = topology.owns(ENCODER)
        module = ENCODER if self.encodes else LANGUAGE
        grid = layout.grids[module]
        all_gathers = not grid.sp and delivery == "sharded"
        shares = grid.tp > 1 and (self.encodes or all_gathers)
        self.end = BridgeEnd(
            name=ENCODER,
            rank=rank,
            forward=groups.forward,
            backward=groups.backward,
            hidden_size=workload.hidden,
            dtype=DTYPE,
            wire_dtype=DTYPE,
            device=local_device(),
            trainable=True,
            gather=topology.modules[module].tp if shares else None,
        )
        self.lane = grid.coords(rank).dp
        if self.encodes:
            self.sender = BridgeSender(self.end, self.lane, run_ahead=1)
            self.values = workload.encoder_values(self.lane).to(self.end.device).requires_grad_()
        else:
            self.receiver = BridgeReceiver(self.end, run_ahead=1, posted_ahead=1)
        self.gradient: Tensor | None = None

    def prepare(self) -> None:
        """Make a fresh plan, so that the run itself works out what it needs of it."""
        self.plan = self.workload.build_plan(self.delivery)

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
        sizes = self.workload.runs.split_sizes(self.lane)
        values = self.values if backward else self.values.detach()
        token = self.sender.send(0, FlatEmbeddings(values, sizes))
        arrived = torch.autograd.grad(token, values)[0] if backward else values
        self.sender.finish()
        return arrived

    def check(self) -> None:
        """Rows as planned; gradients of twice the rows come back as twice the rows."""
        self.prepare()
        arrived = self.run(backward=False)
        if not self.encodes:
            places = self.places.cpu()
            expected = self.workload.values_at(self.end.rank, places, self.delivery)
            assert torch.equal(arrived.detach().cpu(), expected), "wrong rows arrived"
            self.gradient = 2 * arrived.detach()
        self.prepare()
        arrived = self.run(backward=True)
        if self.encodes:
            assert torch.equal(arrived, 2 * self.values), "wrong gradients came back"


class TheirBridge:
    """Megatron's bridge. Its leaders get complete gradients at no cost, which is in its favour.

    In training with SP each rank would have only the gradient of its slice, and an all-gather in
    the TP group would come first.
    """

    def __init__(self, workload: Workload, topology: Topology) -> None:
        layout = workload.case.layout
        self.encodes = topology.owns(ENCODER)
        grid = layout.grids[ENCODER if self.encodes else LANGUAGE]
        lane = grid.coords(topology.rank).dp
        self.bridge = MegatronBridge(
            comm_grid(layout.encoders[ENCODER]), comm_grid(layout.language), DTYPE, backend()
        )
        values = workload.encoder_values if self.encodes else workload.language_values
        self.values = values(lane).to(local_device())
        self.gradient = None if self.encodes else 2 * self.values

    def prepare(self) -> None:
        """Nothing: there is no plan, and shapes are exchanged in each run."""

    def run(self, backward: bool) -> Tensor:
        """The bridge's calls of one microbatch, in the order of a pipeline schedule."""
        with torch.no_grad():
            if not self.encodes:
                rows = self.bridge.receive_rows()
                if backward:
                    assert self.gradient is not None
                    self.bridge.send_gradients(self.gradient)
                return rows
            self.bridge.send_rows(self.values)
            return self.bridge.receive_gradients() if backward else self.values

    def check(self) -> None:
        """Rows as planned; gradients of twice the rows come back as twice the rows."""
        arrived = self.run(backward=True)
        expected = 2 * self.values if self.encodes else self.values
        assert torch.equal(arrived, expected), "Megatron's bridge was used wrongly"


def _traffic(ranks: Sequence[int], received: list[list[int]], bound: list[int]) -> Traffic:
    """What `ranks` received in our runs and in theirs, from what all ranks received."""
    ours, theirs = ([of_rank[rank] for rank in ranks] for of_rank in received)
    return Traffic(ours, theirs, bound)


def _common_start() -> float:
    """Wait for a moment that all ranks of this machine agree on, and return it."""
    start = torch.tensor([time.perf_counter() + _START_IN_SECONDS], dtype=torch.float64)
    start = start.to(local_device())
    dist.broadcast(start, src=0)
    moment = start.item()
    time.sleep(max(0.0, moment - time.perf_counter()))
    return moment


def _seconds(contestant: Contestant, backward: bool) -> float:
    """From a common start to the end of this rank's part of one run."""
    contestant.prepare()
    synchronize()
    barrier()
    start = _common_start()
    contestant.run(backward)
    synchronize()
    return time.perf_counter() - start


def alternate(
    one: Contestant, other: Contestant, backward: bool, repeats: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of both, over `repeats` pairs of runs; each pair reverses the order.

    A run ends when its last rank is done.
    """
    mine: dict[int, list[float]] = {0: [], 1: []}
    for repeat in range(repeats):
        pair = [(0, one), (1, other)]
        for index, contestant in pair if repeat % 2 == 0 else reversed(pair):
            mine[index].append(_seconds(contestant, backward))
    slowest = torch.tensor([mine[0], mine[1]], dtype=torch.float64, device=local_device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    first, second = (1000 * slowest).tolist()
    return first, second


def received_bytes(contestant: Contestant, backward: bool) -> list[int]:
    """Bytes that each rank of the world receives in one run."""
    contestant.prepare()
    barrier()
    with count_received() as received:
        contestant.run(backward)
    return _everyone(received.num_bytes)


def _everyone(value: int) -> list[int]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def compete(
    case: Case, rows: int, hidden: int, repeats: int, rival: Rival, topology: Topology
) -> Contest:
    """Check ours and `rival`, count their bytes, then time them; every rank calls it."""
    workload = Workload(case, rows, hidden)
    theirs: Contestant
    if rival == "megatron":
        theirs = TheirBridge(workload, topology)
    elif rival == "messages":
        theirs = BareMessages(workload, topology)
    else:
        theirs = OurBridge(workload, topology, rival)
    ours = OurBridge(workload, topology, "sharded")
    for contestant in (ours, theirs):
        contestant.check()

    layout = case.layout
    encoder, language = layout.encoders[ENCODER].ranks, layout.language.ranks
    row_bytes = hidden * DTYPE.itemsize
    forward = [received_bytes(contestant, False) for contestant in (ours, theirs)]
    both = [received_bytes(contestant, True) for contestant in (ours, theirs)]
    needed = [workload.needed_rows(r) * row_bytes for r in language]
    # A replica of the encoder needs the gradients of all rows of its lane.
    returned = [rows // case.encoder_lanes * row_bytes for _ in encoder]
    forward_ms = alternate(ours, theirs, False, repeats)
    both_ms = alternate(ours, theirs, True, repeats)
    return Contest(
        case=str(case),
        rival=rival,
        rows=rows,
        hidden=hidden,
        num_ranks=layout.world_size,
        language_tp=case.language_tp,
        sp=case.sp,
        forward_ours_ms=forward_ms[0],
        forward_theirs_ms=forward_ms[1],
        both_ours_ms=both_ms[0],
        both_theirs_ms=both_ms[1],
        rows_received=_traffic(language, forward, needed),
        gradients_received=_traffic(encoder, both, returned),
    )


def in_world(write: Path, case: Case, rows: int, hidden: int, repeats: int, rival: Rival) -> None:
    """Be one rank: join the world and `compete`; rank 0 writes the result as JSON."""
    environment = rank_environment()
    assert environment is not None
    set_threads(None, environment.world_size)
    initialize_distributed(
        environment.rank,
        environment.world_size,
        environment.rendezvous,
        _TIMEOUT_SECONDS,
        environment.local_rank,
    )
    topology = build_topology(case.layout, _TIMEOUT_SECONDS)
    found = compete(case, rows, hidden, repeats, rival, topology)
    if environment.rank == 0:
        write.write_text(json.dumps(asdict(found)))
    barrier()
