"""The error of a rank whose messages do not come or are not taken."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from bridge import BridgeError, BridgeReceiver, BridgeSender
from tests.bridge.two_grids import Case, build_end, receive_all, send_all
from tests.conftest import RunRanks

# ------------------------------------------------------- functions that run inside ranks


def wait_for_stalled(rank: int, case: Case, stalled: tuple[int, ...]) -> tuple[str, Any]:
    """The error of this rank, and whom it waits for, when ``stalled`` ranks never take part."""
    end = build_end(rank, case)
    if rank in stalled:
        time.sleep(1.5)
        return "", ()
    started = time.monotonic()
    with pytest.raises(BridgeError) as caught:
        take_part(end, case)
    assert time.monotonic() - started < 2
    time.sleep(0.5)  # leave the connections to the others while they wait
    return str(caught.value), caught.value.waits_for


def take_part(end: BridgeSender | BridgeReceiver, case: Case) -> None:
    end.begin(case.plans())
    send_all(end, case) if isinstance(end, BridgeSender) else receive_all(end, case)
    end.finish()


def lost_peer(rank: int, case: Case) -> str:
    end = build_end(rank, case)
    if isinstance(end, BridgeSender):
        dist.barrier()
        raise SystemExit(0)  # this process ends, and its connections with it
    end.begin(case.plans())
    dist.barrier()
    with pytest.raises(BridgeError) as caught:
        receive_all(end, case)
    assert caught.value.waits_for == (0,)
    return str(caught.value)


# ------------------------------------------------------------------------- on ranks


@pytest.mark.parametrize(
    ("case", "stalled", "rank", "what", "missing"),
    [
        (
            Case(3, 1, 1, 1),
            (0, 2),
            3,
            "vision -> language: rows of microbatch 0 did not arrive",
            "rank 0 to send 20 rows, rank 2 to send 3 rows",
        ),
        (
            Case(1, 1, 2, 1),
            (1, 2),
            0,
            "language -> vision: gradients of microbatch 0 did not arrive",
            "rank 1 to send 7 rows, rank 2 to send 16 rows",
        ),
        pytest.param(
            Case(1, 1, 2, 1, trainable=False),
            (1, 2),
            0,
            "vision -> language: rows of microbatch 0 were not taken",
            "rank 1 to take 7 rows, rank 2 to take 16 rows",
            # `test_watch.py` has quick rows that nobody takes.
            marks=pytest.mark.slow,
        ),
    ],
    ids=["receiver", "sender of trained rows", "sender of frozen rows"],
)
def test_a_rank_names_every_stalled_peer_and_its_rows_and_no_other(
    run_ranks: RunRanks, case: Case, stalled: tuple[int, ...], rank: int, what: str, missing: str
) -> None:
    case = replace(case, timeout_seconds=0.5)
    message, waits_for = run_ranks(wait_for_stalled, case.num_ranks, case, stalled)[rank]
    assert message == (
        f"bridge {what} within bridge.timeout_seconds 0.5; still waiting for {missing}"
    )
    assert waits_for == stalled


def test_lost_connection_names_the_peer_and_its_rows_at_once(run_ranks: RunRanks) -> None:
    case = Case(1, 1, 1, 1, timeout_seconds=30)
    started = time.monotonic()
    _, message = run_ranks(lost_peer, 2, case)
    assert time.monotonic() - started < 10
    assert message.startswith(
        "bridge vision -> language: rows of microbatch 0 failed while waiting for "
        "rank 0 to send 23 rows: Connection closed by peer"
    )
