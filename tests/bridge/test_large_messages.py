"""Messages of megabytes: their memory is used again, and never while somebody needs it.

All microbatches are of one size, so that any two could share a buffer. Language ranks hold the
rows of all of them, as a pipeline does before its first backward, and encoder ranks all gradients.

Letters: T tokens of a language lane, N rows of an encoder lane, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bridge import BridgeReceiver, BridgeSender
from tests.bridge.two_grids import Case, build_end, local_slice, rows_of
from tests.conftest import RunRanks

SAME_SIZE = ((8, 8, 8, 8),) * 4
LARGE = 1 << 15  # H: 8 rows are 1 MiB in fp32
CASES = {
    # A message's rows do not stand together: context parallelism deals out both ends of a lane.
    "1 lane to 1 lane cp2": Case(1, 1, 1, 1, language_cp=2, samples=SAME_SIZE, hidden=LARGE),
    # Ranks of a lane share out what each of them received.
    "1 lane tp2 to 1 lane tp2": Case(1, 2, 1, 2, samples=SAME_SIZE, hidden=LARGE),
    # What a replica passes on is not contiguous.
    "1 lane tp2 to 1 lane cp2": Case(1, 2, 1, 1, language_cp=2, samples=SAME_SIZE, hidden=LARGE),
}


# ------------------------------------------------------- functions that run inside ranks


def check_every_microbatch_keeps_its_own(rank: int, case: Case) -> None:
    end, plans = build_end(rank, case), case.plans()
    for plan in plans:
        messages = plan.sends(rank) if rank < case.encoder_ranks else plan.receives(rank)
        assert min(messages.counts) * case.hidden * case.wire_dtype.itemsize >= 1 << 20
    for _ in range(2):  # the second step takes the memory of the first
        end.begin(plans)
        if isinstance(end, BridgeSender):
            check_gradients(end, case)
        else:
            check_rows(end, case)
        end.finish()


def check_rows(receiver: BridgeReceiver, case: Case) -> None:
    lane, number = case.place(receiver.end.rank)
    dist.barrier()  # everything has been sent: those that are posted ahead arrive unasked
    received = [receiver.receive(m) for m in range(len(case.samples))]
    hidden = []
    for m, (rows, positions) in enumerate(received):
        expected = case.only_rows(m, case.dense(m, seed=0))[lane].to(case.wire_dtype).float()
        expected = local_slice(case, expected, number)
        hidden.append(torch.zeros_like(expected).index_copy(0, positions, rows))
        assert torch.equal(hidden[m], expected), f"rows of microbatch {m}"
    for m in range(len(case.samples)):
        weights = local_slice(case, case.dense(m, seed=100)[lane], number)
        (hidden[m] * weights).sum().backward()


def check_gradients(sender: BridgeSender, case: Case) -> None:
    rows = [rows_of(case, m, sender.end.rank) for m in range(len(case.samples))]
    tokens = [sender.send(m, own) for m, own in enumerate(rows)]
    dist.barrier()
    for token in tokens:
        token.backward()
    for m, own in enumerate(rows):
        expected = case.of_lane(m, sender.lane, case.dense(m, seed=100)).to(case.wire_dtype)
        assert own.values.grad is not None
        assert torch.equal(own.values.grad, expected.float()), f"gradient of microbatch {m}"


# ------------------------------------------------------------------------- on ranks


@pytest.mark.parametrize("name", CASES)
def test_no_microbatch_gets_the_rows_or_gradients_of_another(
    run_ranks: RunRanks, name: str
) -> None:
    run_ranks(check_every_microbatch_keeps_its_own, CASES[name].num_ranks, CASES[name])


def test_no_microbatch_gets_those_of_another_before_they_are_cast(run_ranks: RunRanks) -> None:
    case = replace(CASES["1 lane to 1 lane cp2"], wire_dtype=torch.bfloat16)
    run_ranks(check_every_microbatch_keeps_its_own, case.num_ranks, case)
