"""Loading: a run starts from a checkpoint of any layout, from weights alone, or from scratch."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mimo.checkpoint.folder import Progress, read_progress
from mimo.checkpoint.reading import from_rank_0, read_shared
from mimo.checkpoint.resume import FromScratch, FromWeights, Resume, Start
from mimo.checkpoint.tensors import StoredTensor, averages, read_index
from mimo.engines.contract import EMA, MASTER, MOMENTS, STEP, Module, Piece, key_of, kind_of
from mimo.families.keymap import is_adapter

Modules = Mapping[str, Module]  # by name, those that this rank has a part of
Index = Mapping[str, StoredTensor]  # the tensors of a checkpoint, by key


def read_start_index(start: Start) -> Index:
    """Return the tensors to start with, read by rank 0; all ranks call it and raise InputError."""
    if isinstance(start, FromScratch):
        return {}
    return from_rank_0(lambda: read_index(start.checkpoint))


def load_start(
    modules: Modules, start: Start, stored: Index, on_progress: Callable[[], None] = lambda: None
) -> Progress:
    """Load the state in which the run starts; every rank of the world calls it.

    stored: from `read_start_index`. on_progress: called whenever replicas have read some of it.
    Rank 0 prints what starts afresh because the checkpoint lacks it: new adapters, and state of
    weights that were frozen or had another optimizer. Raises ValueError for one that does not fit.
    """
    match start:
        case Resume(checkpoint):
            progress = from_rank_0(lambda: read_progress(checkpoint))
            _load_all(modules, checkpoint, stored, on_progress)
            return progress
        case FromWeights(checkpoint):
            load_weights(modules, checkpoint, stored, on_progress=on_progress)
    return Progress(step=0, samples=0)


def _load_all(
    modules: Modules, checkpoint: Path, stored: Index, on_progress: Callable[[], None]
) -> None:
    notes = set[str]()
    for name, module in modules.items():
        module.wait_param_gather()
        wanted = list(module.pieces("load", with_optimizer=True))
        notes |= set(_notes(name, wanted, stored))
        pieces = pieces_to_resume(wanted, stored)
        read_shared(checkpoint, stored, pieces, module.replicas, on_progress)
    notes_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(notes_of_ranks, notes)
    if dist.get_rank() == 0:
        for note in sorted(set().union(*notes_of_ranks)):
            print(note, flush=True)


def load_weights(
    modules: Modules,
    checkpoint: Path,
    stored: Index,
    average: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Load all weights in this run's layout; every rank of the world calls it.

    stored: from `read_index`. average: load the moving average of the weights. New adapters keep
    their initial values. Raises ValueError if the checkpoint does not fit.
    """
    keys = averages(stored) if average else {}
    for module in modules.values():
        module.wait_param_gather()
        pieces = module.pieces("load", with_optimizer=False)
        wanted = (replace(piece, key=keys.get(piece.key, piece.key)) for piece in pieces)
        known = (p for p in wanted if p.key in stored or not is_adapter(p.key))
        read_shared(checkpoint, stored, known, module.replicas, on_progress)
        module.follow_weights()


def with_fallbacks(pieces: Iterable[Piece], stored: Collection[str]) -> list[Piece]:
    """Return the pieces: missing averages are read from masters, missing masters from weights."""
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


def pieces_to_resume(wanted: Iterable[Piece], stored: Collection[str]) -> list[Piece]:
    """Return the wanted pieces to read; others stay as the model and its optimizer initialized."""
    wanted = with_fallbacks(wanted, stored)
    fresh = _without_state(wanted, stored)
    pieces = []
    for piece in wanted:
        kind, parameter = kind_of(piece.key)
        has_no_state = kind in (STEP, *MOMENTS) and parameter in fresh
        is_new = piece.key not in stored and (kind or is_adapter(parameter))
        if not (has_no_state or is_new):
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
