"""Who builds what is missing of the indexes: processes of this machine, the ranks, or nobody."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.index.build import IndexTask, Problems, Progress, build_here, index_shard
from data.index.samples import Processors, settings_fingerprint
from data.index.store import Survey, find_survey
from data.text.chat import ChatTokenizer
from mimo.config.data import Source
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.model.dataset import (
    SPLITS,
    cache_folder,
    for_each_source,
    item_processors,
    open_tokenizer,
)
from mimo.runtime.processes import run_processes, warm_up

_SMALL = 32 * 2**20  # bytes that one process indexes before others have started


def shares(tasks: Sequence[IndexTask], num: int) -> list[list[IndexTask]]:
    """The same tasks dealt out: the largest shards first, every ``num``-th to the same."""
    by_size = sorted(tasks, key=lambda task: -task.shard.size)
    return [by_size[number::num] for number in range(num)]


def build_in_processes(
    tasks: Sequence[IndexTask],
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
    workers: int | None = None,
) -> None:
    """Index shards in ``workers`` processes (None: as many as cores), each its share.

    They end with this one; what they have finished stays. Raises as `build_here`.
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
        for found in run_processes(_index_share, args, num, os.environ, meanwhile=show):
            problems.merge(found)
        show()
    problems.raise_any(processors)


def _index_share(
    dealt: Sequence[Sequence[IndexTask]],
    chat: ChatTokenizer,
    processors: Processors,
    counts: str,
) -> Problems:
    """Index the share of this process. counts: a file with the bytes that each one has done."""
    own = int(os.environ["RANK"])
    done, problems, before = np.memmap(counts, np.int64, "r+"), Problems(), 0
    for task in dealt[own]:

        def show(position: int, before: int = before) -> None:
            done[own] = before + position

        problems.merge(index_shard(task, chat, processors, show))
        before += task.shard.size
        done[own] = before
    return problems


def build_nothing(
    tasks: Sequence[IndexTask],
    chat: ChatTokenizer,
    processors: Processors,
    progress: Progress | None = None,
) -> None:
    """For processes that all others would imitate. Raises ValueError."""
    raise ValueError(
        f"{len(tasks)} shards are not indexed, the first is {tasks[0].shard.path}: "
        "`mimo data index` with this recipe does it. If other ranks have just indexed them, their "
        f"machines do not share {tasks[0].file.parent}: run that command on each machine"
    )


def tasks_of(recipe: Recipe) -> list[IndexTask]:
    """The shards of all splits that are not indexed yet.

    Raises RecipeError for missing shards, and when their index is refused or has no place;
    StartError where their file system fails.
    """
    chat, processors = open_tokenizer(recipe), item_processors(recipe)

    def tasks_of_source(source: Source) -> tuple[IndexTask, ...]:
        found = survey_source(recipe, source, chat, processors)
        if found is None:
            raise ValueError(
                f"got {source.path}, whose index can be stored neither beside its shards "
                "nor in data.cache_directory; give a folder there"
            )
        if found.tasks and recipe.data.build_index == "refuse":
            message = (
                f"got refuse, and {len(found.tasks)} of {len(found.catalog.names)} shards of "
                f"{source.path} are not indexed; run `mimo data index` with this recipe first"
            )
            raise RecipeError(recipe.problem(("data", "build_index"), message))
        return found.tasks

    tasks = itertools.chain.from_iterable(for_each_source(recipe, SPLITS, tasks_of_source))
    return list({task.file: task for task in tasks}.values())


def survey_source(
    recipe: Recipe, source: Source, chat: ChatTokenizer, processors: Processors
) -> Survey | None:
    """What is there of a source's index; None if it can be stored nowhere. Raises ValueError."""
    settings, media = settings_fingerprint(chat, processors), sorted(processors)
    return find_survey(source.path, settings, media, cache_folder(recipe))
