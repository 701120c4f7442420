"""What a rank finds out about its node without the others: device, versions, folders, memory."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import mimo
from data.index.remote import is_remote
from data.index.shards import find_shards, without_braces
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.device import Memory, gpu_of, library_versions, machine_memory
from mimo.errors import RecipeError
from mimo.model.dataset import SPLITS, sources_of
from mimo.model.memory import check_memory, in_words
from mimo.model.roles import parameters_by_role
from mimo.ops.acceleration import LOADS, NOT_INSTALLED, kernel_states
from mimo.parallel.grids import Layout
from mimo.runtime.ranks import RankEnv, node_name
from mimo.runtime.run_environment import versions
from mimo.slurm.verdict import Facts

KERNELS = "kernels"  # of a node with GPUs
_SEEN_SECONDS = 10.0  # within which a new file shows on other nodes
_TEMPORARY_BYTES = 2**30
_SHOWN = 8  # characters of a digest


def facts_of(
    phased: PhasedRecipe, recipe: Recipe, layout: Layout, environment: RankEnv, word: Path
) -> Facts:
    """Of this rank; one rank of a node looks at what all of its ranks would find alike.

    recipe: of the phase with the layout. word: a file in the run folder, which rank 0 has just
    written.
    """
    problems, same, free = list[str](), dict[str, str](), dict[str, int]()
    recipes = [phase.recipe for phase in phased.phases]
    memory, gpu = None, None
    try:
        gpu = gpu_of(environment.local_rank)
    except Exception as error:  # whatever a broken driver raises
        problems.append(f"its GPU does not work: {error}".splitlines()[0])
    if gpu is not None:
        same[f"GPU of {' and '.join(layout.modules_of(environment.rank))}"] = gpu.name
        states = kernel_states()
        same[KERNELS] = ", ".join(f"{name} {state}" for name, state in states.items())
        problems += set(states.values()) - {LOADS, NOT_INSTALLED}
        free["GPU"] = gpu.free
        memory = Memory("the GPU of each rank", gpu.free, is_of_processes=False)
    elif not problems and _asks_for_gpus(recipe):
        problems.append("it sees no GPU, but cluster.gpus_per_node asks for them")
    same["device"] = "CPU" if gpu is None else "GPU"
    ranks = range(environment.rank, environment.rank + 1)
    is_first = environment.local_rank == 0
    if is_first:
        same |= {"python": platform.python_version(), "code": _code(), **versions()}
        same |= library_versions()
        problems += _problems_of_files(recipes, same)
        free |= _free(phased.run_dir, recipe.cluster.local_logs)
        problems += _problems_of_room(recipe, layout, free)
        if gpu is None and not problems:
            memory, ranks = machine_memory(), environment.ranks_here
    try:
        if memory is not None:
            check_memory(recipe, layout, ranks, memory)
    except RecipeError as error:
        problems.append(str(error))
    if not _is_seen(word):
        problems.append(
            f"{word.parent}: a file that rank 0 has written there does not show within "
            f"{_SEEN_SECONDS:g} s; the run folder has to be on a file system of all nodes"
        )
    facts = environment.rank, node_name(), same, tuple(dict.fromkeys(problems))
    return Facts(*facts, "" if gpu is None else gpu.identity, free)


def _asks_for_gpus(recipe: Recipe) -> bool:
    """Whether ranks here should see GPUs; jobs of SLURM have some unless it was said otherwise."""
    was_said = "gpus_per_node" in recipe.cluster.model_fields_set
    return recipe.cluster.gpus_per_node > 0 and (was_said or "SLURM_STEP_ID" in os.environ)


def _code() -> str:
    """Of our own files, which may be others under the same version."""
    folder = Path(mimo.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return _digest(f"{file.relative_to(folder)} {_digest([file.read_text()])}" for file in files)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_SHOWN]


def _problems_of_files(recipes: Sequence[Recipe], same: dict[str, str]) -> Iterator[str]:
    """What cannot be read of what recipes name; ``same`` gets digests of the rest."""
    seen = set[str]()
    for recipe in recipes:
        named = {"init_from": recipe.init_from, "data.tokenizer": recipe.data.tokenizer}
        for key, path in named.items():
            if path is None or path in seen:
                continue
            seen.add(path)
            try:
                files = sorted(file for file in Path(path).rglob("*") if file.is_file())
                lines = [f"{file.relative_to(path)} {file.stat().st_size}" for file in files]
                if not lines:
                    raise FileNotFoundError("no file is there")
                same[f"{key} {path}"] = f"{len(files)} files {_digest(lines)}"
            except OSError as error:
                yield f"{key}: {path} cannot be read: {error}"
        for split in SPLITS:
            for source in sources_of(recipe, split):
                if source.path in seen:
                    continue
                seen.add(source.path)
                # Of shards at URLs one: nodes that asked for all of them would be a crowd.
                pattern = (
                    next(without_braces(source.path)) if is_remote(source.path) else source.path
                )
                try:
                    shards = find_shards(pattern)
                except ValueError as error:
                    yield f"data.{split}: {error}"
                    continue
                lines = [f"{one.path} {one.size} {one.version}" for one in shards]
                same[f"data.{split} {source.path}"] = f"{len(shards)} shards {_digest(lines)}"


def _free(run_dir: Path, logs: str | None) -> dict[str, int]:
    """Bytes that are left on this node."""
    folders = {"run folder": _existing(run_dir), "temporary": Path(tempfile.gettempdir())}
    if logs is not None:
        folders["local logs"] = _existing(Path(logs))
    found = {name: shutil.disk_usage(folder).free for name, folder in folders.items()}
    return {**found, "memory": machine_memory().available}


def _existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def _problems_of_room(recipe: Recipe, layout: Layout, free: dict[str, int]) -> Iterator[str]:
    needed = {"run folder": _checkpoint_bytes(recipe, layout), "temporary": _TEMPORARY_BYTES}
    for name, size in needed.items():
        if free[name] < size:
            what = "a checkpoint" if name == "run folder" else "files of libraries"
            left = in_words(free[name])
            yield f"{name}: {left} are free, and {what} takes about {in_words(size)}"
    logs = recipe.cluster.local_logs
    if logs is not None and not os.access(_existing(Path(logs)), os.W_OK):
        yield f"cluster.local_logs: {logs} cannot be written"


def _checkpoint_bytes(recipe: Recipe, layout: Layout) -> float:
    """Weights once, and the optimizer's state once."""
    total, is_shared = 0.0, recipe.train.distributed_optimizer
    for one in parameters_by_role(recipe, layout):
        grid = layout.grids[one.module]
        copies = grid.dp_replicate if grid.engine == "fsdp" else grid.dp * grid.cp
        state = one.optimizer * (copies if is_shared and grid.engine == "megatron" else 1)
        total += len(one.ranks) * (one.weights + state) / copies
    return total


def _is_seen(word: Path) -> bool:
    deadline = time.monotonic() + _SEEN_SECONDS
    while not word.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
