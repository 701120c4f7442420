"""Saving: every rank writes what it owns, before training continues or beside it.

Nothing is gathered. A rank reports how its file ended in a small file beside it; rank 0 waits for
all of these, adds index and manifest, and gives the folder its name.

A thread writes, not a process: it needs neither shared memory nor a fork of a process that has a
device, releases Python's lock, and ends with its rank, so that no killed run publishes.

With `train.async_save` the thread first copies the state beside the next forward and backward
passes: only an update changes it, and waits for the copy (CheckFreq, Mohan et al., FAST 2021).
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from mimo.checkpoint.assets import ASSETS, collect_assets
from mimo.checkpoint.folder import Progress, latest_checkpoint, publish
from mimo.checkpoint.manifest import Sum, write_synced
from mimo.checkpoint.tensors import file_of, write_index, write_pieces
from mimo.config.schema import Recipe
from mimo.device import (
    Timestamp,
    copy_stream,
    copying_to_host,
    host_memory,
    local_device,
    record_time,
    synchronize,
)
from mimo.engines.contract import Module, Piece

_ALIGNED_BYTES = 64  # of a piece's place in staging memory
_EXCHANGE_SECONDS = 0.5  # between two exchanges of ranks that wait for a save
_POLL_SECONDS = 0.01  # between two looks for another rank's file
_EXIT_SECONDS = 10.0  # that a run which ends by an error waits for other ranks' files


class CheckpointFailed(Exception):
    """A checkpoint was not written; names place, reason and the last good checkpoint."""


class _OtherRankFailed(Exception):
    """This rank gives up because of another rank, which reports the reason."""


@dataclass(eq=False)
class _Save:
    """A save in flight.

    since: time on the device at which the pieces had the values to save. begun: rank 0 has made the
    folder. copied: the modules may change. complete: only the final name is missing. done: it is
    over, with ``failure`` if it failed. given_up: other ranks failed.
    """

    progress: Progress
    folder: Path
    pieces: Sequence[Piece] = ()
    since: Timestamp = 0.0
    begun: threading.Event = field(default_factory=threading.Event)
    copied: threading.Event = field(default_factory=threading.Event)
    may_publish: threading.Event = field(default_factory=threading.Event)
    complete: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    num_copied: int = 0
    failure: BaseException | None = None
    thread: threading.Thread | None = None


class Saver:
    """Writes the checkpoints of a run, on one of its ranks; as a context, it ends with the run.

    Every rank calls the same methods in the same order: `begin` and `publish` for each save, `wait`
    at the end. At most one save is in flight. on_progress: called on every rank during a wait
    whenever a file of any rank grows.
    """

    def __init__(self, modules: Mapping[str, Module], checkpoints: Path, recipe: Recipe) -> None:
        self._modules, self._checkpoints, self._recipe = modules, checkpoints, recipe
        self._is_async = recipe.train.async_save
        self._timeout_seconds = recipe.bridge.timeout_seconds
        self._save: _Save | None = None
        self.on_progress: Callable[[], None] = lambda: None
        self._memory, self._stream = host_memory(0), copy_stream("host")
        self._blocked_seconds = 0.0  # for which training was blocked by a save after `begin`
        # The index is a function of the headers of all files; usually they stay the same.
        self._headers, self._index = list[str](), ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """After an error of this rank, let a save in flight end if the other ranks are there."""
        if self._save is not None and self._save.thread is not None:
            timeout, self._timeout_seconds = self._timeout_seconds, _EXIT_SECONDS
            self._save.may_publish.set()
            self._save.thread.join(timeout)

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the save in flight has failed; then all ranks must `wait`."""
        return self._save is not None and self._save.failure is not None

    def begin(self, progress: Progress) -> float:
        """Save the modules as they are now; return the seconds for which training was blocked.

        They include those of `wait_for_copy` and `publish` for the save before. With
        `train.async_save` the modules may be updated after `wait_for_copy`; otherwise all is on
        disk on return. Raises CheckpointFailed, on all ranks, if this save or the one before fails.
        """
        started = time.perf_counter()
        self.wait()
        folder = self._checkpoints / f".step_{progress.step}.partial"
        save = self._save = _Save(progress, folder)
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(folder, ignore_errors=True)  # the rest of an earlier attempt
                folder.mkdir(parents=True)
            except OSError as error:
                save.failure = error
        save.begun.set()
        self._wait_for_all(save, save.begun)
        modules = self._modules.values()
        for module in modules:
            module.wait_param_gather()
        save.pieces = [piece for module in modules for piece in module.pieces("save", True)]
        save.since = record_time()
        if not self._is_async:
            synchronize()  # the thread does not wait for the device's queue
        save.thread = threading.Thread(target=self._run, args=(save,), name="save", daemon=True)
        save.thread.start()
        if not self._is_async:
            self._wait_for_all(save, save.complete)
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return seconds + time.perf_counter() - started

    def wait_for_copy(self, on_progress: Callable[[], None] = lambda: None) -> float:
        """Wait until the modules may be updated; return the seconds. Called before every update.

        on_progress: called whenever more has been copied. A failure makes `has_failed` true.
        """
        save, started = self._save, time.perf_counter()
        if save is None or save.copied.is_set():
            return 0.0
        before = save.num_copied
        while not save.copied.wait(_EXCHANGE_SECONDS):
            if save.num_copied != before:
                before = save.num_copied
                on_progress()
        seconds = time.perf_counter() - started
        self._blocked_seconds += seconds
        return seconds

    def publish(self) -> None:
        """Let the save become a checkpoint; without `train.async_save`, it is one on return."""
        if self._save is not None:
            started = time.perf_counter()
            self._save.may_publish.set()
            if not self._is_async:
                self.wait()
            self._blocked_seconds += time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises CheckpointFailed, on all ranks."""
        if self._save is not None:
            self._wait_for_all(self._save, self._save.done)
            self._save = None

    # ------------------------------------------------------------- in the training's thread

    def _wait_for_all(self, save: _Save, event: threading.Event) -> None:
        """Wait until the event is set on every rank; raises CheckpointFailed on all of them."""
        some_are_behind, done = True, (-1, -1)
        while some_are_behind:
            event.wait(_EXCHANGE_SECONDS)
            size = _size_of(save.folder / file_of(dist.get_rank()))
            before, done = done, (save.num_copied, size)
            state = [not event.is_set(), done != before, save.failure is not None]
            of_any = torch.tensor(state, dtype=torch.int32, device=local_device())
            dist.all_reduce(of_any, dist.ReduceOp.MAX)
            some_are_behind, some_grow, some_failed = map(bool, of_any.tolist())
            if some_grow:
                self.on_progress()
            if some_failed:
                self._fail(save)

    def _fail(self, save: _Save) -> None:
        """Raise why a save failed, the same on all ranks, once none of them writes any more."""
        self._save = None
        save.given_up.set()
        save.may_publish.set()
        if save.thread is not None:
            save.thread.join(self._timeout_seconds)
        failure = save.failure
        kind = "" if isinstance(failure, OSError) else f"{type(failure).__name__}: "
        is_reason = failure is not None and not isinstance(failure, _OtherRankFailed)
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, f"{kind}{failure}" if is_reason else "")
        if dist.get_rank() == 0:
            shutil.rmtree(save.folder, ignore_errors=True)  # it may have filled the disk
        reason = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text)
        good = None
        with suppress(OSError, ValueError):
            good = latest_checkpoint(self._checkpoints)
        last = f"the last good checkpoint is {good}" if good else "there is no good one before it"
        raise CheckpointFailed(
            f"the checkpoint of step {save.progress.step} in {self._checkpoints} was not written: "
            f"{reason}; {last}"
        ) from failure

    # ------------------------------------------------------------------ in the save's thread

    def _run(self, save: _Save) -> None:
        rank = dist.get_rank()
        try:
            if self._is_async:
                with copying_to_host(self._stream, save.since):
                    copies = self._copy_to_host(save)
                save.pieces = copies
            save.copied.set()
            written = write_pieces(save.folder, rank, save.pieces)
            write_synced(_report_path(save.folder, rank), json.dumps(asdict(written)))
            if rank == 0:
                self._finish(save)
        except BaseException as error:
            save.failure = error
            with suppress(OSError):
                write_synced(_report_path(save.folder, rank), json.dumps({"failure": str(error)}))
        save.pieces = ()
        save.copied.set()
        save.complete.set()
        save.done.set()

    def _copy_to_host(self, save: _Save) -> list[Piece]:
        """Return copies of the pieces in memory that is reused from save to save."""
        sizes = [-(-p.values.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for p in save.pieces]
        if len(self._memory) < sum(sizes):
            self._memory = host_memory(sum(sizes))
        copies = []
        for piece, memory in zip(save.pieces, self._memory[: sum(sizes)].split(sizes), strict=True):
            values = memory[: piece.values.nbytes].view(piece.values.dtype)
            values = values.view(piece.values.shape)
            values.copy_(piece.values, non_blocking=True)
            copies.append(replace(piece, values=values))
            save.num_copied += 1
        return copies

    def _finish(self, save: _Save) -> None:
        """Make a checkpoint of the files of all ranks, on rank 0."""
        folder, train = save.folder, self._recipe.train
        sums = [self._wait_for_file(save, rank) for rank in range(dist.get_world_size())]
        for rank in range(len(sums)):
            _report_path(folder, rank).unlink()
        headers = [sum.header for sum in sums]
        known = self._index if self._headers == headers else None
        self._index, self._headers = write_index(folder, len(sums), known), headers
        # First those of the last checkpoint, in case the recipe's folders have since moved.
        before = latest_checkpoint(self._checkpoints)
        if before is not None and (before / ASSETS).is_dir():
            shutil.copytree(before / ASSETS, folder / ASSETS)
        collect_assets(self._recipe, folder / ASSETS)

        def when_complete() -> None:
            save.complete.set()
            save.may_publish.wait()
            if save.given_up.is_set():
                raise _OtherRankFailed

        publish(
            folder,
            save.progress,
            self._recipe.to_yaml(),
            keep=train.keep_checkpoints,
            keep_every=train.keep_every,
            sums={file_of(rank): sum for rank, sum in enumerate(sums)},
            when_complete=when_complete,
        )

    def _wait_for_file(self, save: _Save, rank: int) -> Sum:
        """Wait for the file of a rank while it grows. Raises if that rank fails or is gone."""
        path, last_size, since = save.folder / file_of(rank), -1, time.monotonic()
        while True:
            with suppress(FileNotFoundError):
                report = json.loads(_report_path(save.folder, rank).read_text())
                if "failure" in report:
                    raise _OtherRankFailed
                written = Sum(**report)
                if path.stat().st_size == written.bytes:  # as this machine sees it
                    return written
            size = _size_of(path)
            if size != last_size:
                last_size, since = size, time.monotonic()
            if time.monotonic() - since > self._timeout_seconds:
                raise TimeoutError(
                    f"{path}: rank {rank} has not added to it for {self._timeout_seconds:g} "
                    f"seconds; raise bridge.timeout_seconds or check that rank's disk"
                )
            if save.given_up.wait(_POLL_SECONDS):
                raise _OtherRankFailed


def _size_of(path: Path) -> int:
    """Return a file's size, or 0 without one; must not raise, as other ranks wait for this one."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"
