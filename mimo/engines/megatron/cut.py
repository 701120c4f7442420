"""Which rectangles of a whole parameter a tensor-parallel rank holds.

Every parameter is seen as a matrix of its first dimension by all others; a vector has one column.
Drawing, reading and writing go by rectangles, so nobody needs the whole matrix.

Letters: R rows, C columns of the whole matrix; R', C' of a rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut over ``size`` tensor-parallel ranks, of which this is ``rank``.

    rows, columns: R' and C'. dim: along which it is cut; None if every rank has all of it.
    blocks: matrices that are stacked in it, such as gate and up, each of which is cut separately.
    """

    rows: int
    columns: int
    dim: int | None
    blocks: int
    rank: int
    size: int

    @classmethod
    def of(cls, param: Tensor, tp: ProcessGroup) -> Cut:
        """From what Megatron notes on its parameters."""
        rows = param.shape[0]
        columns = param.numel() // rows
        dim, blocks = None, 1
        if tp.size() > 1 and getattr(param, "tensor_model_parallel", False):
            dim, blocks = (int(getattr(param, f"partition_{what}")) for what in ("dim", "stride"))
            assert dim == 0 or (dim, blocks) == (1, 1), "only rows are stacked"
            assert rows % blocks == 0, f"{blocks} matrices in {rows} rows"
        return cls(rows, columns, dim, blocks, tp.rank(), tp.size())

    @property
    def whole_rows(self) -> int:
        """R."""
        return self.rows * (self.size if self.dim == 0 else 1)

    @property
    def whole_columns(self) -> int:
        """C."""
        return self.columns * (self.size if self.dim == 1 else 1)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole parameter, given that of the rank's part."""
        if self.dim is None:
            return shape
        return tuple(n * self.size if dim == self.dim else n for dim, n in enumerate(shape))

    def rectangles(self, held: Tensor, start: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """Those that a stretch of the flat part is made of, its elements from ``start`` on.

        held: (n,), contiguous. Gives row and column of the first element in the whole matrix, and
        the elements (rows, columns), views of ``held`` in its order. The stretch is the end of a
        row, whole rows, and the beginning of another; of stacked matrices it may have rows of
        several.
        """
        height, position, end = self.rows // self.blocks, 0, held.numel()
        while position < end:
            row, column = divmod(start + position, self.columns)
            left = end - position
            if column or left < self.columns:
                rows, columns = 1, min(self.columns - column, left)
            else:
                rows, columns = min(left // self.columns, height - row % height), self.columns
            count = rows * columns
            if self.dim == 0:
                row += (row // height * (self.size - 1) + self.rank) * height
            elif self.dim == 1:
                column += self.rank * self.columns
            yield row, column, held[position : position + count].view(rows, columns)
            position += count
