"""What a rank needs of a step, and which rank of its host decodes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bridge import assign_items
from data.index.reader import SampleReader, UnreadableSample, plans_of_items
from data.worker_process import ITEM, TEXT
from mimo.layout.grids import LANGUAGE
from mimo.step.decoding import Decoding
from mimo.step.plan import PlannedMicrobatch

_TOKEN_BYTES = 20  # of a text's arrays


@dataclass
class Task:
    """One text or item to decode.

    number, sample: its number, and its sample's, in the microbatch. address: its number in its
    index. by: the rank that decodes it. num_bytes: about so many. path: of the file in which a
    worker or another rank hands it over. ends: how workers ended that were at it.
    """

    step: int
    reader: SampleReader
    kind: str
    microbatch: int
    number: int
    sample: int
    source: int
    address: int
    by: int
    num_bytes: int
    path: Path
    shared: bool
    ends: list[str] = field(default_factory=list)

    def error(self, reason: str) -> UnreadableSample:
        """What is said when it cannot be decoded; names shard, key and item."""
        index, sample, file = self.reader.index, self.address, None
        if self.kind == ITEM:
            sample = index.sample_of_item(self.address)
            file = index.files_of_part(self.address)[0] - index.files_of_sample(sample).start
        return UnreadableSample(index.shard_of(sample), index.key(sample), file, reason)


def tasks_of_step(
    step: int,
    prefix: str,
    microbatches: Sequence[PlannedMicrobatch],
    readers: Sequence[SampleReader],
    decoding: Decoding,
) -> Iterator[Task]:
    """All texts and items that this rank needs, in order of use. prefix: of the names of files.

    What several ranks of the host need is shared out by its cost, equally on all of them.
    """
    layout, rank = decoding.layout, decoding.rank
    sharers = {module: decoding.sharers(module) for module in layout.modules_of(rank)}
    loads = {module: np.zeros(len(ranks), np.int64) for module, ranks in sharers.items()}
    for m, planned in enumerate(microbatches):
        samples = planned.samples
        for module, ranks in sharers.items():
            if not ranks:
                continue
            lane = layout.grids[module].coords(rank).dp
            if module == LANGUAGE:
                kind, number = TEXT, samples.samples_of_lane(lane)
                sample, address, cost = number, samples.sample[number], samples.length[number]
            else:
                kind, number = ITEM, planned.encoders[module].of_lane(lane)
                sample, address = samples.item_sample[number], samples.item[number]
                cost = samples.item_cost[number]
            sharer = assign_items(cost, len(ranks), loads[module])
            np.add.at(loads[module], sharer, cost)
            source = samples.source[sample]
            if kind == TEXT:
                sizes = (cost * _TOKEN_BYTES).tolist()
            else:
                media = [samples.media[one] for one in samples.item_media[number].tolist()]
                pairs = zip(media, plans_of_items(readers, source, address), strict=True)
                wires = {one: readers[0].processors[one].wire for one in set(media)}
                sizes = [
                    math.prod(part.grid) * wires[one].width * wires[one].dtype.itemsize
                    for one, part in pairs
                ]
            columns = (own.tolist() for own in (number, sample, source, address, sharer))
            for n, i, s, at, by, num_bytes in zip(*columns, sizes, strict=True):
                path = decoding.folder / f"{prefix}.{step}.{m}.{kind}.{n}"
                own = readers[s], kind, m, n, i, s, at, ranks[by], num_bytes, path, len(ranks) > 1
                yield Task(step, *own)
