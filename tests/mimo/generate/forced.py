"""A model that writes what a test wants, whatever its weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from data.batch import PackedLane
from mimo.generate.one_rank import LocalModel


@contextmanager
def forced(token: Callable[[list[int]], int]) -> Iterator[list[PackedLane]]:
    """Make models write ``token(sequence)`` next; yields the lanes that they are run on."""
    lanes = list[PackedLane]()

    def forward(self: LocalModel, lane: PackedLane, *_: Any, **__: Any) -> torch.Tensor:
        lanes.append(lane)
        parts = np.split(lane.input_ids, np.cumsum(lane.lengths)[:-1])
        logits = torch.zeros(1, len(parts), self.model.num_tokens)
        for number, part in enumerate(parts):
            logits[0, number, token(part.tolist())] = 1.0
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalModel, "forward", forward)
        yield lanes


def known(sequences: Sequence[Sequence[int]]) -> Callable[[list[int]], int]:
    """Return what continues the first of these sequences that begins as the given one."""

    def token(sequence: list[int]) -> int:
        for whole in sequences:
            if [*whole[: len(sequence)]] == sequence:
                return whole[len(sequence)]
        raise AssertionError("no sequence goes on like this")

    return token
