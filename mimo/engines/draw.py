"""Random numbers of a matrix as a pure function of its name and of the position in it.

The numbers of each block of `BLOCK` × `BLOCK` elements come from a counter-based generator (Philox,
Salmon et al. 2011) whose key is a hash of the name and whose counter begins with the block's
number. So a rank draws only the blocks that overlap its part, and all layouts get the same numbers.
"""

import functools
import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
"""Rows and columns of a block. Another number gives other weights for the same seed."""

Numbers = Callable[[np.random.Generator, np.ndarray], None]
"""Fills an array (rows, columns) of float32."""


def normal(std: float) -> Numbers:
    """Return numbers of N(0, std²)."""

    def fill(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.standard_normal(out=out, dtype=np.float32)
        out *= np.float32(std)

    return fill


def adapter_numbers(inputs: int) -> Numbers:
    """Return numbers for an adapter's first matrix: uniform in ±1/sqrt(inputs), as in peft."""
    bound = inputs**-0.5

    def fill(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.random(out=out, dtype=np.float32)
        out *= np.float32(2 * bound)
        out -= np.float32(bound)

    return fill


def log_of_uniform(low: float, high: float) -> Numbers:
    """Return logarithms of numbers that are uniform between ``low`` and ``high``."""

    def fill(generator: np.random.Generator, out: np.ndarray) -> None:
        generator.random(out=out, dtype=np.float32)
        np.log(np.float32(low) + np.float32(high - low) * out, out=out)

    return fill


@functools.lru_cache
def philox_key(name: str) -> int:
    """Return the generator's key for a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")


def draw(
    part: Tensor, row: int, column: int, whole: tuple[int, int], name: str, numbers: Numbers
) -> None:
    """Fill a rectangle of a matrix, in place, block by block of the whole.

    row, column: position of its first element. whole: rows and columns of the matrix.
    """
    key = philox_key(name)
    (rows, columns), (bottom, right) = whole, (row + part.shape[0], column + part.shape[1])
    per_row = -(-columns // BLOCK)
    memory = np.empty(BLOCK * BLOCK, np.float32)
    for top in range(row // BLOCK * BLOCK, bottom, BLOCK):
        for left in range(column // BLOCK * BLOCK, right, BLOCK):
            height, width = min(BLOCK, rows - top), min(BLOCK, columns - left)
            block = memory[: height * width].reshape(height, width)
            number = top // BLOCK * per_row + left // BLOCK
            # The generator counts in the first of four words.
            philox = np.random.Philox(key=key, counter=[0, number, 0, 0])
            numbers(np.random.Generator(philox), block)
            first, last = max(top, row), min(top + height, bottom)
            start, end = max(left, column), min(left + width, right)
            target = part[first - row : last - row, start - column : end - column]
            target.copy_(
                torch.from_numpy(block[first - top : last - top, start - left : end - left])
            )
