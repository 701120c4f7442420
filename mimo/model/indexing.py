"""Index the shards of a recipe, in processes of this machine; `mimo data index`."""

import functools
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.index.build import IndexTask, Problems, Progress, build_here, index_shards
from data.index.samples import Processors, settings_fingerprint
from data.index.store import Survey, find_survey
from data.text.chat import ChatTokenizer
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.schema import Recipe
from mimo.config.training import Source
from mimo.errors import RecipeError
from mimo.model.dataset import (
    SPLITS,
    Dataset,
    added_tokens,
    cache_folder,
    dataset_of,
    for_each_source,
    item_processors,
    open_indexes,
    open_tokenizer,
    sources_of,
    unknown_text,
)
from mimo.runtime.processes import run_processes, warm_up
from mimo.runtime.progress import progress_of

_SMALL = 32 * 2**20  # bytes that one process indexes before others have started


def main(path: Path, overrides: Sequence[str], workers: int | None) -> int:
    """`mimo data index RECIPE`."""
    load_phases(path, overrides).each(lambda recipe: _index_splits(recipe, workers))
    return 0


def _index_splits(recipe: Recipe, workers: int | None) -> None:
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    build = functools.partial(build_in_processes, workers=workers)
    problems = list[str]()
    for line in added_tokens(chat):
        print(line, flush=True)
    for split in SPLITS:
        try:
            with progress_of(f"indexing {split}") as progress:
                indexes = open_indexes(recipe, split, chat, processors, progress, build)
        except RecipeError as error:
            problems += error.problems
            continue
        for source, index in zip(sources_of(recipe, split), indexes, strict=True):
            print(
                f"{split} {source.path}: {len(index.shards)} shards, {len(index)} samples, "
                f"{index.num_items} items, {index.num_skipped} unusable samples left out",
                flush=True,
            )
        for line in unknown_text(sources_of(recipe, split), indexes):
            print(line, flush=True)
    if problems:
        raise RecipeError(*problems)


def shares(tasks: Sequence[IndexTask], num: int) -> list[list[IndexTask]]:
    """Deal the tasks out, the largest first, in ``num`` shares."""
    by_size = sorted(tasks, key=lambda task: -task.shard.size)
    return [by_size[number::num] for number in range(num)]


def build_in_processes(
    tasks: Sequence[IndexTask],
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
    workers: int | None = None,
) -> None:
    """Index shards in ``workers`` processes; None starts one per core.

    The processes end with this one; finished index files stay. Raises ValueError for damaged
    shards and samples that would be misread, after all other shards are indexed.
    """
    total = sum(task.shard.size for task in tasks)
    num = min(len(os.sched_getaffinity(0)) if workers is None else workers, len(tasks))
    if num < 2 or (workers is None and total < _SMALL):
        build_here(tasks, chat, processors, progress)
        return
    warm_up(["transformers"])
    with tempfile.TemporaryDirectory(prefix="mimo-index-") as folder:
        done = np.memmap(Path(folder) / "done", np.int64, "w+", shape=(num,))
        args = (shares(tasks, num), chat, processors, done.filename)

        def show() -> None:
            if progress is not None:
                progress(int(done.sum()), total)

        problems = Problems()
        for share in run_processes(_index_share, args, num, os.environ, meanwhile=show):
            problems.merge(share)
        show()
    problems.raise_any(processors)


def _index_share(
    dealt: Sequence[Sequence[IndexTask]], chat: ChatTokenizer, processors: Processors, counts: str
) -> Problems:
    """Index the share of this process. counts: a file of int64, the bytes done by each process."""
    process, done_by_process = int(os.environ["RANK"]), np.memmap(counts, np.int64, "r+")

    def show(done: int, total: int) -> None:
        done_by_process[process] = done

    return index_shards(dealt[process], chat, processors, show)


def build_nothing(
    tasks: Sequence[IndexTask],
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
) -> None:
    """Raise ValueError: the ranks have indexed already, and must not all do it again."""
    raise ValueError(
        f"{len(tasks)} shards are not indexed, the first is {tasks[0].shard.path}: "
        "`mimo data index` with this recipe does it. If other ranks have just indexed them, their "
        f"machines do not share {tasks[0].file.parent}: run that command on each machine"
    )


def tasks_of(recipe: Recipe) -> list[IndexTask]:
    """Return the shards of all splits that are not indexed. Raises RecipeError or StartError."""
    chat, processors = open_tokenizer(recipe), item_processors(recipe)

    def tasks_of_source(source: Source) -> tuple[IndexTask, ...]:
        return survey_source(recipe, source, chat, processors).tasks

    tasks = itertools.chain.from_iterable(for_each_source(recipe, SPLITS, tasks_of_source))
    return list({task.file: task for task in tasks}.values())


def survey_source(
    recipe: Recipe, source: Source, chat: ChatTokenizer, processors: Processors
) -> Survey:
    """Find the existing part of a source's index. Raises ValueError if no folder can store it."""
    settings, modalities = settings_fingerprint(chat, processors), sorted(processors)
    return find_survey(source.path, settings, modalities, cache_folder(recipe))


def indexed_dataset(recipe: Recipe) -> Dataset | None:
    """Return the training data if all shards are indexed; builds nothing."""
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    sources = sources_of(recipe, "sources")
    surveys = [survey_source(recipe, source, chat, processors) for source in sources]
    if any(survey.tasks for survey in surveys):
        return None
    indexes = [survey.open() for survey in surveys]
    return dataset_of(recipe, "sources", indexes, chat, processors)
