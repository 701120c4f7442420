"""What every encoder emits.

Letters: N rows of one lane, H language hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FlatEmbeddings:
    """Rows of one encoder lane for one global microbatch.

    values: (N, H), the rows of the lane's items one after the other, in plan order.
    split_sizes: rows per sample of the global microbatch, in sample order; zero for a sample
        without items on this lane (a text-only one always). Their sum is N.

    Raises ValueError when the two disagree.
    """

    values: Tensor
    split_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.values.dim() != 2:
            raise ValueError(f"flat embeddings are (rows, hidden), got {tuple(self.values.shape)}")
        if sum(self.split_sizes) != self.values.shape[0]:
            raise ValueError(
                f"an encoder produced {self.values.shape[0]} rows, but its samples need "
                f"{sum(self.split_sizes)} ({list(self.split_sizes)})"
            )
