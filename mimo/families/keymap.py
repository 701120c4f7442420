"""The key map: our parameters as runs of rows of the tensors of a Hugging Face checkpoint.

As a matrix of its first dimension by all others, each of our parameters consists of whole rows of
theirs: fused projections stack or interleave them, and a convolution whose stride equals its kernel
is a matrix.

Letters: R rows, C columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint. shape: as stored. transposed: a matrix stored as (C, R).

    stacked: one (R', C) matrix per expert, stored as (E, R', C) and read as (E · R', C).
    """

    key: str
    shape: tuple[int, ...]
    transposed: bool = False
    stacked: bool = False

    @property
    def rows_each(self) -> int:
        """Rows of an element of the first dimension: R' of experts, else 1."""
        return self.shape[1] if self.stacked else 1

    @property
    def num_rows(self) -> int:
        return self.shape[1] if self.transposed else self.shape[0] * self.rows_each

    def matrix(self, stored: Tensor) -> Tensor:
        """Return a stored tensor, or whole rows of it, as (R, C); a vector stays (R,)."""
        if self.transposed:
            return stored.T
        if self.stacked:
            return stored.flatten(0, 1)
        return stored if stored.dim() == 1 else stored.flatten(1)

    def stored(self, matrix: Tensor) -> Tensor:
        """Invert `matrix` for the whole tensor."""
        return matrix.T.contiguous() if self.transposed else matrix.reshape(self.shape)


@dataclass(frozen=True)
class Run:
    """``count`` rows of ``source`` from ``start`` on."""

    source: Source
    start: int
    count: int


@dataclass(frozen=True)
class Weight:
    """One of our parameters, by its name in the whole module, as runs of rows in order.

    Our tensor may have more rows, which are only padding and zero.
    """

    name: str
    runs: tuple[Run, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(run.source for run in self.runs))

    @property
    def num_rows(self) -> int:
        """R, without padding."""
        return sum(run.count for run in self.runs)

    def rows(self, first: int, last: int) -> Iterator[Run]:
        """Yield the runs that make up the rows first .. last - 1, without rows of padding."""
        position = 0
        for run in self.runs:
            start, stop = max(first - position, 0), min(last - position, run.count)
            if start < stop:
                yield Run(run.source, run.start + start, stop - start)
            position += run.count

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Build our parameter, without padding, from whole tensors of the checkpoint by key."""
        import torch  # recipes are read without it

        parts = [
            run.source.matrix(tensors[run.source.key])[run.start : run.start + run.count]
            for run in self.runs
        ]
        return torch.cat(parts)

    def unpack(self, ours: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's tensors by key, from our parameter (R, ...) with padding."""
        return {source.key: source.stored(rows) for source, rows in self.split(ours).items()}

    def split(self, ours: Tensor) -> dict[Source, Tensor]:
        """Return the rows of every source in its order, from any tensor with our rows, (R, ...)."""
        import torch

        pieces: dict[Source, dict[int, Tensor]] = {source: {} for source in self.sources}
        position = 0
        for run in self.runs:
            pieces[run.source][run.start] = ours[position : position + run.count]
            position += run.count
        # The runs cover a source completely, whatever their order in our parameter.
        return {
            source: torch.cat([by_start[start] for start in sorted(by_start)])
            for source, by_start in pieces.items()
        }


def plain(
    name: str, key: str, *shape: int, transposed: bool = False, stacked: bool = False
) -> Weight:
    """Map a parameter to one tensor of this shape. transposed, stacked: see `Source`."""
    source = Source(key, shape, transposed, stacked)
    return Weight(name, (Run(source, 0, source.num_rows),))


def stacked(name: str, keys: Sequence[str], *shape: int) -> Weight:
    """Stack tensors of one shape, such as gate and up projection."""
    return Weight(name, tuple(Run(Source(key, shape), 0, shape[0]) for key in keys))


def grouped_qkv(
    name: str,
    keys: Sequence[str],
    num_groups: int,
    queries_per_group: int,
    head_size: int,
    *columns: int,
    has_gate: bool = False,
) -> Weight:
    """Fuse projections in Megatron's order: for each group its queries, its key, its value.

    keys: of the query, key and value projections. columns: none for biases. has_gate: whether the
    query projection has a gate after each head's query; those of a group follow its queries.
    """
    parts, num_heads = 2 if has_gate else 1, num_groups * queries_per_group
    query, key, value = (
        Source(key, (count * head_size, *columns))
        for key, count in zip(keys, (parts * num_heads, num_groups, num_groups), strict=True)
    )
    runs, together = [], 1 if has_gate else queries_per_group
    for group in range(num_groups):
        heads = range(group * queries_per_group, (group + 1) * queries_per_group, together)
        rows = [parts * head + part for part in range(parts) for head in heads]
        runs += [Run(query, row * head_size, together * head_size) for row in rows]
        runs += [Run(source, group * head_size, head_size) for source in (key, value)]
    return Weight(name, tuple(runs))


def interleaved(name: str, parts: Sequence[tuple[Source, int, int]], num_groups: int) -> Weight:
    """Take rows of several sources in turn, for each of ``num_groups`` groups.

    parts: a source, the first of its rows, and its rows for a group, which follow each other.
    """
    runs = (
        Run(source, start + group * count, count)
        for group in range(num_groups)
        for source, start, count in parts
    )
    return Weight(name, tuple(runs))


def fused_qkv(name: str, key: str, num_heads: int, head_size: int, *columns: int) -> Weight:
    """Reorder a fused projection of all queries, then all keys, then all values."""
    size = num_heads * head_size
    source = Source(key, (3 * size, *columns))
    return interleaved(name, [(source, part * size, head_size) for part in range(3)], num_heads)


def num_elements(weights: Sequence[Weight]) -> int:
    """Count the elements of all their tensors."""
    return sum(math.prod(source.shape) for weight in weights for source in weight.sources)


_ENDINGS = (".lora_a", ".lora_b")


def is_adapter(name: str) -> bool:
    """Return whether this is the name of an adapter's parameter."""
    return name.endswith(_ENDINGS)


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the two matrices that adapt the parameter of this name."""
    linear = weight.removesuffix(".weight")
    lora_a, lora_b = (f"{linear}{ending}" for ending in _ENDINGS)
    return lora_a, lora_b


def adapter_shapes(weight: Sequence[int], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the two matrices that adapt a weight (O, I): (R, I) and (O, R)."""
    outputs, inputs = weight
    return (rank, inputs), (outputs, rank)


def merged_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Return weight (O, I) + scale · lora_b (O, R) @ lora_a (R, I), summed in fp32 at least.

    All have one dtype. A rank's parts of the three give its part of the result. With
    experts, each of the three is their matrices one below the other.
    """
    import torch  # recipes are read without it

    wide = torch.promote_types(weight.dtype, torch.float32)
    experts = len(lora_a) // lora_b.shape[1]
    pairs = zip(lora_b.to(wide).chunk(experts), lora_a.to(wide).chunk(experts), strict=True)
    update = torch.cat([b @ a for b, a in pairs])
    return (weight.to(wide) + scale * update).to(weight.dtype)
