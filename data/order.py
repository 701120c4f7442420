"""The order of samples: a pure function of (seed, position), the same on any number of ranks.

Positions 0, 1, 2, ... count samples of the whole run. They are cut into global blocks of `block`
positions; each global block belongs to one source, drawn by weight. A source hands out its samples
epoch after epoch, and in an epoch its own blocks of `block` neighbouring samples come in a random
order. Samples inside a block stay together and in order, so reading a shard stays local.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_CHUNK = 4096  # global blocks per chunk of cached counts
_CACHED_EPOCHS = 8  # permutations kept: a source is rarely in more than two epochs at once
_SOURCE_STREAM, _EPOCH_STREAM = 1, 2


def mix64(values: np.ndarray, *salts: int) -> np.ndarray:
    """uint64 (n,) -> uint64 (n,): a well mixed hash of each value and all salts (splitmix64).

    A hash of our own, because NumPy does not promise equal random streams across its versions, and
    a resumed run must see the same order. Source: Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", 2014.
    """
    state = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for salt in salts:
            state = _finish(state + np.uint64(salt % 2**64) + np.uint64(0x9E3779B97F4A7C15))
        return _finish(
            state + (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        )


def _finish(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleOrder:
    """Which sample of which source is at a position of the run.

    num_samples: samples per source. weights: relative share of each source, 0 turns it off.
    seed: any integer. block: samples that stay together; shuffling is done on blocks.

    Raises ValueError for weights or counts that cannot work.
    """

    def __init__(
        self, num_samples: Sequence[int], weights: Sequence[float], seed: int, block: int
    ) -> None:
        self.num_samples = [int(count) for count in num_samples]
        self.weights = np.array(weights, dtype=np.float64)
        self.seed, self.block = int(seed), int(block)
        self._check()
        self._shares = np.cumsum(self.weights / self.weights.sum())
        # Rounding may leave the last share below 1: the last source that can be drawn takes the
        # rest.
        self._last_source = int(np.flatnonzero(self.weights)[-1])
        # _blocks_before[c] (num_sources,): global blocks of each source in the chunks before chunk
        # c.
        self._blocks_before = [np.zeros(len(self.num_samples), dtype=np.int64)]
        self._permutations: OrderedDict[tuple[int, int], tuple[np.ndarray, int]] = OrderedDict()

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions int (n,), from 0 -> (source int64 (n,), sample int64 (n,) inside that source).

        Any order, repeated or not: an answer does not depend on what was asked before.
        Raises ValueError for a negative position.
        """
        positions = np.asarray(positions, dtype=np.int64).reshape(-1)
        if len(positions) and positions.min() < 0:
            raise ValueError(f"position {positions.min()} is negative: positions count from 0")
        blocks, inverse = np.unique(positions // self.block, return_inverse=True)
        sources, ordinals = self._locate_blocks(blocks)
        source = sources[inverse]
        place = (
            ordinals[inverse] * self.block + positions % self.block
        )  # in the source's own stream
        sample = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(source):
            chosen = source == number
            sample[chosen] = self._samples_of(int(number), place[chosen])
        return source, sample

    def _check(self) -> None:
        problems: list[str] = []
        if not self.num_samples or len(self.num_samples) != len(self.weights):
            problems.append(
                f"{len(self.num_samples)} sources but {len(self.weights)} weights: need one weight "
                "per source"
            )
        elif (
            not np.isfinite(self.weights).all() or self.weights.min() < 0 or self.weights.sum() <= 0
        ):
            problems.append(
                f"weights are {self.weights.tolist()}: need at least one above 0, none below"
            )
        else:
            problems.extend(
                f"source {number} has {count} samples: need at least 1, or weight 0"
                for number, count in enumerate(self.num_samples)
                if count < 1 and self.weights[number] > 0
            )
        if self.block < 1:
            problems.append(f"block is {self.block}: need at least 1")
        if problems:
            raise ValueError("sample order: " + "; ".join(problems))

    def _source_of(self, blocks: np.ndarray) -> np.ndarray:
        """Source of each global block: a pure function of (seed, block number)."""
        draws = (mix64(blocks, self.seed, _SOURCE_STREAM) >> np.uint64(11)).astype(
            np.float64
        ) / 2.0**53
        return np.minimum(np.searchsorted(self._shares, draws, side="right"), self._last_source)

    def _locate_blocks(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Global blocks (n,), ascending -> (source (n,), earlier blocks of that source (n,))."""
        sources = np.empty(len(blocks), dtype=np.int64)
        ordinals = np.empty(len(blocks), dtype=np.int64)
        chunks = blocks // _CHUNK
        for chunk in np.unique(chunks):
            asked = chunks == chunk
            inside = blocks[asked] - chunk * _CHUNK
            all_sources = self._source_of(np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK))
            before = self._count_before(int(chunk))
            sources[asked] = all_sources[inside]
            counts = np.empty(_CHUNK, dtype=np.int64)
            for number in range(len(self.num_samples)):
                of_source = all_sources == number
                counts[of_source] = before[number] + np.arange(of_source.sum())
            ordinals[asked] = counts[inside]
        return sources, ordinals

    def _count_before(self, chunk: int) -> np.ndarray:
        while len(self._blocks_before) <= chunk:
            start = (len(self._blocks_before) - 1) * _CHUNK
            counts = np.bincount(
                self._source_of(np.arange(start, start + _CHUNK)), minlength=len(self.num_samples)
            )
            self._blocks_before.append(self._blocks_before[-1] + counts)
        return self._blocks_before[chunk]

    def _samples_of(self, source: int, places: np.ndarray) -> np.ndarray:
        """Samples at these places of a source's endless stream of epochs."""
        count = self.num_samples[source]
        epochs, rest = np.divmod(places, count)
        samples = np.empty(len(places), dtype=np.int64)
        by_epoch = np.argsort(epochs, kind="stable")
        cuts = np.flatnonzero(np.diff(epochs[by_epoch])) + 1
        for chosen in np.split(by_epoch, cuts):  # a tiny source has very many epochs: no full scans
            place = rest[chosen]
            order, short_slot = self._permutation(source, int(epochs[chosen[0]]))
            # One block may be short; what comes after it is shifted by what it lacks.
            missing = len(order) * self.block - count
            behind = place >= (short_slot + 1) * self.block - missing
            slot, inside = np.divmod(place + missing * behind, self.block)
            samples[chosen] = order[slot] * self.block + inside
        return samples

    def _permutation(self, source: int, epoch: int) -> tuple[np.ndarray, int]:
        """(blocks of a source in the order of an epoch, slot of the maybe short last one)."""
        key = (source, epoch)
        entry = self._permutations.get(key)
        if entry is None:
            num_blocks = -(-self.num_samples[source] // self.block)
            hashes = mix64(np.arange(num_blocks), self.seed, _EPOCH_STREAM, source, epoch)
            order = np.argsort(hashes, kind="stable")
            entry = order, int(np.flatnonzero(order == num_blocks - 1)[0])
            self._permutations[key] = entry
            while len(self._permutations) > _CACHED_EPOCHS:
                self._permutations.popitem(last=False)
        return entry
