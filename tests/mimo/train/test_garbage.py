"""Garbage is collected at the same steps on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from mimo.train.loop import with_synchronized_gc


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry at each collection that is asked for."""
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append(1))
    return found


def test_garbage_is_collected_before_the_first_step_and_then_every_so_many(
    collections: list[int],
) -> None:
    seen = []
    for _ in with_synchronized_gc(range(7), every=3):
        assert not gc.isenabled()
        seen.append(len(collections))
    assert seen == [1, 1, 1, 2, 2, 2, 3]
    assert gc.isenabled()


def test_a_failed_step_leaves_the_collector_as_it_was(collections: list[int]) -> None:
    def steps() -> Iterator[int]:
        yield 0
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(with_synchronized_gc(steps(), every=3))
    assert gc.isenabled()


def test_it_can_be_left_to_python(collections: list[int]) -> None:
    for _ in with_synchronized_gc(range(3), every=None):
        assert gc.isenabled()
    assert collections == []
