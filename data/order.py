"""The order of samples: a pure function of (seed, position), the same on any number of ranks.

Positions 0, 1, 2, ... count samples of the whole run. Sources take turns by weight. A source hands
out its samples epoch after epoch; an epoch permutes blocks of neighbouring samples, so reading a
shard stays local (packing.py). A run may continue with other sources: another mixture then begins,
and each source that stays continues where it stood.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from data.packing import Mixing, permutation

_EPOCH_STREAM = 2
# A small source is shuffled sample by sample. Of a large one, a batch of 512 samples reads 16 runs
# of 32 neighbours, which cost hardly more than 16 samples; an epoch has thousands of them.
_LARGE_SOURCE, _BLOCK_OF_LARGE = 2**16, 32


@dataclass(frozen=True)
class Stream:
    """A source of a mixture: an endless stream of epochs."""

    name: str
    size: int  # samples
    weight: float
    block: int  # samples that stay together
    salt: int  # differs from other sources of the run, and stays while the source stays
    start: int = 0  # samples of the stream before the mixture


@dataclass(frozen=True)
class Mixture:
    """The order of samples from one position on."""

    seed: int
    turn: int  # consecutive positions of one source
    streams: tuple[Stream, ...]
    first: int = 0

    @cached_property
    def _mixing(self) -> Mixing:
        return Mixing([stream.weight for stream in self.streams], self.seed)

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions int64 (n,), from `first` on -> (stream int64 (n,), its sample int64 (n,))."""
        turn, inside = np.divmod(positions - self.first, self.turn)
        stream, earlier = self._mixing.at(turn)
        place = earlier * self.turn + inside
        sample = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(stream).tolist():
            chosen = stream == number
            sample[chosen] = self._samples_of(self.streams[number], place[chosen])
        return stream, sample

    def kind(self) -> tuple[int, int, list[tuple[float, ...]]]:
        """Equal for mixtures that differ only in their first position and the names of sources."""
        streams = [(stream.size, stream.weight, stream.block) for stream in self.streams]
        return self.seed, self.turn, streams

    def places(self, position: int) -> list[int]:
        """How many samples each stream has handed out before ``position``, in all its epochs."""
        turns, inside = divmod(position - self.first, self.turn)
        counts = self._mixing.counts(turns) * self.turn
        counts[self._mixing.at(np.array([turns]))[0]] += inside
        pairs = zip(self.streams, counts.tolist(), strict=True)
        return [stream.start + count for stream, count in pairs]

    def _samples_of(self, stream: Stream, places: np.ndarray) -> np.ndarray:
        """Samples at these places of a stream, counted from the mixture's first position."""
        size, block = stream.size, stream.block
        epochs, rest = np.divmod(stream.start + places, size)
        samples = np.empty(len(places), dtype=np.int64)
        num_blocks = -(-size // block)
        missing = num_blocks * block - size
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            place = rest[chosen]
            order = permutation(num_blocks, self.seed, _EPOCH_STREAM, stream.salt, epoch)
            if missing:  # the last block is short; what comes after it is shifted by what it lacks
                full = (order.slot_of(num_blocks - 1) + 1) * block - missing
                place = place + missing * (place >= full)
            slot, inside = np.divmod(place, block)
            samples[chosen] = order.at(slot) * block + inside
        return samples


class SampleOrder:
    """Maps a position of the run to a source and a sample in it.

    num_samples: samples per source, at least one. weights: relative share of each source. seed: any
    integer. block: samples that stay together; a source has as many positions at a time. Without
    it, blocks are of one sample, or of 32 of a large source, and a turn is one position.
    names: of the sources, for a run that goes on with others.
    """

    def __init__(
        self,
        num_samples: Sequence[int],
        weights: Sequence[float],
        seed: int,
        block: int | None,
        names: Sequence[str] | None = None,
    ) -> None:
        names = [""] * len(num_samples) if names is None else names
        streams = []
        for number, (name, size, weight) in enumerate(
            zip(names, num_samples, weights, strict=True)
        ):
            default = _BLOCK_OF_LARGE if size >= _LARGE_SOURCE else 1
            together = default if block is None else block
            streams.append(Stream(name, int(size), float(weight), together, number))
        turn = 1 if block is None else block
        self._follow((Mixture(int(seed), turn, tuple(streams)),))

    def _follow(self, mixtures: tuple[Mixture, ...]) -> None:
        self.mixtures = mixtures
        self._firsts = np.array([mixture.first for mixture in mixtures])
        self._numbers = [self.numbers_of(mixture) for mixture in mixtures]

    def numbers_of(self, mixture: Mixture) -> np.ndarray:
        """int64 (streams,): the source that each stream of an earlier mixture is; -1 for none."""
        numbers = {(s.salt, s.size): n for n, s in enumerate(self.mixtures[-1].streams)}
        return np.array([numbers.get((s.salt, s.size), -1) for s in mixture.streams])

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions int (n,), from 0 -> (source int64 (n,), sample int64 (n,) inside that source).

        Positions may repeat, in any order. The source is -1 if it is gone, or has another size.
        """
        positions = np.asarray(positions, dtype=np.int64).reshape(-1)
        mixture = np.searchsorted(self._firsts, positions, side="right") - 1
        source, sample = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(mixture).tolist():
            chosen = mixture == number
            stream, sample[chosen] = self.mixtures[number].at(positions[chosen])
            source[chosen] = self._numbers[number][stream]
        return source, sample

    def epochs(self, position: int) -> list[float]:
        """Epochs of each source before ``position`` of the last mixture."""
        last = self.mixtures[-1]
        pairs = zip(last.places(position), last.streams, strict=True)
        return [place / stream.size for place, stream in pairs]

    def after(self, earlier: Sequence[Mixture], end: int) -> "SampleOrder":
        """Return the order that is ``earlier`` up to position ``end``, then that of these sources.

        A source stays if it keeps its name, or else its number and its size (it was moved). It
        continues where it stood; with another size, block or seed it begins an epoch.
        """
        before, now = earlier[-1], self.mixtures[-1]
        kept = _same_sources(before.streams, now.streams)
        places = before.places(end)
        streams, unused = [], max(s.salt for mixture in earlier for s in mixture.streams) + 1
        for number, stream in enumerate(now.streams):
            if (old_number := kept.get(number)) is None:
                streams.append(replace(stream, salt=unused))
                unused += 1
                continue
            old, start = before.streams[old_number], places[old_number]
            if (old.size, old.block, before.seed) != (stream.size, stream.block, now.seed):
                start = -(-start // old.size) * stream.size
            streams.append(replace(stream, salt=old.salt, start=start))
        mixture = replace(now, streams=tuple(streams), first=end)
        order = copy.copy(self)
        if kept == {n: n for n in range(len(before.streams))} and before.kind() == mixture.kind():
            # They may have been moved: names are those of now.
            pairs = zip(before.streams, now.streams, strict=True)
            named = tuple(replace(old, name=new.name) for old, new in pairs)
            order._follow((*earlier[:-1], replace(before, streams=named)))
        else:
            order._follow((*(other for other in earlier if other.first < end), mixture))
        return order


def _same_sources(before: Sequence[Stream], now: Sequence[Stream]) -> dict[int, int]:
    """The sources that stay: their numbers now and before."""
    kept: dict[int, int] = {}
    pairs = [(n, o) for n in range(len(now)) for o in range(len(before))]
    same_name = [(n, o) for n, o in pairs if now[n].name == before[o].name]
    moved = [(n, o) for n, o in pairs if n == o and now[n].size == before[o].size]
    for number, old_number in same_name + moved:
        if number not in kept and old_number not in kept.values():
            kept[number] = old_number
    return kept
