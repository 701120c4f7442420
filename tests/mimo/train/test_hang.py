"""Who is the origin of a hang, as what the ranks say of themselves tells it; without ranks."""

from __future__ import annotations

from dataclasses import replace

from mimo.train.hang import State, explain

STEP = State(0, "vision, lane 0", "node1", 7, "forward and backward", told=True, seconds=61.0)
ROWS = "bridge vision -> language: rows of microbatch 3"


def rank(
    number: int, activity: str = STEP.activity, waits: str = "", waits_for=(), **more
) -> State:
    return replace(STEP, rank=number, activity=activity, waits=waits, waits_for=waits_for, **more)


def origins(*states: State, num_ranks: int | None = None) -> tuple[tuple[int, ...], list[str]]:
    found = explain({one.rank: one for one in states}, num_ranks or len(states))
    return found.ranks, found.text.splitlines()


def test_a_rank_that_waits_for_nobody_is_the_origin_and_ranks_in_one_place_share_a_line() -> None:
    busy = rank(0, doing="forward of vision, stage 0, microbatch 3", place="encoders/a.py:7 run")
    ranks, lines = origins(
        busy, rank(1, waits=ROWS, waits_for=(0,)), rank(2, waits=ROWS, waits_for=(0,))
    )
    assert ranks == (0,)
    assert lines == [
        "origin: rank 0 (vision, lane 0) waits for no other rank: at step 7, in 'forward and "
        "backward': forward of vision, stage 0, microbatch 3 (at encoders/a.py:7 run), for 61 s",
        "rank 1 (vision, lane 0), rank 2 (vision, lane 0): at step 7, in 'forward and backward', "
        f"waits for rank 0: {ROWS}, for 61 s",
    ]


def test_of_ranks_that_wait_for_nobody_the_origin_is_the_one_that_others_wait_for() -> None:
    ranks, _ = origins(rank(0), rank(1), rank(2, waits=ROWS, waits_for=(1,)))
    assert ranks == (1,)


def test_a_rank_that_still_gets_on_is_not_the_origin() -> None:
    ranks, _ = origins(
        rank(0, seconds=2.0), rank(1), rank(2, waits="all_reduce", waits_for=(0, 1, 2))
    )
    assert ranks == (1,)


def test_a_rank_that_does_not_answer_comes_before_all_others() -> None:
    silent = rank(1, told=False)
    ranks, lines = origins(rank(0), silent, rank(2, waits=ROWS, waits_for=(0,)), num_ranks=4)
    assert ranks == (1, 3)
    assert lines[0].startswith(
        "origin: rank 1 (vision, lane 0) does not answer, last seen at step 7"
    )
    assert "node1" in lines[0]
    assert lines[1] == "origin: rank 3 is not there: it has ended, or never came"


def test_a_rank_past_what_the_last_ones_wait_for_has_left_it_out() -> None:
    ranks, lines = origins(
        rank(0, "norm and loss", "the sum over all ranks", (0, 1, 2)),
        rank(1, "gradients", "all_reduce of language.dp", (1, 2)),
        rank(2, "norm and loss", "the sum over all ranks", (0, 1, 2)),
    )
    assert ranks == (2,)
    assert "rank 2 (vision, lane 0) has left out what rank 1 waits for, and is already" in lines[0]


def test_ranks_that_wait_for_each_other_have_no_origin() -> None:
    ranks, lines = origins(
        rank(0, waits="rows", waits_for=(1,)), rank(1, waits="rows", waits_for=(0,))
    )
    assert ranks == ()
    assert lines[0] == "origin: none; all ranks wait for each other"


def test_ranks_that_wait_across_hosts_alone_may_have_no_network_between_them() -> None:
    there = {
        "host": "node2",
        "activity": "norm and loss",
        "waits": "the sum",
        "waits_for": (0, 1, 2),
    }
    states = [rank(0, waits="gradients", waits_for=(2,)), rank(1, **there), rank(2, **there)]
    ranks, lines = origins(*states)
    assert ranks == (2,)
    cut = "origin: no message gets through between node1 (rank 0) and node2 (rank 1, 2), or"
    assert lines[0].startswith(f"{cut} rank 2 (vision, lane 0) has left out what rank 0 waits for")
    everyone = [replace(one, waits_for=(0, 1, 2), activity="update") for one in states]
    ranks, lines = origins(*everyone)
    assert (ranks, lines[0]) == ((), f"{cut} none; all ranks wait for each other")
