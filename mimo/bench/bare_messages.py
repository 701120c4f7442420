"""The floor of the comparison: the messages of our bridge and nothing else.

Letters: n rows of this rank's messages, H hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bridge import Exchange
from mimo.bench.bridge_workload import ENCODER, Workload
from mimo.device import local_device
from mimo.layout.groups import Topology
from mimo.layout.levels import Link

_Way = Literal["send", "receive"]
_Call = tuple[_Way, Tensor, int, dist.ProcessGroup]


class BareMessages:
    """Bare isend and irecv of rows and gradients, in memory that is already allocated.

    No plan, no autograd, no checks, no timeouts: only the time of the transport. Only for layouts
    in which a language rank needs just its slice. The gradient of a row is the row.
    """

    def __init__(self, workload: Workload, topology: Topology) -> None:
        plan, rank = workload.build_plan("sharded"), topology.rank
        groups, grid = topology.bridges[Link(ENCODER)], workload.case.layout.encoders[ENCODER]
        if topology.owns(ENCODER):
            lane = grid.coords(rank).dp
            exchange = plan.sends(rank)
            self.expected = workload.encoder_values(lane)[torch.from_numpy(exchange.index)]
            rows = self.expected.to(local_device())
            self.arrived = torch.zeros_like(rows)
            out = _calls("send", rows, exchange, groups.forward)
            back = _calls("receive", self.arrived, exchange, groups.backward)
            self.forward, self.both = [out], [out + back]
            group = topology.modules[ENCODER].tp
            siblings = [r for r in dist.get_process_group_ranks(group) if r != rank]
            shares: list[_Call] = [("send", self.arrived, r, group) for r in siblings]
            for sibling in siblings:
                share = rows.new_zeros(plan.collects(sibling).num_rows, workload.hidden)
                shares.append(("receive", share, sibling, group))
            self.both.append(shares)
            return
        exchange = plan.receives(rank)
        places = torch.from_numpy(exchange.index)
        self.expected = workload.values_at(rank, places, "sharded")
        self.arrived = torch.zeros_like(self.expected, device=local_device())
        self.forward = [_calls("receive", self.arrived, exchange, groups.forward)]
        back = _calls("send", self.arrived, exchange, groups.backward)
        self.both = [*self.forward, back]

    def prepare(self) -> None:
        """Nothing."""

    def run(self, backward: bool) -> Tensor:
        """Send all messages of a direction at once, one direction after the other."""
        for phase in self.both if backward else self.forward:
            works = [
                (dist.isend if way == "send" else dist.irecv)(part, peer, group=group)
                for way, part, peer, group in phase
            ]
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()
        return self.arrived

    def check(self) -> None:
        """Check that rows arrive where they belong, and come back as their gradients."""
        self.arrived.zero_()
        self.run(backward=True)
        assert torch.equal(self.arrived.cpu(), self.expected), "wrong rows arrived"


def _calls(way: _Way, rows: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> list[_Call]:
    """One call per peer; rows (n, H) holds all messages one after the other."""
    parts = rows.split(list(exchange.counts))
    return [(way, part, peer, group) for part, peer in zip(parts, exchange.peers, strict=True)]
