"""The texts and items that a rank needs of a step: who decodes them, and how they are packed.

The ranks of an encoder lane on one host need the same items, those of a language lane the same
texts. One of them decodes each and hands it to the others.
"""

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bridge import assign_items
from data.batch import PackedLane, pack_lane, queries_of, read_items
from data.decoding import Decoding, Task
from data.index.reader import SampleReader, plans_of_items
from data.loader import LoadedStep
from data.modalities.processor import WireForm
from data.worker_process import ITEM, TEXT
from mimo.config.schema import Recipe
from mimo.model.step_plan import PlannedMicrobatch, StepPlan
from mimo.parallel.connections import SHARED_MEMORY, Host, find_host
from mimo.parallel.grids import LANGUAGE, Coords, Layout

logger = logging.getLogger(__name__)

_MIB = 2**20
_TOKEN_BYTES = 20  # of a text's arrays
_TRIES_PER_TIMEOUT = 4  # a worker that hangs twice is noticed before other ranks give up


def open_decoding(
    recipe: Recipe, layout: Layout, rank: int, readers: Sequence[SampleReader]
) -> Decoding:
    """Decode by the recipe's `data` keys; every rank of the world calls it."""
    data, host = recipe.data, find_host()
    workers = data.workers
    if workers is None:  # a rank's threads need a core, too
        workers = max(0, host.cores_per_rank - 1)
    logger.info("decodes in up to %d workers; ranks of this host: %s", workers, host.ranks)
    return decoding_of(
        readers,
        layout,
        rank,
        host,
        workers,
        ahead_bytes=data.prefetch_mib * _MIB,
        worker_seconds=recipe.bridge.timeout_seconds / _TRIES_PER_TIMEOUT,
        peer_seconds=recipe.bridge.timeout_seconds,
    )


def decoding_of(
    readers: Sequence[SampleReader],
    layout: Layout,
    rank: int,
    host: Host | None = None,
    num_workers: int = 0,
    ahead_bytes: int = 0,
    worker_seconds: float = 150.0,
    peer_seconds: float = 600.0,
) -> Decoding:
    """Decode for a rank of a layout. host: None for a rank that decodes alone, in its process."""
    ranks = (rank,) if host is None else host.ranks
    shares = any(len(sharers(layout, rank, ranks, name)) > 1 for name in layout.modules_of(rank))
    return Decoding(
        readers,
        functools.partial(tasks_of_step, layout=layout, rank=rank, host_ranks=ranks),
        rank,
        root=_root(host, ahead_bytes) if host is not None and (num_workers or shares) else None,
        job="" if host is None else host.job,
        num_workers=num_workers,
        ahead_bytes=ahead_bytes,
        worker_seconds=worker_seconds,
        peer_seconds=peer_seconds,
    )


def sharers(layout: Layout, rank: int, host_ranks: Sequence[int], module: str) -> list[int]:
    """Return the ranks of a host that need the same items or texts of a module as ``rank``."""
    grid = layout.grids[module]
    lane, stages = grid.coords(rank).dp, range(grid.pp if module == LANGUAGE else 1)
    places = {other: grid.coords(other) for other in host_ranks if other in grid.ranks}
    ranks = [other for other, at in places.items() if at.dp == lane and at.pp in stages]
    return ranks if rank in ranks else []  # a later stage of an encoder needs none


def _root(host: Host, ahead_bytes: int) -> Path:
    """Return the parent of the handover folder, the same on all ranks of a host."""
    needed = len(host.ranks) * max(ahead_bytes, 64 * _MIB)
    if host.free_bytes >= needed:
        return SHARED_MEMORY
    other = Path(tempfile.gettempdir())
    logger.warning(
        "%s has %d MiB free, %d ranks of this host may need %d MiB: decoded data are handed over "
        "through %s, which is slower on a disk; start the container with a larger --shm-size, or "
        "lower data.prefetch_mib",
        SHARED_MEMORY,
        host.free_bytes // _MIB,
        len(host.ranks),
        needed // _MIB,
        other,
    )
    return other


def tasks_of_step(
    step: int,
    microbatches: Sequence[PlannedMicrobatch],
    readers: Sequence[SampleReader],
    path_of: Callable[[str], Path],
    *,
    layout: Layout,
    rank: int,
    host_ranks: Sequence[int],
) -> Iterator[Task]:
    """Yield the texts and items that this rank needs of a step, in order of use.

    path_of: name -> file in which it is handed over. Ranks of a host that need the same text or
    item share the work by cost.
    """
    ranks_of = {name: sharers(layout, rank, host_ranks, name) for name in layout.modules_of(rank)}
    loads = {module: np.zeros(len(ranks), np.int64) for module, ranks in ranks_of.items()}
    for m, planned in enumerate(microbatches):
        samples = planned.samples
        for module, ranks in ranks_of.items():
            if not ranks:
                continue
            lane = layout.grids[module].coords(rank).dp
            if module == LANGUAGE:
                kind, number = TEXT, samples.samples_of_lane(lane)
                sample, address, cost = number, samples.sample[number], samples.length[number]
                sizes = (cost * _TOKEN_BYTES).tolist()
            else:
                kind, number = ITEM, planned.items[module].of_lane(lane)
                sample, address = samples.item_sample[number], samples.item[number]
                cost = samples.item_cost[number]
                wires = [readers[0].processors[modality].wire for modality in samples.media]
                patch_bytes = np.array([wire.width * wire.dtype.itemsize for wire in wires])
                item_bytes = zip(
                    plans_of_items(readers, samples.source[sample], address),
                    patch_bytes[samples.item_media[number]].tolist(),
                    strict=True,
                )
                sizes = [plan.num_patches * per_patch for plan, per_patch in item_bytes]
            sharer = assign_items(cost, len(ranks), loads[module])
            np.add.at(loads[module], sharer, cost)
            source = samples.source[sample]
            columns = (values.tolist() for values in (number, sample, source, address, sharer))
            for n, i, s, at, by, num_bytes in zip(*columns, sizes, strict=True):
                yield Task(
                    step=step,
                    reader=readers[s],
                    kind=kind,
                    microbatch=m,
                    number=n,
                    sample=i,
                    source=s,
                    address=at,
                    by=ranks[by],
                    num_bytes=num_bytes,
                    path=path_of(f"{m}.{kind}.{n}"),
                    shared=len(ranks) > 1,
                )


@dataclass(frozen=True)
class EncoderItems:
    """One encoder lane's items of one global microbatch.

    patches: the form and the patches (P, W) of each item, after an empty one (0, W), on the
        encoder's first stage; else None.
    grids: (I, 3) int64.
    """

    patches: list[tuple[WireForm, Tensor]] | None
    grids: np.ndarray


def pack_language(
    loaded: LoadedStep,
    plan: StepPlan,
    readers: Sequence[SampleReader],
    lane: int,
    pad_token_id: int,
) -> list[PackedLane]:
    """Pack the microbatches of one language lane."""
    packed = []
    for m, planned in enumerate(plan.microbatches):
        samples = planned.samples
        of_lane = slice(*np.searchsorted(samples.lane, (lane, lane + 1)).tolist())
        bounds = np.arange(of_lane.start, of_lane.stop + 1)
        cuts = np.searchsorted(samples.item_sample, bounds).tolist()
        items = slice(cuts[0], cuts[-1])
        source = samples.source[samples.item_sample[items]]
        plans = plans_of_items(readers, source, samples.item[items])
        by_sample = [plans[first - cuts[0] : last - cuts[0]] for first, last in pairwise(cuts)]
        # A blanked sample keeps its placeholders but has no items: plain text positions.
        encoded = [
            read_items(loaded.encoded[m][i], parts)
            for i, parts in zip(bounds[:-1].tolist(), by_sample, strict=True)
        ]
        by_sample = [[part for part in parts if not part.is_output] for parts in by_sample]
        packed.append(
            pack_lane(
                encoded,
                [[part.row_grid for part in parts] for parts in by_sample],
                samples.loss_tokens[of_lane],
                int(samples.lane_tokens[lane]),
                pad_token_id,
                samples.segment_length[of_lane],
                samples.packed,
                [[part.time_step for part in parts] for parts in by_sample],
                [
                    (samples.media[kind], part.grid)
                    for kind, part in zip(samples.item_media[items].tolist(), plans, strict=True)
                    if not part.is_output
                ],
                queries_of(samples, items, plans),
            )
        )
    return packed


def gather_items(
    loaded: LoadedStep,
    plan: StepPlan,
    readers: Sequence[SampleReader],
    encoder: str,
    coords: Coords,
    form: WireForm,
) -> list[EncoderItems]:
    """Gather a lane's items per microbatch, in plan order. form: for a lane without items."""
    gathered = []
    for m, planned in enumerate(plan.microbatches):
        samples, number = planned.samples, planned.items[encoder].of_lane(coords.dp)
        source, item = samples.source[samples.item_sample[number]], samples.item[number]
        patches = None
        if coords.pp == 0:
            nothing = torch.from_numpy(np.zeros((0, form.width), form.dtype))
            items = zip(source.tolist(), item.tolist(), strict=True)
            sent = [(readers[s].media(i).wire, loaded.patches[m][s, i]) for s, i in items]
            patches = [(form, nothing), *sent]
        grids = [part.grid for part in plans_of_items(readers, source, item)]
        gathered.append(EncoderItems(patches, np.array(grids, np.int64).reshape(-1, 3)))
    return gathered
