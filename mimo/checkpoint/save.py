"""Saving."""

from __future__ import annotations

import hashlib
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
from mimo.checkpoint.tensors import Written, file_of, write_index, write_pieces
from mimo.config.schema import Recipe
from mimo.device import (
    Moment,
    copy_stream,
    copying_to_host,
    host_memory,
    local_device,
    moment,
    synchronize,
)
from mimo.engines.contract import Module
from mimo.engines.piece import Piece

_ALIGNED_BYTES = 64  # where a piece begins in staging memory
_TURN_SECONDS = 0.5  # between two exchanges of ranks that wait for a save
_LOOK_SECONDS = 0.01  # between two looks for another rank's file
_LAST_SECONDS = 10.0  # that a run which ends by an error waits for other ranks' files


class CheckpointFailed(Exception):
    """A checkpoint was not written. Says where, why, and which one is the last good one."""


class _OthersFailed(Exception):
    """This rank gives up because of another, which says why."""


@dataclass(eq=False)
class _Save:
    """One save on its way. The thread sets ``copied``, ``complete``, ``done``, maybe ``failure``.

    since: when the pieces were what is to be saved. begun: on the first rank, the folder is there.
    copied: all pieces are, of which num_copied were so far, and may change. complete: all is on
    disk and only the right name is missing. done: it is over. failure: why it is over, if it
    failed. given_up: other ranks failed.
    """

    progress: Progress
    folder: Path
    pieces: Sequence[Piece] = ()
    since: Moment = 0.0
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
    """The checkpoints of a run, on one rank of it; as a context, it ends with the run.

    Every rank of the world calls the same methods in the same order: `begin` and `publish` for each
    save, `wait` at the end. At most one save is in flight.

    gets_on: called on every rank while one waits for a save and a file of it grows on any.
    """

    def __init__(self, modules: Mapping[str, Module], checkpoints: Path, recipe: Recipe) -> None:
        self._modules, self._checkpoints, self._recipe = modules, checkpoints, recipe
        self._patience_seconds = recipe.bridge.timeout_seconds
        self._save: _Save | None = None
        self.gets_on: Callable[[], None] = lambda: None
        self._memory, self._stream = host_memory(0), copy_stream("host")
        self._late_seconds = 0.0  # that training stood still for a save after `begin`
        self._indexed, self._index = "", ""  # headers of all files, and the index made of them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """After an error of this rank, let a save in flight come to its end if others are there."""
        if self._save is not None and self._save.thread is not None:
            patience, self._patience_seconds = self._patience_seconds, _LAST_SECONDS
            self._save.may_publish.set()
            self._save.thread.join(patience)

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the save in flight has; all ranks are then to `wait`."""
        return self._save is not None and self._save.failure is not None

    def begin(self, progress: Progress) -> float:
        """Save the modules as they are now; returns the seconds that this took.

        Those that `wait_for_copy` and `publish` took for the save before are among them: its line
        of metrics was written by then.

        With `train.async_save` they may be trained on at once, but updated only after
        `wait_for_copy`; else all is written on return. Nothing is a checkpoint before `publish`.
        Raises CheckpointFailed, on all ranks, if this save or the one before fails.
        """
        started = time.perf_counter()
        self.wait()
        folder = self._checkpoints / f".step_{progress.step}.partial"
        save = self._save = _Save(progress, folder)
        if dist.get_rank() == 0:
            _make_anew(save)
        save.begun.set()
        self._all_reach(save, save.begun)
        for module in self._modules.values():
            module.settle()
        save.pieces = [p for one in self._modules.values() for p in one.pieces("save", True)]
        save.since = moment()
        if not self._recipe.train.async_save:
            synchronize()  # the thread has no part in the device's queue
        save.thread = threading.Thread(target=self._run, args=(save,), name="save", daemon=True)
        save.thread.start()
        if not self._recipe.train.async_save:
            self._all_reach(save, save.complete)
        seconds, self._late_seconds = self._late_seconds, 0.0
        return seconds + time.perf_counter() - started

    def wait_for_copy(self, gets_on: Callable[[], None] = lambda: None) -> float:
        """Return once the modules may be updated; before every update. No collective.

        gets_on: called while one waits and more has been copied. Returns the seconds.
        Where the copy fails, `has_failed` says so and `wait` why.
        """
        save, started = self._save, time.perf_counter()
        if save is None or save.copied.is_set():
            return 0.0
        before = save.num_copied
        while not save.copied.wait(_TURN_SECONDS):
            if save.num_copied != before:
                before = save.num_copied
                gets_on()
        seconds = time.perf_counter() - started
        self._late_seconds += seconds
        return seconds

    def publish(self) -> None:
        """Let what was begun become a checkpoint; without `train.async_save`, it is on return."""
        if self._save is not None:
            started = time.perf_counter()
            self._save.may_publish.set()
            if not self._recipe.train.async_save:
                self.wait()
            self._late_seconds += time.perf_counter() - started

    def wait(self) -> None:
        """Return once the save in flight, if any, is over.

        Raises CheckpointFailed, on all ranks, if it failed on any of them.
        """
        if self._save is not None:
            self._all_reach(self._save, self._save.done)
            self._save = None

    # ------------------------------------------------------------- in the training's thread

    def _all_reach(self, save: _Save, event: threading.Event) -> None:
        """Wait until the save has come so far on every rank; raises CheckpointFailed on all.

        However long it takes, no rank waits for another in a collective call for long.
        """
        some_are_behind, done = True, (-1, -1)
        while some_are_behind:
            event.wait(_TURN_SECONDS)
            size = _size_of(save.folder / file_of(dist.get_rank()))
            before, done = done, (save.num_copied, size)
            own = [not event.is_set(), done != before, save.failure is not None]
            told = torch.tensor(own, dtype=torch.int32, device=local_device())
            dist.all_reduce(told, dist.ReduceOp.MAX)
            some_are_behind, some_grow, some_failed = map(bool, told.tolist())
            if some_grow:
                self.gets_on()
            if some_failed:
                self._fail(save)

    def _fail(self, save: _Save) -> None:
        """Raise why a save failed, the same on all ranks, once none of them writes any more."""
        self._save = None
        save.given_up.set()
        save.may_publish.set()
        if save.thread is not None:
            save.thread.join(self._patience_seconds)
        own = "" if isinstance(save.failure, _OthersFailed | None) else _told(save.failure)
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, own)
        if dist.get_rank() == 0:
            shutil.rmtree(save.folder, ignore_errors=True)  # it may have filled the disk
        told = "; ".join(f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason)
        raise self._failed(save.progress, told) from save.failure

    def _failed(self, progress: Progress, reason: str) -> CheckpointFailed:
        good = None
        with suppress(OSError, ValueError):
            good = latest_checkpoint(self._checkpoints)
        left = f"the last good checkpoint is {good}" if good else "there is no good one before it"
        return CheckpointFailed(
            f"the checkpoint of step {progress.step} in {self._checkpoints} was not written: "
            f"{reason}; {left}"
        )

    # ------------------------------------------------------------------ in the save's thread

    def _run(self, save: _Save) -> None:
        rank = dist.get_rank()
        try:
            if self._recipe.train.async_save:
                with copying_to_host(self._stream, save.since):
                    copies = self._staged(save)
                save.pieces = copies
            save.copied.set()
            self._tell(save, rank, asdict(write_pieces(save.folder, rank, save.pieces)))
            if rank == 0:
                self._finish(save)
        except BaseException as error:
            save.failure = error
            with suppress(OSError):
                self._tell(save, rank, {"failure": _told(error)})
        save.pieces = ()
        save.copied.set()
        save.complete.set()
        save.done.set()

    def _staged(self, save: _Save) -> list[Piece]:
        """Copies of the pieces in memory that is kept from save to save."""
        sizes = [p.values.numel() * p.values.element_size() for p in save.pieces]
        begins, end = list[int](), 0
        for size in sizes:
            begins.append(end)
            end += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if len(self._memory) < end:
            self._memory = host_memory(end)
        staged = []
        for piece, begin, size in zip(save.pieces, begins, sizes, strict=True):
            values = self._memory[begin : begin + size].view(piece.values.dtype)
            values = values.view(piece.values.shape)
            values.copy_(piece.values, non_blocking=True)
            staged.append(replace(piece, values=values))
            save.num_copied += 1
        return staged

    def _finish(self, save: _Save) -> None:
        """On the first rank: make a checkpoint of the files of all."""
        folder, train = save.folder, self._recipe.train
        ranks = range(dist.get_world_size())
        files = [self._file_of(save, rank) for rank in ranks]
        for rank in ranks:
            _word_of(folder, rank).unlink()
        headers = hashlib.sha256("".join(file.header for file in files).encode()).hexdigest()
        known = self._index if self._indexed == headers else None
        self._index = write_index(folder, len(files), known)
        self._indexed = headers
        # First those of the last checkpoint, in case their folder has since been moved away.
        before = latest_checkpoint(self._checkpoints)
        if before is not None and (before / ASSETS).is_dir():
            shutil.copytree(before / ASSETS, folder / ASSETS)
        collect_assets(self._recipe, folder / ASSETS)

        def when_complete() -> None:
            save.complete.set()
            save.may_publish.wait()
            if save.given_up.is_set():
                raise _OthersFailed

        sums = {file_of(rank): file.sum for rank, file in enumerate(files)}
        given = (train.keep_checkpoints, train.keep_every, sums, when_complete)
        publish(folder, save.progress, self._recipe.to_yaml(), *given)

    def _tell(self, save: _Save, rank: int, word: Mapping[str, Any]) -> None:
        """Say how this rank's file ended, at once or not at all."""
        path = _word_of(save.folder, rank)
        write_synced(path.with_suffix(".partial"), json.dumps(word))
        path.with_suffix(".partial").replace(path)

    def _file_of(self, save: _Save, rank: int) -> Written:
        """Wait for the file of a rank as long as it grows. Raises if that rank fails or is gone."""
        path, seen, since = save.folder / file_of(rank), -1, time.monotonic()
        while True:
            with suppress(FileNotFoundError):
                word = json.loads(_word_of(save.folder, rank).read_text())
                if "failure" in word:
                    raise _OthersFailed
                written = Written(Sum(**word["sum"]), word["header"])
                if path.stat().st_size == written.sum.bytes:  # as this machine sees it
                    return written
            size = _size_of(path)
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > self._patience_seconds:
                raise TimeoutError(
                    f"{path}: rank {rank} has not added to it for {self._patience_seconds:g} "
                    f"seconds; raise bridge.timeout_seconds or check that rank's disk"
                )
            if save.given_up.wait(_LOOK_SECONDS):
                raise _OthersFailed


def _make_anew(save: _Save) -> None:
    """Make the folder, without what an earlier try has left there; or say why that failed."""
    try:
        shutil.rmtree(save.folder, ignore_errors=True)
        save.folder.mkdir(parents=True)
    except OSError as error:
        save.failure = error


def _size_of(path: Path) -> int:
    """0 where it can't be seen: not yet, no longer (once it is published), or not at all.

    It must not raise: the other ranks wait for this one.
    """
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _word_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
