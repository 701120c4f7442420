"""Several feature levels over one bridge: the levels of a row stand side by side in a message.

A level is one more vector per row, for a deeper layer of the language model. A message is (n, k·H)
for the k levels that its receiver needs.

Letters: n rows of a message, N of a whole lane, H hidden, k levels of a message, L levels of an
encoder, the embeddings among them, j levels of one chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bridge.communicator import BridgeReceiver, Crossing
from bridge.plan import BridgePlan


def split_levels(rows: Tensor, links: Sequence[Sequence[int]]) -> list[Tensor]:
    """Rows of all levels (N, L·H) -> for each link its levels, (N, k·H); differentiable.

    links: the levels of each link; each level is on one link.
    Raises ValueError when the width is not a multiple of the number of levels.
    """
    if len(links) == 1:
        return [rows]
    num_levels = sum(len(levels) for levels in links)
    if rows.shape[1] % num_levels:
        raise ValueError(f"rows of {rows.shape[1]} numbers are not {num_levels} levels in a row")
    split = rows.unflatten(1, (num_levels, -1)).unbind(1)
    return [torch.cat([split[level] for level in levels], dim=1) for levels in links]


def take_chunk(rows: Tensor, chunks: Sequence[int], chunk: int) -> Tensor:
    """Rows of a message (n, k·H) -> the levels of one chunk, (n, j·H); differentiable.

    chunks: ascending, the chunk that needs each of the k levels.
    """
    if chunks.count(chunk) == len(chunks):
        return rows
    width = rows.shape[1] // len(chunks)
    return rows.narrow(1, chunks.index(chunk) * width, chunks.count(chunk) * width)


@dataclass
class _Held:
    """The rows of a microbatch, the chunks that have yet to take theirs, and gradients by chunk."""

    rows: Tensor
    positions: Tensor
    chunks: tuple[int, ...]
    waiting: set[int]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def _forward(self, chunk: int, anchor: Tensor) -> Tensor:
        return take_chunk(self.rows.detach(), self.chunks, chunk).contiguous()

    def _backward(self, chunk: int, gradient: Tensor) -> None:
        self.gradients[chunk] = gradient
        if self.gradients.keys() == set(self.chunks):
            whole = torch.cat([self.gradients[c] for c in sorted(self.gradients)], dim=1)
            self.gradients.clear()
            torch.autograd.backward(self.rows, whole)


class LevelReceiver:
    """Hands a receiver's rows to the chunks of its rank that need them.

    chunks: ascending, the chunk that needs each of a message's levels. Chunks run at different
    times, but one message brings the rows of all chunks and one returns their gradients. So rows
    are kept until every chunk has taken its levels, the graph is cut before each chunk, and the
    gradients leave after the last chunk's backward.
    """

    def __init__(self, receiver: BridgeReceiver, chunks: Sequence[int]) -> None:
        self.receiver, self.end = receiver, receiver.end
        self.chunks = tuple(chunks)
        self._held: dict[int, _Held] = {}
        # Puts each chunk's rows into a graph of their own.
        self._anchor = torch.zeros((), device=receiver.end.device, requires_grad=True)

    def begin(self, plans: Sequence[BridgePlan], forward_only: bool = False) -> None:
        """Start a step of ``len(plans)`` microbatches; posts the first receives."""
        self.receiver.begin(plans, forward_only)

    def receive(self, microbatch: int, chunk: int) -> tuple[Tensor, Tensor]:
        """Return the levels of one chunk (n, j·H) and the rows' local positions (n,) int64.

        Every chunk in ``chunks`` calls it once per microbatch. A collective if the receiver's is.
        """
        if microbatch not in self._held:
            rows, positions = self.receiver.receive(microbatch)
            self._held[microbatch] = _Held(rows, positions, self.chunks, set(self.chunks))
        held = self._held[microbatch]
        held.waiting.remove(chunk)
        if not held.waiting:
            del self._held[microbatch]
        if len(set(self.chunks)) == 1 or not held.rows.requires_grad:
            return take_chunk(held.rows, self.chunks, chunk), held.positions
        return Crossing.apply(self._anchor, held, chunk), held.positions

    def finish(self) -> None:
        """Wait until all gradients have left; call it after the module's schedule."""
        assert not self._held, "rows arrived that a chunk never took"
        self.receiver.finish()
