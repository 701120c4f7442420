"""The multiples to which sequences are padded, so that all their parts are equally long.

Context parallelism (CP) cuts each segment of a packed sequence, or each sequence of a batch, into
2·cp chunks. Sequence parallelism (SP) then cuts a context-parallel rank's share of the whole
sequence into tp parts.
"""

from __future__ import annotations


def segment_multiple(cp: int) -> int:
    """The multiple for the tokens of each segment of a packed sequence."""
    return 2 * cp if cp > 1 else 1


def sequence_multiple(cp: int, tp: int, sp: bool) -> int:
    """The multiple for the tokens of each whole sequence, packed or not."""
    return segment_multiple(cp) * (tp if sp else 1)
