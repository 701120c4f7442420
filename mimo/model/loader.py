"""Reads what this rank owns of each step, ahead of use: a stream of items and texts in that order.

A rank needs the items of its lane of each encoder that it owns and no others, a language rank the
texts of its lane. What several ranks of a host need, one of them decodes. A thread gives the work
to worker processes, or does it itself; it waits for them and for other ranks, never for a thread.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.batch import PackedLane, pack_lane
from data.index.reader import SampleReader, UnreadableSample, plans_of_items
from data.index.samples import SkippedSample
from data.modalities.processor import WireForm
from data.packing import Used
from data.text.chat import EncodedSample
from data.worker_process import TEXT
from mimo.model.crew import Crew, Task, tasks_of_step
from mimo.model.decoding import Decoding, read_arrays
from mimo.model.step_plan import PlannedMicrobatch, StepPlan, StepPlanner, first_samples
from mimo.parallel.grids import Coords

_MOST_STEPS_AHEAD = 8  # beyond the next, however small they are
_POLL_SECONDS = 0.005  # between two looks for a file of another rank
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class EncoderItems:
    """One encoder lane's items of one global microbatch.

    patches: an empty part (0, W), then those of each item (P, W), with the forms in which they are
        sent, on the encoder's first stage; else None.
    grids: (I, 3) int64.
    """

    patches: list[tuple[WireForm, Tensor]] | None
    grids: np.ndarray


@dataclass
class LoadedStep:
    """What this rank has read for a step, before it is known which samples are unusable.

    used: the samples of the order that are used once the step is done.
    encoded: per microbatch, samples by their number in it.
    patches: per microbatch, items (P, W) by data source and number in its index.
    unusable: sample numbers in the step that this rank could not read, with what is wrong.
    handed_over: files that this rank has made for others.
    """

    step: int
    microbatches: list[PlannedMicrobatch]
    used: Used
    encoded: list[dict[int, EncodedSample]] = field(default_factory=list)
    patches: list[dict[tuple[int, int], Tensor]] = field(default_factory=list)
    unusable: dict[int, SkippedSample] = field(default_factory=dict)
    handed_over: list[Path] = field(default_factory=list)

    def release(self) -> None:
        """Remove the files for other ranks of this host; all ranks have loaded the step."""
        for path in self.handed_over:
            path.unlink(missing_ok=True)

    @property
    def num_samples(self) -> int:
        """Samples of the step, over all lanes."""
        return sum(m.samples.num_samples for m in self.microbatches)

    def addresses(self, numbers: Collection[int]) -> dict[tuple[int, int], int]:
        """(data source, sample) of samples, given by their numbers in the step, with these."""
        source = np.concatenate([m.samples.source for m in self.microbatches])
        sample = np.concatenate([m.samples.sample for m in self.microbatches])
        return {(int(source[number]), int(sample[number])): number for number in numbers}


@dataclass
class _Loading:
    """A step that is being loaded: what is to be decoded here and by others, and what it holds."""

    loaded: LoadedStep
    todo: deque[Task]
    awaited: deque[Task]
    num_missing: int
    num_bytes: int = 0


class DecoderLate(RuntimeError):
    """Another rank has not decoded what this one needs; ``waits_for`` holds its number."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.waits_for = (rank,)


class StepLoader:
    """Loads steps in order from ``first_step`` on. Close it when done.

    The next step is read whether or not anybody asks for it, and what follows as long as the bytes
    that are decoded and not asked for yet stay below ``decoding.ahead_bytes``.
    """

    def __init__(
        self,
        planner: StepPlanner,
        readers: Sequence[SampleReader],
        decoding: Decoding,
        first_step: int,
        last_step: int,
    ) -> None:
        self.planner = planner
        self.readers = readers
        self.decoding = decoding
        self._prefix = str(decoding.num_loaders)
        decoding.num_loaders += 1
        self._next = first_step
        self._last = last_step
        self._num_left = last_step - first_step
        self._crew = Crew(decoding)
        # Of the steps, their bytes and the error. The thread adds steps, `next` takes them away:
        # so the thread goes through copies of the list.
        self._changed = threading.Condition()
        self._steps: deque[_Loading] = deque()
        self._num_bytes = 0
        self._error: BaseException | None = None
        self._asked: float | None = None  # since when somebody waits
        self._woken, self._waker = Pipe(duplex=False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def next(self) -> LoadedStep:
        """The next step; waits for it if need be. Raises what its reading raised."""
        assert self._num_left, "no steps are left to load"
        self._num_left -= 1
        with self._changed:
            self._asked = time.monotonic()
            self._changed.wait_for(lambda: self._is_complete() or self._error is not None)
            self._asked = None
            if self._error is not None and not self._is_complete():
                raise self._error
            step = self._steps.popleft()
            self._num_bytes -= step.num_bytes
        self._waker.send_bytes(b"a step is gone")
        return step.loaded

    def close(self) -> None:
        """Stop loading; waits for what is being decoded in this process."""
        self._closing = True
        self._waker.send_bytes(b"the end")
        self._thread.join()

    def _is_complete(self) -> bool:
        return bool(self._steps) and self._steps[0].num_missing == 0

    # -------------------------------------------------------------- the thread in the background

    def _run(self) -> None:
        try:
            while not self._closing:
                began = self._begin_one()
                awaits = any(step.awaited for step in list(self._steps))
                pause = 0 if began else _POLL_SECONDS if awaits else _PAUSE_SECONDS
                for task, outcome in self._crew.finished(self._woken, pause):
                    self._keep(task, outcome)
                self._fetch()
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                error.add_note(
                    "no room is left for decoded data: start the container with a larger "
                    "--shm-size, or lower data.prefetch_mib"
                )
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._crew.close()

    def _begin_one(self) -> bool:
        """Begin to decode what is needed next; False if nothing may be, or nobody is free."""
        step = self._step_to_read()
        if step is None or not self._crew.begin(step.todo[0]):
            return False
        self._count_bytes(step, step.todo.popleft().num_bytes)
        return True

    def _step_to_read(self) -> _Loading | None:
        """The first step of which something is to be decoded now; plans further ones if need be."""
        ahead = self.decoding.ahead_bytes
        while True:
            with self._changed:
                held, num_steps = self._num_bytes, len(self._steps)
                for place, step in enumerate(self._steps):
                    if step.todo:
                        fits = held + step.todo[0].num_bytes <= ahead
                        return step if place == 0 or fits else None
            enough = held >= ahead or num_steps > _MOST_STEPS_AHEAD
            if self._next == self._last or (num_steps and enough):
                return None
            planned = self._plan(self._next)
            self._next += 1
            with self._changed:
                self._steps.append(planned)
                self._changed.notify_all()  # it may be complete: a rank may need nothing of it

    def _plan(self, step: int) -> _Loading:
        microbatches = self.planner.microbatches(step)
        loaded = LoadedStep(step, microbatches, self.planner.used_before(step + 1))
        for _ in microbatches:
            loaded.encoded.append({})
            loaded.patches.append({})
        tasks = [*tasks_of_step(step, self._prefix, microbatches, self.readers, self.decoding)]
        todo = deque(task for task in tasks if task.by == self.decoding.rank)
        awaited = deque(task for task in tasks if task.by != self.decoding.rank)
        return _Loading(loaded, todo, awaited, len(tasks))

    def _fetch(self) -> None:
        """Take what other ranks have decoded."""
        for step in list(self._steps):
            while step.awaited:
                task = step.awaited[0]
                if not task.path.exists():
                    # Until somebody waits here, the other rank may be busy with earlier steps.
                    since, limit = self._asked, self.decoding.peer_seconds
                    if step is not self._steps[0] or since is None:
                        return
                    if time.monotonic() - since > limit:
                        late = f"rank {task.by} has not decoded it for this rank within {limit:g} s"
                        raise DecoderLate(str(task.error(late)), task.by)
                    return
                self._have(step, step.awaited.popleft(), read_arrays(task.path))

    def _keep(self, task: Task, outcome: list[np.ndarray] | UnreadableSample) -> None:
        """Keep what was decoded here, or why it cannot be."""
        step = next(one for one in list(self._steps) if one.loaded.step == task.step)
        loaded, arrays = step.loaded, outcome
        if isinstance(arrays, UnreadableSample):
            sample = first_samples(loaded.microbatches)[task.microbatch] + task.sample
            loaded.unusable[sample] = arrays.sample
            arrays = []
        if task.shared:
            loaded.handed_over.append(task.path)
        self._count_bytes(step, -task.num_bytes)
        self._have(step, task, arrays)

    def _have(self, step: _Loading, task: Task, arrays: Sequence[np.ndarray]) -> None:
        """Put decoded arrays in their place; there are none of what cannot be read."""
        loaded, m = step.loaded, task.microbatch
        if task.kind == TEXT:
            length = int(loaded.microbatches[m].samples.length[task.number])
            loaded.encoded[m][task.number] = EncodedSample(*arrays) if arrays else _stand_in(length)
        else:
            for array in arrays:
                loaded.patches[m][task.source, task.address] = torch.from_numpy(array)
        self._count_bytes(step, sum(array.nbytes for array in arrays))
        with self._changed:
            step.num_missing -= 1
            self._changed.notify_all()

    def _count_bytes(self, step: _Loading, num_bytes: int) -> None:
        with self._changed:
            step.num_bytes += num_bytes
            self._num_bytes += num_bytes


def _stand_in(length: int) -> EncodedSample:
    """Tokens in place of a sample that could not be read; it is blanked before anyone uses it."""
    ids = np.zeros(length, np.int64)
    return EncodedSample(ids, ids, np.zeros(length, np.float32), item_offsets=ids[:0])


def pack_language(
    loaded: LoadedStep,
    plan: StepPlan,
    readers: Sequence[SampleReader],
    lane: int,
    pad_token_id: int,
) -> list[PackedLane]:
    """The packed microbatches of one language lane."""
    packed, nothing = [], np.zeros(0, np.int64)
    for m, planned in enumerate(plan.microbatches):
        samples = planned.samples
        mine = slice(*np.searchsorted(samples.lane, (lane, lane + 1)).tolist())
        bounds = np.arange(mine.start, mine.stop + 1)
        cuts = np.searchsorted(samples.item_sample, bounds).tolist()
        items = slice(cuts[0], cuts[-1])
        source = samples.source[samples.item_sample[items]]
        plans = plans_of_items(readers, source, samples.item[items])
        by_sample = [plans[first - cuts[0] : last - cuts[0]] for first, last in pairwise(cuts)]
        encoded = [loaded.encoded[m][i] for i in range(mine.start, mine.stop)]
        packed.append(
            pack_lane(
                # A blanked sample keeps its placeholders but has no items: plain text positions.
                [
                    sample if own else replace(sample, item_offsets=nothing)
                    for sample, own in zip(encoded, by_sample, strict=True)
                ],
                [[part.row_grid for part in own] for own in by_sample],
                samples.loss_tokens[mine],
                int(samples.lane_tokens[lane]),
                pad_token_id,
                samples.segment_length[mine],
                samples.packed,
                [[part.time_step for part in own] for own in by_sample],
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
    """The items of the encoder's lane at ``coords``, microbatch by microbatch, in plan order.

    form: of an item of the encoder's own media, for a lane without items.
    """
    gathered = []
    for m, planned in enumerate(plan.microbatches):
        samples, own = planned.samples, planned.encoders[encoder]
        mine = own.of_lane(coords.dp)
        source, item = samples.source[samples.item_sample[mine]], samples.item[mine]
        patches = None
        if coords.pp == 0:
            nothing = torch.from_numpy(np.zeros((0, form.width), form.dtype))
            own_items = zip(source.tolist(), item.tolist(), strict=True)
            sent = [(readers[s].media(i).wire, loaded.patches[m][s, i]) for s, i in own_items]
            patches = [(form, nothing), *sent]
        grids = [part.grid for part in plans_of_items(readers, source, item)]
        gathered.append(EncoderItems(patches, np.array(grids, np.int64).reshape(-1, 3)))
    return gathered
