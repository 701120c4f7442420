"""The rectangles of a rank's part, against the definition of the cut."""

from __future__ import annotations

import itertools

import pytest
import torch

from mimo.engines.megatron.weights import Cut
from tests.lone_module import tensor_parallel_slice

WHOLE = torch.arange(24 * 12).view(24, 12)


@pytest.mark.parametrize(("dim", "blocks"), [(None, 1), (0, 1), (0, 2), (0, 3), (1, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_stretch_is_made_of_rectangles_of_the_whole_matrix(
    dim: int | None, blocks: int, size: int
) -> None:
    for rank in range(size):
        part = WHOLE
        if dim is not None:
            part = tensor_parallel_slice(WHOLE, rank, size, dim, blocks).contiguous()
        cut = Cut(*part.shape, dim=dim, blocks=blocks, rank=rank, size=size)
        assert cut.whole_shape(tuple(part.shape)) == WHOLE.shape
        count = part.numel()
        for start, end in itertools.combinations([0, 1, 11, 12, 13, 25, count // 2, count], 2):
            if start >= end:
                continue
            found = []
            for row, column, values in cut.rectangles(part.flatten()[start:end], start):
                rows = WHOLE[row : row + values.shape[0]]
                found.append(rows[:, column : column + values.shape[1]].flatten())
                assert torch.equal(values.flatten(), found[-1])
            assert torch.equal(torch.cat(found), part.flatten()[start:end])
            # The rest of a row, whole rows, the beginning of one; whole rows once per matrix.
            assert len(found) <= 2 + blocks
