"""Which stage of the language model needs which feature level of an encoder, in pure integers.

Level 0 is the embeddings, for the first layer's input. Level k is added after the k-th layer
(DeepStack), so it goes to the pipeline stage, and within it to the chunk, that owns that layer.
All levels for one stage travel in the same messages: a `Link`.
"""

from __future__ import annotations

from dataclasses import dataclass

_REPEATS = 4  # of the schedule's pattern, including its beginning and its end


@dataclass(frozen=True)
class Link:
    """The bridge between an encoder and one stage of the language model that needs its rows.

    levels: ascending; their rows are side by side in one message. chunks: for each level, the
    chunk of the stage that needs it, ascending.
    """

    encoder: str
    stage: int = 0
    levels: tuple[int, ...] = (0,)
    chunks: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        """Its name in messages to users."""
        if self.levels == (0,) and self.stage == 0:
            return self.encoder
        return f"{self.encoder} (levels {', '.join(map(str, self.levels))})"


def links_of(encoder: str, pp: int, vpp: int, num_layers: int, num_levels: int) -> tuple[Link, ...]:
    """The links for the embeddings and ``num_levels`` further levels, in order of their stages.

    The layers are split evenly over pp stages of vpp chunks each, as Megatron splits them: chunk c
    of stage s is the (c·pp + s)-th part. There must be a layer for every level.
    """
    assert num_levels <= num_layers, f"{num_levels} levels for {num_layers} layers"
    per_chunk = max(1, num_layers // (pp * vpp))
    # A number of layers that does not divide evenly is refused elsewhere; it must not fail here.
    parts = [min(layer // per_chunk, pp * vpp - 1) for layer in range(num_levels)]
    stages, chunks = [0, *(part % pp for part in parts)], [0, *(part // pp for part in parts)]
    links = []
    for stage in sorted(set(stages)):
        levels = [level for level, own in enumerate(stages) if own == stage]
        links.append(Link(encoder, stage, tuple(levels), tuple(chunks[own] for own in levels)))
    return tuple(links)


def minimum_run_ahead(pp: int, vpp: int, microbatches: int) -> int:
    """Microbatches a disjoint encoder must have sent ahead before it waits for a gradient.

    With fewer, both sides wait for each other: the encoder for the gradients of a microbatch, the
    language model for the rows of a later one. The number is found by walking the order in which
    Megatron's schedule (1F1B, or interleaved with `vpp` chunks) runs the first stage. Its first
    chunk takes a microbatch's embeddings when it runs forward, and returns gradients after it has
    run backward. It takes rows before all other stages and chunks that need levels, and returns
    gradients after them, so only the first chunk matters.
    """
    # The order repeats every pp microbatches; after a few repeats nothing new happens.
    microbatches = min(microbatches, _REPEATS * pp)
    table = [
        chunk
        for first in range(0, microbatches, pp)
        for chunk in range(vpp)
        for _ in range(first, min(first + pp, microbatches))
    ]
    behind = pp - 1
    warmup = min(behind if vpp == 1 else behind * 2 + (vpp - 1) * pp, len(table))
    received = table[:warmup].count(0)
    returned = needed = 0
    for step, chunk in enumerate(table):
        if warmup + step < len(table):
            received += table[warmup + step] == 0
        if chunk == vpp - 1:  # backward runs the chunks in reverse
            needed = max(needed, received - 1 - returned)
            returned += 1
    return needed
