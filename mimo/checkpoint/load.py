"""Loading: a run starts from a checkpoint of any layout, from weights alone, or from scratch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mimo.checkpoint.folder import Progress, read_progress
from mimo.checkpoint.reading import from_rank_0, read_shared
from mimo.checkpoint.resume import FromScratch, FromWeights, Resume, Start
from mimo.checkpoint.tensors import StoredTensor, averages, read_index
from mimo.config.schema import key_of as recipe_key_of
from mimo.config.source import dotted
from mimo.engines.contract import EMA, MASTER, MOMENTS, STEP, Module, Piece, key_of, kind_of
from mimo.families.keymap import is_adapter

Modules = Mapping[str, Module]
"""The modules of which this rank has a part, by name."""
Index = Mapping[str, StoredTensor]
"""The tensors of a checkpoint, by key."""


def read_start_index(start: Start) -> Index:
    """Return the tensors that a run starts with, which rank 0 reads; every rank calls this.

    Raises InputError, on all of them, for a checkpoint that cannot be read.
    """
    if isinstance(start, FromScratch):
        return {}
    checkpoint = start.checkpoint
    return from_rank_0(lambda: read_index(checkpoint))


def load_start(
    modules: Modules,
    start: Start,
    stored: Index,
    on_progress: Callable[[], None] = lambda: None,
) -> Progress:
    """Load the state in which the run starts; every rank of the world calls it.

    stored: from `read_start_index`. on_progress: called whenever replicas have read some of it.
    Raises ValueError if a checkpoint does not fit the model.
    """
    match start:
        case Resume(checkpoint):
            return load_checkpoint(modules, checkpoint, stored, on_progress=on_progress)
        case FromWeights(checkpoint):
            _load_weights(modules, checkpoint, stored, on_progress=on_progress)
        case FromScratch():
            pass
    return Progress(step=0, samples=0)


def load_checkpoint(
    modules: Modules,
    checkpoint: Path,
    stored: Index,
    with_optimizer: bool = True,
    average: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> Progress:
    """Load weights (and optimizers) in this run's layout; every rank of the world calls it.

    stored: from `read_index`. With optimizers, what the checkpoint lacks starts afresh, and rank 0
    prints it: new adapters, and state of weights that were frozen or had another optimizer.
    average: without optimizers, load the moving average of the weights. Raises ValueError if the
    checkpoint does not fit.
    """
    progress = from_rank_0(lambda: read_progress(checkpoint))
    if not with_optimizer:
        _load_weights(modules, checkpoint, stored, average, on_progress)
        return progress
    _check_no_adapter_is_lost(modules, checkpoint, stored)
    notes, optimized = set[str](), set[str]()
    for name, module in modules.items():
        module.wait_param_gather()
        wanted = list(module.pieces("load", with_optimizer=True))
        notes |= set(_notes(name, wanted, stored))
        if any(kind_of(piece.key)[0] in MOMENTS for piece in wanted):
            optimized.add(name)
        pieces = pieces_to_resume(wanted, stored, progress.updates)
        read_shared(checkpoint, stored, pieces, module.replicas, on_progress)
    _print_notes(notes, optimized, stored)
    return progress


def _load_weights(
    modules: Modules,
    checkpoint: Path,
    stored: Index,
    average: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Load all weights, or their moving average; new adapters keep their initial values."""
    _check_no_adapter_is_lost(modules, checkpoint, stored)
    keys = averages(stored) if average else {}
    for module in modules.values():
        module.wait_param_gather()
        pieces = module.pieces("load", with_optimizer=False)
        wanted = (replace(piece, key=keys.get(piece.key, piece.key)) for piece in pieces)
        known = (p for p in wanted if p.key in stored or not is_adapter(p.key))
        read_shared(checkpoint, stored, known, module.replicas, on_progress)
        module.follow_weights()


def _check_no_adapter_is_lost(modules: Modules, checkpoint: Path, stored: Collection[str]) -> None:
    """Raise ValueError if a checkpoint has adapters of a module that has none in the recipe."""
    adapters = [name for name in stored if is_adapter(name)]
    for name, module in modules.items():
        has_adapters = any(is_adapter(piece.key) for piece in module.pieces("load", False))
        if not has_adapters and any(key.startswith(f"{name}.") for key in adapters):
            key = dotted(recipe_key_of(name))
            raise ValueError(
                f"checkpoint {checkpoint} has adapters of {name}, but the recipe has no "
                f"{key}.lora: what they learned would be lost; give it the lora of their training"
            )


def with_fallbacks(pieces: Iterable[Piece], stored: Collection[str]) -> list[Piece]:
    """Return the wanted pieces; what the checkpoint lacks is read from the weights.

    An fp32 run has no master weights. A missing average starts from the master weights, or from the
    weights without them.
    """
    master, average = key_of(MASTER, ""), key_of(EMA, "")
    replaced = []
    for piece in pieces:
        key = piece.key
        if key.startswith(average) and key not in stored:
            key = key_of(MASTER, key.removeprefix(average))
        if key.startswith(master) and key not in stored:
            key = key.removeprefix(master)
        replaced.append(replace(piece, key=key))
    return replaced


def pieces_to_resume(wanted: Iterable[Piece], stored: Collection[str], step: int) -> list[Piece]:
    """Return the wanted pieces to read; others stay as the model and its optimizer initialized.

    step: updates of the run, for older checkpoints that do not count the updates of a parameter.
    """
    wanted = with_fallbacks(wanted, stored)
    fresh = _without_state(wanted, stored)
    pieces = []
    for piece in wanted:
        kind, parameter = kind_of(piece.key)
        if kind in (STEP, *MOMENTS) and parameter in fresh:
            continue
        if kind == STEP and piece.key not in stored:
            piece.values.fill_(step)
        elif piece.key in stored or not (kind or is_adapter(parameter)):
            pieces.append(piece)  # reading names a weight that is missing
    return pieces


def _without_state(wanted: Iterable[Piece], stored: Collection[str]) -> set[str]:
    """Return the parameters whose Adam moments are wanted, but not in the checkpoint."""
    missing = (kind_of(piece.key) for piece in wanted if piece.key not in stored)
    return {parameter for kind, parameter in missing if kind in MOMENTS}


def _notes(name: str, wanted: Iterable[Piece], stored: Collection[str]) -> Iterator[str]:
    """Yield what starts afresh in a module, as far as this rank knows."""
    parameters = {kind_of(piece.key)[1] for piece in wanted}
    if any(is_adapter(parameter) and parameter not in stored for parameter in parameters):
        yield f"{name}: the checkpoint lacks its adapters; they keep their initial values"
    if not all(map(is_adapter, _without_state(wanted, stored))):
        yield (
            f"{name}: weights whose optimizer state is not in the checkpoint (they were frozen, or "
            f"another optimizer trained them) start with a fresh one, at its own step 0"
        )


def _print_notes(notes: set[str], optimized: set[str], stored: Collection[str]) -> None:
    """Print the notes of all ranks; all call it. optimized: this rank's modules with state."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (notes, optimized))
    if dist.get_rank() != 0:
        return
    all_notes = set[str]().union(*(notes for notes, _ in of_ranks))
    all_optimized = set[str]().union(*(names for _, names in of_ranks))
    had_state = {kind_of(key)[1].partition(".")[0] for key in stored if kind_of(key)[0] in MOMENTS}
    all_notes |= {
        f"{name}: its optimizer state in the checkpoint is not loaded: it is frozen now, or its "
        f"optimizer keeps none"
        for name in had_state - all_optimized
    }
    for note in sorted(all_notes):
        print(note, flush=True)
