"""One rank, from joining the others to leaving them."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from data.index.samples import Index
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.load import load_start, read_start_index
from mimo.checkpoint.reading import from_rank_0
from mimo.checkpoint.resume import FromScratch, Start
from mimo.config.schema import Recipe
from mimo.device import (
    barrier,
    device_name,
    gpu_memory,
    initialize_distributed,
    local_device,
    release_memory,
    set_threads,
)
from mimo.errors import EXIT_CONTINUE, InputError, StartError, file_system_failed
from mimo.model.dataset import Dataset, changed_shards_named, dataset_of, open_indexes
from mimo.model.memory import check_memory
from mimo.parallel.grids import Layout
from mimo.parallel.groups import Topology, build_topology
from mimo.runtime.ending import Ending
from mimo.runtime.ranks import RankEnv, rank_environment
from mimo.runtime.run_environment import write_environment
from mimo.runtime.run_lock import keep_lock
from mimo.train.bad_samples import BadSamples
from mimo.train.batches import sum_over_world
from mimo.train.continuation import continue_order
from mimo.train.garbage import collected_together
from mimo.train.incidents import record
from mimo.train.local_logs import local_log
from mimo.train.loop import Trainer
from mimo.train.metrics import MetricsWriter
from mimo.train.presence import COLLECTIVE_PATIENCE, Presence
from mimo.train.restarts import job_name
from mimo.train.run_files import BAD_SAMPLES, RANKS
from mimo.train.run_summary import precision_warnings, summary_of
from mimo.train.startup import STARTING

logger = logging.getLogger(__name__)


def run_rank(
    recipe: Recipe,
    layout: Layout,
    run_dir: Path,
    start: Start,
    locked: Path | None = None,
    began: float | None = None,
) -> int:
    """Be one rank of a job launched on this machine; returns an exit code.

    locked: the folder whose lock the launcher holds. began: as of `train_in_world`.
    """
    if locked is not None:
        keep_lock(locked)
    if began is not None:
        STARTING.begin(time.time() - (time.monotonic() - began))
    STARTING.ends("start and imports")
    join_world(recipe)
    code = train_in_world(recipe, layout, run_dir, start, began)
    leave_world()
    return code


def join_world(recipe: Recipe, *later: Recipe, store: Store | None = None) -> RankEnv:
    """Join torch.distributed as the rank that the environment names.

    later: what the same world trains afterwards; the longest timeout of all applies. store: where
    the ranks have already met; without one, they meet as the environment says.
    """
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    initialize_distributed(
        environment.rank,
        environment.world_size,
        store or environment.rendezvous,
        max(collective_timeout(one) for one in (recipe, *later)),
        environment.local_rank,
    )
    STARTING.ends("world")
    return environment


def collective_timeout(recipe: Recipe) -> float:
    """Seconds that a collective call may take, in the world's group and in all others."""
    return recipe.bridge.timeout_seconds * COLLECTIVE_PATIENCE


def leave_world() -> None:
    """End this rank; every rank of the world calls it."""
    barrier()
    dist.destroy_process_group()


def train_in_world(
    recipe: Recipe, layout: Layout, run_dir: Path, start: Start, began: float | None = None
) -> int:
    """Train, from building the model to the last checkpoint; every rank of the world calls it.

    layout: the recipe's, for a world of this size; made before the ranks started.
    began: when the job did, on the machine's monotonic clock; None for now.
    Returns 0, or EXIT_CONTINUE where the run was asked to end early and has saved.
    Afterwards only the world's group is left, so that another run can follow.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    set_threads(recipe.train.threads_per_rank, here)
    with local_log(run_dir / f"log_rank_{dist.get_rank()}.txt") as log, _logging_to(log):
        rank = dist.get_rank()
        if (memory := gpu_memory()) is not None:
            check_memory(recipe, layout, range(rank, rank + 1), memory)
        timeouts = recipe.bridge.timeout_seconds, recipe.train.step_timeout_seconds
        presence = Presence(run_dir / RANKS, layout, rank, *timeouts)
        # A failure is told before the save in flight is waited for.
        with ExitStack() as saves, presence.watched():
            topology = build_topology(layout, collective_timeout(recipe))
            STARTING.ends("groups")
            ending = Ending()
            if (minutes := recipe.train.max_minutes) is not None and rank == 0:
                ending = Ending((time.monotonic() if began is None else began) + 60 * minutes)
            code = _train(recipe, topology, run_dir, start, presence, ending, saves)
            topology.close()
    release_memory()
    return code


def _train(
    recipe: Recipe,
    topology: Topology,
    run_dir: Path,
    start: Start,
    presence: Presence,
    ending: Ending,
    saves: ExitStack,
) -> int:
    # If the weights come from one of our checkpoints, the initial ones need not be read.
    scratch = isinstance(start, FromScratch)
    initial = from_rank_0(lambda: initial_weights(recipe)) if scratch else None
    stored = read_start_index(start)
    trainer = Trainer(recipe, topology, run_dir, initial, stored)
    presence.model = trainer.model
    presence.at(0, "setup")  # still, but it gets on
    STARTING.ends("model")
    dataset = _open_together(recipe, "sources", trainer)
    validation = _open_together(recipe, "validation", trainer)
    assert dataset is not None, "the recipe schema asks for at least one source"
    presence.at(0, "setup")
    STARTING.ends("data")
    progress = load_start(trainer.model.modules, start, stored, lambda: presence.at(0, "setup"))
    del stored  # of a large model it takes much memory
    presence.at(0, "setup")
    STARTING.ends("checkpoint")
    dataset, trainer.progress, said = continue_order(dataset, progress)
    trainer.ending = ending
    logger.info("rank %d owns %s on %s", topology.rank, [*topology.modules], local_device())
    saves.enter_context(trainer.saver)
    with changed_shards_named(), ExitStack() as stack:
        writer = bad_samples = None
        if topology.reports:
            splits = {"sources": dataset, "validation": validation}
            first_step, vocabulary = trainer.progress.step, trainer.chat.vocab_size
            facts = summary_of(recipe, topology.layout, vocabulary, trainer.progress, splits)
            write_environment(run_dir, topology.layout.world_size, first_step, device_name(), facts)
            writer = stack.enter_context(MetricsWriter(recipe, run_dir, first_step))
            bad_samples = BadSamples(run_dir, first_step, writer.say)
            bad_samples.of_indexes(splits)
            _say_skipped(writer, dataset)
            summary = (f"summary {name}: {text}" for name, text in facts.items())
            for line in (*said, *summary, *precision_warnings(recipe, initial)):
                writer.say(line)
                logger.info(line)
        owes = False
        if validation is not None:
            (lacks,) = sum_over_world([float(writer is not None and writer.lacks_validation)])
            owes = lacks > 0
        steps = trainer.train(dataset, validation, presence, bad_samples, owes)
        for metrics in collected_together(steps, recipe.train.collect_garbage_every):
            if writer is not None and "validation_loss" in metrics:
                writer.validation(metrics)
            elif writer is not None:
                writer.step(metrics)
            STARTING.tell(run_dir, None if writer is None else writer.say)
        done = trainer.progress.step
        if done >= recipe.train.steps:
            return 0
        if writer is not None:
            text = f"ended by {' and '.join(ending.reasons)}, with a checkpoint after step {done}"
            writer.say(f"{text}; continue with --resume")
            record(run_dir, "signal", text, done - 1, reasons=ending.reasons, job=job_name())
        return EXIT_CONTINUE


def _open_together(recipe: Recipe, split: str, trainer: Trainer) -> Dataset | None:
    """A split. Rank 0 looks at the shards; the others open the catalogs that it has found.

    Raises InputError, on all ranks, if one cannot open them; StartError if a file system fails.
    """
    text_and_media = trainer.chat, trainer.processors
    indexes, problem, sick = tuple[Index, ...](), "", False

    def find() -> bytes:
        nonlocal indexes
        indexes = open_indexes(recipe, split, *text_and_media)
        return pickle.dumps(indexes)

    found = from_rank_0(find)
    try:
        indexes = indexes or pickle.loads(found)
    except (OSError, ValueError) as error:
        problem = f"data.{split}: {error}; run `mimo data index` on each machine of the job"
        sick = file_system_failed(error)
    failed, of_sick = sum_over_world([float(bool(problem)), float(sick)])
    if failed:
        kind = StartError if failed == of_sick else InputError
        raise kind(problem or f"data.{split}: {failed:g} ranks cannot open its index")
    return dataset_of(recipe, split, indexes, *text_and_media) if indexes else None


def _say_skipped(writer: MetricsWriter, dataset: Dataset) -> None:
    count = sum(index.num_skipped for index in dataset.indexes)
    if count:
        writer.say(
            f"{count} samples of the index are unusable and left out (all are in {BAD_SAMPLES}):"
        )
        skipped = chain.from_iterable(index.skipped_samples() for index in dataset.indexes)
        for sample in islice(skipped, 10):
            writer.say(f"  {sample.shard}: {sample.key}: {sample.reason}")


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write this process's log and warnings to a file instead of the console.

    A library that logged before any handler existed has given the root logger a console handler.
    """
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    others, root.handlers = root.handlers, list[logging.Handler]([handler])
    logging.captureWarnings(True)
    try:
        yield
    finally:
        root.handlers = others
        with suppress(OSError):  # of a full disk others tell, and this could hide what they say
            handler.close()
