"""Rectangles of tensors under the names of the checkpoint format, in this rank's memory.

That format's tensors are made of whole rows of transformers' tensors, so a rectangle of one of
theirs is a few of ours. It is plain integers and views: reading a piece writes into the model.

Letters: R rows, C columns of a tensor of the format, seen as a matrix of its first dimension by all
others; a vector has one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from mimo.engines.fsdp.sharding import Held
from mimo.engines.piece import Piece


@dataclass(frozen=True)
class Rows:
    """``count`` rows of transformers' tensor ``key`` from ``start`` on. transposed: as (C, R)."""

    key: str
    start: int
    count: int
    transposed: bool = False


@dataclass(frozen=True)
class Part:
    """These rows are those of tensor ``name`` of the format from ``row`` on."""

    name: str
    row: int
    rows: Rows


@dataclass(frozen=True)
class Names:
    """What the tensors of the checkpoint format are made of.

    shapes: of the format's tensors by name, rows of padding included. parts: by transformers' name,
    what each of its tensors is part of. filled: by name, how many rows are not padding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[Part, ...]] = field(repr=False)
    filled: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, tuple[int, ...], Sequence[Rows]]]) -> Self:
        """From name, shape with any padding, and rows in order of every tensor of the format."""
        shapes: dict[str, tuple[int, ...]] = {}
        parts: dict[str, tuple[Part, ...]] = {}
        filled: dict[str, int] = {}
        for name, shape, runs in tensors:
            shapes[name], row = shape, 0
            for rows in runs:
                parts[rows.key] = (*parts.get(rows.key, ()), Part(name, row, rows))
                row += rows.count
            assert row <= shape[0], f"{name}: {row} rows, but {shape}"
            filled[name] = row
        return cls(shapes, parts, filled)

    def users(self, key: str) -> frozenset[str]:
        """The names of the tensors that have rows of transformers' tensor ``key``."""
        assert key in self.parts, f"the key map does not say what is made of {key}"
        return frozenset(part.name for part in self.parts[key])

    def pieces(self, key: str, own: Held) -> Iterator[Piece]:
        """A rectangle of transformers' tensor ``key`` as rectangles of ours: views of its values.

        Keys are names of the format. Rows of padding come as zeros with the last row before them.
        """
        for part in self.parts[key]:
            values, row, column = own.values, own.row, own.column
            if part.rows.transposed:
                values, row, column = values.T, column, row
            first = max(row, part.rows.start)
            last = min(row + values.shape[0], part.rows.start + part.rows.count)
            if first >= last or not values.shape[1]:
                continue
            shape, moved = self.shapes[part.name], part.row - part.rows.start
            yield Piece(part.name, shape, first + moved, column, values[first - row : last - row])
            end = self.filled[part.name]
            if last + moved == end < shape[0]:
                zeros = values.new_zeros(shape[0] - end, values.shape[1])
                yield Piece(part.name, shape, end, column, zeros)
