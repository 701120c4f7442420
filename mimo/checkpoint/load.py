"""Loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from mimo.engines.contract import Module
from mimo.engines.piece import EMA, MASTER, MOMENTS, STEP, Piece, key_of, kind_of
from mimo.families.lora import is_adapter

Modules = Mapping[str, Module]
"""By name, the modules of which this rank owns a part."""
Index = Mapping[str, StoredTensor]
"""The tensors of a checkpoint, by key."""


def with_masters(pieces: Iterable[Piece], stored: Collection[str]) -> list[Piece]:
    """The wanted pieces, with those read from the weights that the checkpoint lacks.

    That of an fp32 run has no master weights, and that of a run without one no moving average,
    which then begins with the weights, the master weights if there are any.
    """
    master, average = key_of(MASTER, ""), key_of(EMA, "")
    found = []
    for piece in pieces:
        key = piece.key
        if key.startswith(average) and key not in stored:
            key = key_of(MASTER, key.removeprefix(average))
        if key.startswith(master) and key not in stored:
            key = key.removeprefix(master)
        found.append(replace(piece, key=key))
    return found


def stored_at(start: Start) -> Index:
    """The tensors that a run begins with: the model need not draw those, and `begin` reads them.

    Rank 0 reads the index; every rank of the world calls this.
    Raises InputError, on all of them, for a checkpoint that cannot be read.
    """
    if isinstance(start, FromScratch):
        return {}
    checkpoint = start.checkpoint
    return from_rank_0(lambda: read_index(checkpoint))


def begin(
    modules: Modules, start: Start, stored: Index, gets_on: Callable[[], None] = lambda: None
) -> Progress:
    """Bring the model to where the run begins; every rank of the world calls it.

    stored: of `stored_at`. gets_on: called whenever some of it has been read, where replicas share
    the reading.
    Raises ValueError if a checkpoint does not fit the model.
    """
    match start:
        case Resume(checkpoint):
            return load_checkpoint(modules, checkpoint, stored, gets_on=gets_on)
        case FromWeights(checkpoint):
            _load_weights(modules, checkpoint, stored, gets_on=gets_on)
        case FromScratch():
            pass
    return Progress(step=0, samples=0)


def _load_weights(
    modules: Modules,
    checkpoint: Path,
    stored: Index,
    average: bool = False,
    gets_on: Callable[[], None] = lambda: None,
) -> None:
    """Load all weights, or their moving average where there is one.

    Adapters that the checkpoint lacks are new and keep their initial values. They add nothing
    before their first step, so the model is the one that was saved.
    """
    _check_no_adapter_is_lost(modules, checkpoint, stored)
    keys = averages(stored) if average else {}
    for module in modules.values():
        module.settle()
        pieces = module.pieces("load", with_optimizer=False)
        wanted = (replace(piece, key=keys.get(piece.key, piece.key)) for piece in pieces)
        left = (p for p in wanted if p.key in stored or not is_adapter(p.key))
        read_shared(checkpoint, stored, left, module.replicas, gets_on)
        module.follow_weights()


def _check_no_adapter_is_lost(modules: Modules, checkpoint: Path, stored: Collection[str]) -> None:
    """Raise ValueError if a checkpoint has adapters where this rank's model has none.

    They would silently be left out.
    """
    adapters = [name for name in stored if is_adapter(name)]
    for name, module in modules.items():
        adapts = any(is_adapter(piece.key) for piece in module.pieces("load", False))
        if not adapts and any(key.startswith(f"{name}.") for key in adapters):
            key = dotted(recipe_key_of(name))
            raise ValueError(
                f"checkpoint {checkpoint} has adapters of {name}, but the recipe has no "
                f"{key}.lora: what they learned would be lost; give it the lora of their training"
            )


def load_checkpoint(
    modules: Modules,
    checkpoint: Path,
    stored: Index,
    with_optimizer: bool = True,
    average: bool = False,
    gets_on: Callable[[], None] = lambda: None,
) -> Progress:
    """Load weights (and optimizers) in this run's layout; every rank of the world calls it.

    stored: the checkpoint's tensors, by `read_index`.
    Without the optimizers, those of the model start afresh from the loaded weights. With them,
    what the checkpoint has nothing for starts afresh, and rank 0 says so on the console: adapters
    that are new, and the optimizer's state of weights that were frozen or had another optimizer.
    average: without optimizers, the moving average of the weights in their place.
    Raises ValueError if the checkpoint does not fit the model.
    """
    progress = from_rank_0(lambda: read_progress(checkpoint))
    if not with_optimizer:
        _load_weights(modules, checkpoint, stored, average, gets_on)
        return progress
    _check_no_adapter_is_lost(modules, checkpoint, stored)
    facts: set[tuple[str, str]] = set()
    for name, module in modules.items():
        module.settle()
        wanted = list(module.pieces("load", with_optimizer=True))
        facts |= {(name, fact) for fact in _facts(wanted, stored)}
        read = resumed(wanted, stored, progress.updates)
        read_shared(checkpoint, stored, read, module.replicas, gets_on)
    _say(facts, stored)
    return progress


def _without_state(wanted: Iterable[Piece], stored: Collection[str]) -> set[str]:
    """The parameters that need Adam's moments and find none."""
    kinds = ((key, *kind_of(key)) for key in (piece.key for piece in wanted) if key not in stored)
    return {parameter for _, kind, parameter in kinds if kind in MOMENTS}


def resumed(wanted: Iterable[Piece], stored: Collection[str], step: int) -> list[Piece]:
    """The wanted pieces to read; others stay as the model and its optimizer began.

    step: updates of the run. An older checkpoint does not say how many each parameter has had.
    """
    wanted = list(with_masters(wanted, stored))
    afresh = _without_state(wanted, stored)
    found = []
    for piece in wanted:
        kind, parameter = kind_of(piece.key)
        if kind in (STEP, *MOMENTS) and parameter in afresh:
            continue
        if kind == STEP and piece.key not in stored:
            piece.values.fill_(step)
        elif piece.key in stored or not (kind or is_adapter(parameter)):
            found.append(piece)  # a weight that is missing will be named
    return found


_ADAPTERS, _AFRESH, _KEEPS = "new adapters", "fresh state", "keeps state"


def _facts(wanted: Sequence[Piece], stored: Collection[str]) -> Iterator[str]:
    """What this rank knows of how a module goes on."""
    parameters = {kind_of(piece.key)[1] for piece in wanted}
    if any(is_adapter(name) and name not in stored for name in parameters):
        yield _ADAPTERS
    if not all(map(is_adapter, _without_state(wanted, stored))):
        yield _AFRESH
    if any(kind_of(piece.key)[0] in MOMENTS for piece in wanted):
        yield _KEEPS


def _say(facts: set[tuple[str, str]], stored: Collection[str]) -> None:
    """Print on rank 0 what is not as it was for a module; every rank of the world calls it."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, facts)
    known = set[tuple[str, str]]().union(*of_ranks)
    had = {kind_of(key)[1].partition(".")[0] for key in stored if kind_of(key)[0] in MOMENTS}
    lines = {
        f"{name}: the checkpoint lacks its adapters; they begin as drawn"
        for name, fact in known
        if fact == _ADAPTERS
    } | {
        f"{name}: weights that the checkpoint has no optimizer state of (they were frozen, or "
        f"another optimizer trained them) begin with a fresh one, at its own step 0"
        for name, fact in known
        if fact == _AFRESH
    }
    lines |= {
        f"{name}: its optimizer state in the checkpoint is left out: it is frozen now, or its "
        f"optimizer keeps none"
        for name in had
        if (name, _KEEPS) not in known
    }
    if dist.get_rank() == 0:
        for line in sorted(lines):
            print(line, flush=True)
