"""What the towers share in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mimo.hf.keymap import Weight, plain


def both(ours: str, theirs: str, rows: int, *columns: int) -> Iterator[Weight]:
    """A linear's weight (rows, columns) and bias (rows,); without columns a norm's."""
    for kind in ("weight", "bias"):
        shape = (rows, *columns) if kind == "weight" else (rows,)
        yield plain(f"{ours}.{kind}", f"{theirs}.{kind}", *shape)


def block_norms(ours: str, theirs: str, names: Mapping[str, str], size: int) -> Iterator[Weight]:
    """The norms of a block. names: ours by theirs."""
    for norm, own in names.items():
        yield from both(f"{ours}.{own}", f"{theirs}.{norm}", size)
