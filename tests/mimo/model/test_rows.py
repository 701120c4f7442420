"""Rows of several encoders, put into the embeddings of one language model.

Letters: S tokens of a sequence, B sequences, n rows, H hidden, k levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mimo.model.inputs import ReceivedRows, join_levels, place_embeddings

S, B, H = 5, 2, 3


def arrived(first: float, places: list[int], num_levels: int) -> ReceivedRows:
    """Rows whose elements are ``first``, ``first`` + 1, ...; those of levels are negative."""
    numbers = first + torch.arange(float(len(places)))
    rows = numbers[:, None].expand(-1, H)
    return ReceivedRows(rows, -rows.expand(num_levels, -1, -1), torch.tensor(places))


# As many rows of each; place b·S + s is token s of sequence b.
IMAGES, VIDEOS = arrived(10.0, [7, 0], 2), arrived(20.0, [3, 8], 1)


def test_rows_of_encoders_with_equal_counts_stand_at_the_places_of_each() -> None:
    text = torch.zeros(S, B, H)
    expected = torch.zeros(S, B)
    expected[2, 1], expected[0, 0] = 10.0, 11.0
    expected[3, 0], expected[3, 1] = 20.0, 21.0
    assert torch.equal(
        place_embeddings(text, [IMAGES, VIDEOS]), expected[..., None].expand(text.shape)
    )


def test_levels_of_encoders_keep_the_places_of_each() -> None:
    joined = join_levels([IMAGES, VIDEOS])
    assert joined is not None
    levels: Tensor = joined[0]
    assert joined[1].tolist() == [7, 0, 3, 8]
    assert levels[..., 0].tolist() == [[-10.0, -11.0, -20.0, -21.0], [-10.0, -11.0, 0.0, 0.0]]
