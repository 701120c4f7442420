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


def as_matrix(tensor: Tensor) -> Tensor:
    """The same memory as (R', C'). tensor: contiguous, of at least one dimension."""
    return tensor.view(tensor.shape[0], -1)


@dataclass(frozen=True)
class Rectangle:
    """Some elements of a rank's part, and where they lie.

    own_row, own_column: of the first element in the part. row, column: of the same element in the
    whole matrix.
    """

    own_row: int
    own_column: int
    row: int
    column: int
    rows: int
    columns: int

    def of(self, part: Tensor) -> Tensor:
        """These elements (rows, columns) of a part (R', C'), sharing its memory."""
        rows = part[self.own_row : self.own_row + self.rows]
        return rows[:, self.own_column : self.own_column + self.columns]


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
        rows, columns = as_matrix(param.data).shape
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

    def rectangles(self, start: int = 0, end: int | None = None) -> Iterator[Rectangle]:
        """Those that make up the elements ``start`` .. ``end`` - 1 of the flat part.

        In the order of these elements, so that each is a contiguous piece of them. The stretch is
        the end of a row, whole rows, and the beginning of another; of stacked matrices it may have
        rows of several.
        """
        end = self.rows * self.columns if end is None else end
        while start < end:
            row, column = divmod(start, self.columns)
            if column or end - start < self.columns:
                rows, columns = 1, min(self.columns - column, end - start)
            else:
                height = self.rows // self.blocks
                rows, columns = (
                    min((end - start) // self.columns, height - row % height),
                    self.columns,
                )
            yield self._rectangle(row, column, rows, columns)
            start += rows * columns

    def _rectangle(self, row: int, column: int, rows: int, columns: int) -> Rectangle:
        whole_row, whole_column = row, column
        if self.dim == 0:
            height = self.rows // self.blocks
            whole_row += (row // height * (self.size - 1) + self.rank) * height
        elif self.dim == 1:
            whole_column += self.rank * self.columns
        return Rectangle(row, column, whole_row, whole_column, rows, columns)
