"""The global batches of a split, one after another, as one rank sees them.

All ranks make the same plan, and each reads its part. All ranks skip what one of them cannot read.

The training thread neither reads, plans nor packs. It only waits, and takes part in the one sum
over all ranks per step. While it works on step k, background threads do this:

    prepare step k + 1   planned without its unusable samples, packed, on its way to the device
    read step k + 2      decoded and tokenized by the loader, and what follows as far as memory goes

The sum that carries the loss of step k also carries the unreadable samples of step k + 2.
No background thread ever waits for another thread, so none can hang.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from data.decoding import Decoding
from data.loader import LoadedStep, StepLoader
from data.packing import Used
from mimo.checkpoint.reading import from_rank_0
from mimo.config.schema import Recipe
from mimo.device import Staging, copy_stream, local_device, send
from mimo.families.registry import GENERAL
from mimo.model.dataset import Dataset
from mimo.model.decoding import gather_items, pack_language
from mimo.model.inputs import Inputs
from mimo.model.modules import MimoModel
from mimo.model.outputs import output_planner
from mimo.model.step_plan import StepFlops, StepPlan, pads_samples, step_planner
from mimo.parallel.grids import LANGUAGE
from mimo.parallel.groups import Topology
from mimo.runtime.signals import EarlyStop
from mimo.train.anomalies import publish_bad_sample

logger = logging.getLogger(__name__)

STEP = "step"  # what messages call a batch that is trained on


@dataclass(frozen=True)
class RankBatch:
    """The input of this rank's modules in one step, on its device.

    inputs: from `MimoModel.stage`. name, sample_keys: for messages; the keys are those of
    one microbatch, or the first of them. flops: by module, over all ranks, where they are counted.
    """

    name: str
    plan: StepPlan
    inputs: Inputs
    sample_keys: Callable[..., list[str]]
    flops: dict[str, float]


@dataclass(frozen=True)
class PreparedBatch:
    """A batch that is prepared in the background.

    used: the samples of the order up to its end. unusable: (data source, sample) of each sample
    that is skipped, with its number in the step.
    """

    used: Used
    unusable: dict[tuple[int, int], int]
    batch: Future[tuple[RankBatch, Staging]]


class Batches:
    """The batches of ``steps`` in order; a context manager that every rank of the world enters.

    For each batch call `next`, then, when nothing holds the batch any more, `read_ahead` and
    `sum_over_world`.
    name: what messages call one batch, such as "step". early_stop: what ranks agree on with each
    sum. used: the samples of the order before the first batch; later, those up to the last batch
    that `next` returned. num_prepared: how many batches are prepared while another is in use, 1 or
    0; the one after these is read meanwhile, and more of what follows as ``decoding`` allows.
    prepared: these batches, the next one first.
    """

    def __init__(
        self,
        *,
        name: str,
        recipe: Recipe,
        topology: Topology,
        model: MimoModel,
        early_stop: EarlyStop,
        dataset: Dataset,
        decoding: Decoding,
        steps: range,
        used: Used | None = None,
        num_prepared: int = 0,
        flops: StepFlops | None = None,
    ) -> None:
        self.name, self.steps, self.used = name, steps, used or Used()
        self._dataset, self._model, self._early_stop = dataset, model, early_stop
        self._flops, self._num_prepared = flops, num_prepared
        self._layout, self._rank = topology.layout, topology.rank
        self._media = {name: encoder.media for name, encoder in recipe.encoders.items()}
        self._outputs = {n: output_planner(recipe, n, name) for n in recipe.generators}
        self._planner = step_planner(
            recipe,
            topology.layout,
            dataset,
            # Rank 0 decides: a verdict near the gate's tolerance may differ between machines.
            padded=recipe.language.family == GENERAL and from_rank_0(lambda: pads_samples(recipe)),
            done=(steps.start, self.used),
            links=topology.bridges,
            rank=topology.rank,
        )
        self._loader = StepLoader(self._planner, dataset.readers, decoding, steps.start, steps.stop)
        self._num_unread = len(steps)
        self._read: list[LoadedStep] = []
        self.prepared: deque[PreparedBatch] = deque()
        self._stream = copy_stream()
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="preparer")
        self._waited_seconds = 0.0

    def __enter__(self) -> Self:
        try:
            for _ in range(1 + self._num_prepared):
                self.read_ahead()
            self.sum_over_world(())
        except BaseException:
            self.__exit__()
            raise
        self._waited_seconds = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()
        self._preparer.shutdown(wait=True, cancel_futures=True)

    def next(self) -> RankBatch:
        """Wait for the next batch and return it. Raises what its preparation raised."""
        prepared = self.prepared.popleft()
        with self._waiting():
            batch, staging = prepared.batch.result()
        self.used = prepared.used
        staging.arrive()
        return batch

    def read_ahead(self) -> None:
        """Wait until the samples of the next sum are read, if any. Raises what reading raised."""
        if self._num_unread > 0:
            with self._waiting():
                self._read.append(self._loader.next())
            self._num_unread -= 1

    def sum_over_world[T](self, terms: T) -> T:
        """Sum ``terms`` over all ranks, after `read_ahead`; every rank of the world calls it.

        The sum also carries unreadable samples and early stops. Then the next batch is prepared.
        """
        unusable_flags = [self._report_unusable(loaded) for loaded in self._read]
        sums, stop_flags, unusable_flags = sum_over_world(
            (terms, self._early_stop.flags(), unusable_flags)
        )
        self._early_stop.agree(stop_flags)
        for loaded, flags in zip(self._read, unusable_flags, strict=True):
            unusable = np.flatnonzero(flags > 0).tolist()
            batch = self._preparer.submit(self._prepare, loaded, unusable)
            self.prepared.append(PreparedBatch(loaded.used, loaded.addresses(unusable), batch))
        self._read.clear()
        return sums

    def take_waited_seconds(self) -> float:
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def _prepare(self, loaded: LoadedStep, unusable: Sequence[int]) -> tuple[RankBatch, Staging]:
        """Pack this rank's part of a batch, in the order of its plan; in the background."""
        loaded.release()
        plan = self._planner.finish(loaded.microbatches, unusable)
        dataset, lanes, items, draws = self._dataset, [], {}, {}
        readers = dataset.readers
        for name in self._layout.modules_of(self._rank):
            coords = self._layout.grids[name].coords(self._rank)
            if name == LANGUAGE:
                padding = readers[0].chat.pad_token_id
                lanes = pack_language(loaded, plan, readers, coords.dp, padding)
            elif name in self._outputs:
                draws[name] = self._outputs[name].plan(loaded, plan, readers, coords.dp)
            else:
                form = readers[0].processors[self._media[name]].wire
                items[name] = gather_items(loaded, plan, readers, name, coords, form)
        staging = Staging(self._stream)
        inputs = self._model.stage(plan, lanes, items, draws, staging)

        def sample_keys(microbatch: int, most: int | None = None) -> list[str]:
            return dataset.sample_keys(plan.microbatches[microbatch].samples, most)

        name = f"{self.name} {loaded.step}"
        flops = {} if self._flops is None else self._flops.of(plan)
        return RankBatch(name, plan, inputs, sample_keys, flops), staging

    def _report_unusable(self, loaded: LoadedStep) -> np.ndarray:
        """Return (n,) fp64: for each sample of a step, 1 if this rank could not read it."""
        flags = np.zeros(loaded.num_samples)
        for number, bad in loaded.unusable.items():
            flags[number] = 1.0
            logger.warning("skipped %s", bad)
            if self.name == STEP:
                publish_bad_sample(loaded.step, number, self._rank, bad)
        return flags

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._waited_seconds += time.perf_counter() - started


def sum_over_world[T](terms: T) -> T:
    """Sum every number of a tree over all ranks, in fp64; every rank calls it.

    terms: a tree of dataclasses, dicts, lists and tuples of the same shape on all ranks. Its leaves
    are numbers and arrays (n,) of the host, and tensors () or (n,) of the device. Returns it with
    numbers and fp64 arrays. On a device the host waits once, for all sums together.
    """
    leaves, structure = tree_flatten(terms)
    parts = [
        np.zeros(leaf.numel())
        if isinstance(leaf, Tensor)
        else np.atleast_1d(np.asarray(leaf, np.float64))
        for leaf in leaves
    ]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    if not ends or not ends[-1]:
        return terms
    total = send(torch.from_numpy(np.concatenate(parts)), local_device())
    for end, leaf in zip(ends, leaves, strict=True):
        if isinstance(leaf, Tensor):
            total[end - leaf.numel() : end] = leaf
    dist.all_reduce(total)
    sums = np.split(np.array(total.tolist()), ends[:-1])
    pairs = zip(leaves, sums, strict=True)
    results = [part if getattr(leaf, "ndim", 0) else part.item() for leaf, part in pairs]
    return tree_unflatten(results, structure)
