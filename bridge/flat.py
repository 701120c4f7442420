"""What every encoder emits.

Letters: N rows of one lane, H language hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FlatEmbeddings:
    """Rows of one encoder lane for one global microbatch, or one rank's part of them.

    values: (N, H), the rows of the lane's items one after the other, in plan order; under sequence
        parallelism (ceil(N / parts), H), this rank's part of them, padding at the end included.
    split_sizes: rows per sample of the global microbatch, in sample order; zero for a sample
        without items on this lane (a text-only one always). Their sum is N.
    parts: over how many ranks the rows are cut.

    Raises ValueError when they disagree.
    """

    values: Tensor
    split_sizes: tuple[int, ...]
    parts: int = 1

    def __post_init__(self) -> None:
        if self.values.dim() != 2:
            raise ValueError(f"flat embeddings are (rows, hidden), got {tuple(self.values.shape)}")
        needed = -(-sum(self.split_sizes) // self.parts)
        if needed != self.values.shape[0]:
            part = f" on each of {self.parts} ranks" if self.parts > 1 else ""
            raise ValueError(
                f"an encoder produced {self.values.shape[0]} rows, but its samples need "
                f"{needed}{part} ({list(self.split_sizes)})"
            )
