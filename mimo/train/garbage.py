"""Python's garbage collector, at steps of our choice."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator


def collected_together[T](steps: Iterable[T], every: int | None) -> Iterator[T]:
    """Yield from ``steps``, and collect garbage after every so many of them, and at no other time.

    Left to itself Python collects when a process has made enough objects: on another rank in
    another step, and each time all the others wait for it in their next exchange.
    every: None leaves it to Python.
    """
    if every is None or not gc.isenabled():
        yield from steps
        return
    gc.collect()
    gc.disable()
    try:
        for number, step in enumerate(steps, start=1):
            yield step
            if number % every == 0:
                gc.collect()
    finally:
        gc.enable()
