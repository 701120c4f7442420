"""One rank, from joining the others to leaving them."""

import logging
import pickle
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import override

import torch.distributed as dist
from torch._C._distributed_c10d import Store, _dump_fr_trace_file

from data.index.samples import Index
from mimo import device
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.load import load_start, read_start_index
from mimo.checkpoint.reading import from_rank_0
from mimo.checkpoint.resume import FromScratch, Start
from mimo.config.schema import Recipe
from mimo.errors import EXIT_CONTINUE, InputError, StartError, file_system_failed, format_memory
from mimo.model.dataset import Dataset, changed_shards_named, dataset_of, open_indexes
from mimo.model.modules import MimoModel
from mimo.model.recipe_checks import check_memory
from mimo.parallel.grids import Layout
from mimo.parallel.groups import Topology, build_topology
from mimo.runtime.hang_monitor import COLLECTIVE_FACTOR, HangMonitor
from mimo.runtime.heartbeat import Work
from mimo.runtime.ranks import RankEnv, rank_environment
from mimo.runtime.run_files import record, write_environment
from mimo.runtime.signals import EarlyStop
from mimo.spans import SPANS
from mimo.train.anomalies import BadSamples
from mimo.train.batches import sum_over_world
from mimo.train.loggers import MetricsWriter
from mimo.train.loop import Trainer, with_synchronized_gc
from mimo.train.restarts import job_name
from mimo.train.run_folder import continue_order
from mimo.train.run_summary import precision_warnings, summary_of
from mimo.train.step import StepObserver

logger = logging.getLogger(__name__)

# Spans in which a rank waits for other ranks.
_WAITS = {
    "bridge_wait": "a bridge",
    "pipeline_wait": "its pipeline neighbours",
    "sync": "the sum over all ranks",
}


def join_world(recipe: Recipe, *later: Recipe, store: Store | None = None) -> RankEnv:
    """Join torch.distributed as the rank that the environment names.

    later: what the world trains afterwards; the longest timeout applies. store: of the rendezvous.
    """
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    rank, size, local_rank = environment.rank, environment.world_size, environment.local_rank
    timeout = max(collective_timeout(recipe) for recipe in (recipe, *later))
    device.initialize_distributed(rank, size, store or environment.rendezvous, timeout, local_rank)
    return environment


def collective_timeout(recipe: Recipe) -> float:
    """Return the seconds that a collective may take, in the world's group and in all others."""
    return recipe.bridge.timeout_seconds * COLLECTIVE_FACTOR


def leave_world() -> None:
    """End this rank; every rank of the world calls it."""
    device.barrier()
    dist.destroy_process_group()


class MonitoredSteps(StepObserver):
    """Tells the hang monitor where this rank is."""

    def __init__(self, monitor: HangMonitor) -> None:
        self._monitor = monitor

    @override
    def at(self, step: int, activity: str) -> None:
        self._monitor.at(step, activity)


def _work(model: MimoModel) -> Work:
    doing, batch = model.doing, ""
    waits, is_transfer = "", False
    span = SPANS.open[-1] if SPANS.open else None
    if span is not None and span.phase in _WAITS:
        waits, is_transfer = _WAITS[span.phase], span.phase == "bridge_wait"
        if is_transfer:
            encoder, _, way = span.edge.rpartition("_")
            rows = "rows" if way == "forward" else "gradients"
            waits = f"bridge {encoder}: {rows} of microbatch {span.number}"
        elif model.watch is not None and (oldest := model.watch.oldest()) is not None:
            waits, ranks = oldest  # the host waits for the device, and the device for this
            waits = f"{waits}, from rank {', '.join(map(str, ranks))}"
    if doing is None:
        return Work(waits=waits, is_transfer=is_transfer)
    what, microbatch = doing
    with suppress(IndexError):  # the model has just begun another batch
        batch = model.describe_batch(microbatch)
    return Work(f"{what}, microbatch {microbatch}", batch, waits, is_transfer, marker=doing)


def train_in_world(
    recipe: Recipe, layout: Layout, run_dir: Path, start: Start, job_start: float | None = None
) -> int:
    """Train, from building the model to the last checkpoint; every rank of the world calls it.

    layout: the recipe's, for a world of this size. job_start: on the monotonic clock; None: now.
    Returns 0, or EXIT_CONTINUE if the run was asked to stop early and has saved. Afterwards only
    the world's group is left, so that another run can follow.
    """
    rank = dist.get_rank()
    # `force` removes console handlers that libraries have added.
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(
        filename=run_dir / f"log_rank_{rank}.txt", format=form, level=logging.INFO, force=True
    )
    logging.captureWarnings(True)
    if (memory := device.gpu_memory()) is not None:
        check_memory(recipe, layout, range(rank, rank + 1), memory)
    grids = [(name, grid) for name, grid in layout.grids.items() if rank in grid.ranks]
    who = " and ".join(f"{name}, lane {grid.coords(rank).dp}" for name, grid in grids)
    timeout, step_timeout = recipe.bridge.timeout_seconds, recipe.train.step_timeout_seconds
    monitor = HangMonitor(run_dir, rank, layout.world_size, who, timeout, step_timeout)
    # A failure is reported before the save in flight is waited for.
    with ExitStack() as saves, monitor.watched():
        topology = build_topology(layout, collective_timeout(recipe))
        device.set_threads(recipe.train.threads_per_rank, topology.ranks_on_host)
        device.keep_freed_memory()
        deadline = None
        if (minutes := recipe.train.max_minutes) is not None and rank == 0:
            deadline = 60 * minutes + (time.monotonic() if job_start is None else job_start)
        early_stop = EarlyStop(deadline)
        code = _train(recipe, topology, run_dir, start, monitor, early_stop, saves)
        topology.close()
    device.release_memory()
    return code


def _train(
    recipe: Recipe,
    topology: Topology,
    run_dir: Path,
    start: Start,
    monitor: HangMonitor,
    early_stop: EarlyStop,
    saves: ExitStack,
) -> int:
    # If the weights come from one of our checkpoints, the initial ones need not be read.
    scratch = isinstance(start, FromScratch)
    initial = from_rank_0(lambda: initial_weights(recipe)) if scratch else None
    stored = read_start_index(start)
    trainer = Trainer(recipe, topology, run_dir, initial, stored, early_stop)
    monitor.work = partial(_work, trainer.model)
    monitor.memory, monitor.format_memory = trainer.model.memory, format_memory
    if device.has_gpu():
        dump = partial(_dump_fr_trace_file, topology.rank, backend=device.backend())
        monitor.dump_collectives = dump
    on_setup_progress = partial(monitor.at, 0, "setup")
    on_setup_progress()
    dataset = _open_together(recipe, "sources", trainer)
    validation = _open_together(recipe, "validation", trainer)
    assert dataset is not None, "the recipe schema asks for at least one source"
    on_setup_progress()
    progress = load_start(trainer.model.modules, start, stored, on_setup_progress)
    del stored  # of a large model it takes much memory
    on_setup_progress()
    dataset, trainer.progress, notes = continue_order(dataset, progress)
    logger.info("rank %d owns %s on %s", topology.rank, [*topology.modules], device.local_device())
    saves.enter_context(trainer.saver)
    with changed_shards_named(), ExitStack() as stack:
        writer = bad_samples = None
        if topology.reports:
            splits = {"sources": dataset, "validation": validation}
            first_step, vocabulary = trainer.progress.step, trainer.chat.vocab_size
            facts = summary_of(recipe, topology.layout, vocabulary, trainer.progress, splits)
            num_ranks, place = topology.layout.world_size, device.device_name()
            write_environment(run_dir, num_ranks, first_step, place, facts)
            writer = stack.enter_context(MetricsWriter(recipe, run_dir, first_step))
            bad_samples = BadSamples(run_dir, first_step)
            bad_samples.list_of_indexes(splits)
            summary = (f"summary {name}: {text}" for name, text in facts.items())
            for line in (*notes, *summary, *precision_warnings(recipe, initial)):
                print(line, flush=True)
                logger.info(line)
        lacks = float(writer is not None and writer.lacks_validation)
        owes_validation = validation is not None and sum_over_world(lacks) > 0
        observer = MonitoredSteps(monitor)
        steps = trainer.train(dataset, validation, observer, bad_samples, owes_validation)
        for metrics in with_synchronized_gc(steps):
            if writer is not None and "validation_loss" in metrics:
                writer.validation(metrics)
            elif writer is not None:
                writer.step(metrics)
        done = trainer.progress.step
        if done >= recipe.train.steps:
            return 0
        if writer is not None:
            reasons = " and ".join(early_stop.reasons)
            text = f"ended by {reasons}, with a checkpoint after step {done}"
            print(f"{text}; continue with --resume", flush=True)
            record(run_dir, "signal", text, done - 1, reasons=early_stop.reasons, job=job_name())
        return EXIT_CONTINUE


def _open_together(recipe: Recipe, split: str, trainer: Trainer) -> Dataset | None:
    """Open a split; rank 0 looks at the shards. Raises InputError or StartError on all ranks."""
    indexes, problem, file_system_fails = tuple[Index, ...](), "", False

    def find() -> bytes:
        nonlocal indexes
        indexes = open_indexes(recipe, split, trainer.chat, trainer.processors)
        return pickle.dumps(indexes)

    pickled = from_rank_0(find)
    try:
        indexes = indexes or pickle.loads(pickled)
    except (OSError, ValueError) as error:
        problem = f"data.{split}: {error}; run `mimo data index` on each machine of the job"
        file_system_fails = file_system_failed(error)
    num_failed, num_sick = sum_over_world([float(bool(problem)), float(file_system_fails)])
    if num_failed:
        kind = StartError if num_failed == num_sick else InputError
        raise kind(problem or f"data.{split}: {num_failed:g} ranks cannot open its index")
    return dataset_of(recipe, split, indexes, trainer.chat, trainer.processors) if indexes else None
