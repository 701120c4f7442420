"""What a run begins with: a checkpoint of whatever layout, or weights alone, or nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mimo.checkpoint.folder import Progress, read_progress
from mimo.checkpoint.start import FromScratch, FromWeights, Resume, Start
from mimo.checkpoint.tensors import averages, read_index, read_pieces
from mimo.engines.contract import Module, Purpose
from mimo.engines.piece import EMA, MASTER, Piece, key_of
from mimo.families.lora import is_adapter
from mimo.recipe.schema import key_of as recipe_key_of
from mimo.recipe.source import dotted

Modules = Mapping[str, Module]
"""By name, the modules of which this rank owns a part."""


def _pieces(modules: Modules, purpose: Purpose, with_optimizer: bool = True) -> list[Piece]:
    pieces: list[Piece] = []
    for module in modules.values():
        module.settle()
        pieces += module.pieces(purpose, with_optimizer)
    return pieces


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


def begin(modules: Modules, start: Start) -> Progress:
    """Bring the model to where the run begins; every rank of the world calls it.

    Raises ValueError if a checkpoint does not fit the model.
    """
    match start:
        case Resume(checkpoint):
            return load_checkpoint(modules, checkpoint)
        case FromWeights(checkpoint):
            _load_weights(modules, checkpoint)
        case FromScratch():
            pass
    return Progress(step=0, samples=0)


def _load_weights(modules: Modules, checkpoint: Path) -> None:
    """Load all weights. Adapters that the checkpoint lacks are new and keep their initial values.

    New adapters add nothing before their first step, so the model is the one that was saved.
    """
    stored = read_index(checkpoint)
    _check_no_adapter_is_lost(modules, checkpoint, stored)
    wanted = _pieces(modules, "load", with_optimizer=False)
    read_pieces(checkpoint, stored, [p for p in wanted if p.key in stored or not is_adapter(p.key)])
    for module in modules.values():
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
    modules: Modules, checkpoint: Path, with_optimizer: bool = True, average: bool = False
) -> Progress:
    """Load weights (and optimizers) in this run's layout; every rank of the world calls it.

    Without the optimizers, those of the model start afresh from the loaded weights.
    average: the moving average of the weights in their place.
    Raises ValueError if the checkpoint does not fit the model.
    """
    progress = read_progress(checkpoint)
    stored = read_index(checkpoint)
    _check_no_adapter_is_lost(modules, checkpoint, stored)
    wanted = _pieces(modules, "load", with_optimizer)
    if average:
        keys = averages(stored)
        wanted = [replace(piece, key=keys.get(piece.key, piece.key)) for piece in wanted]
    read_pieces(checkpoint, stored, with_masters(wanted, stored))
    for module in modules.values():
        if with_optimizer:
            module.set_steps(progress.updates)
        else:
            module.follow_weights()
    return progress


def provided_names(start: Start) -> frozenset[str]:
    """The parameters that `begin` is going to fill, by key; so the model need not draw them.

    Raises InputError for a checkpoint that cannot be read.
    """
    match start:
        case Resume(checkpoint) | FromWeights(checkpoint):
            return frozenset(read_index(checkpoint))
        case FromScratch():
            return frozenset()
