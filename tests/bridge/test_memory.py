"""Memory for rows is used again when nobody holds it, and never before."""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.communicator import RowMemory

ROWS, HIDDEN = 1024, 512  # 2 MiB in fp32


def lend(memory: RowMemory, num_rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return memory.empty(num_rows, HIDDEN, dtype)


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    memory = RowMemory(torch.device("cpu"))
    rows = lend(memory)
    place = rows.data_ptr()
    view = rows[3:5].t()
    del rows
    other = lend(memory)
    assert other.data_ptr() != place, "a view still reads it"
    del view
    assert lend(memory).data_ptr() == place


def test_memory_stays_taken_while_autograd_has_saved_it() -> None:
    memory = RowMemory(torch.device("cpu"))
    weight = torch.ones(HIDDEN, requires_grad=True)
    rows = lend(memory)
    rows.fill_(3.0)
    place = rows.data_ptr()
    loss = (rows * weight).sum()
    del rows
    lend(memory).fill_(-1.0)
    loss.backward()
    assert weight.grad is not None
    assert (weight.grad == 3.0 * ROWS).all()
    del loss
    again = [lend(memory), lend(memory)]
    assert place in [rows.data_ptr() for rows in again]


def test_a_buffer_has_the_size_and_dtype_that_were_asked_for() -> None:
    memory = RowMemory(torch.device("cpu"))
    for num_rows in (ROWS, ROWS - 5, ROWS + 7, 3, 0):
        for dtype in (torch.float32, torch.bfloat16):
            rows = lend(memory, num_rows, dtype)
            assert (rows.shape, rows.dtype) == ((num_rows, HIDDEN), dtype)
            assert rows.is_contiguous()
            rows.fill_(1.0)
            assert (rows == 1.0).all()


def test_a_slightly_larger_buffer_fits_into_the_memory_of_the_last() -> None:
    memory = RowMemory(torch.device("cpu"))
    place = lend(memory).data_ptr()
    assert lend(memory, ROWS + ROWS // 16).data_ptr() == place


def test_only_a_few_blocks_are_kept_while_nobody_uses_them() -> None:
    memory = RowMemory(torch.device("cpu"))
    held = [lend(memory, ROWS + number) for number in range(10)]
    del held
    lend(memory, 100 * ROWS)
    kept = [block.nbytes for block in memory._free]
    assert len(kept) <= 5  # four, and the one that has just been given back
    assert min(kept) >= (ROWS + 6) * HIDDEN  # the largest stay
