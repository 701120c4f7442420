"""Checkpoints of a run: complete or absent, and independent of the layout that wrote them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from mimo.checkpoint.assets import ASSETS, collect_assets, copy_assets
from mimo.checkpoint.folder import Progress, latest_checkpoint, publish, read_progress
from mimo.checkpoint.start import FromScratch, FromWeights, Resume, Start
from mimo.engines.megatron.checkpoint import (
    State,
    load_sharded,
    optimizer_state,
    restore,
    save_sharded,
    stored_names,
    weights_state,
)
from mimo.engines.megatron.module import Module
from mimo.engines.megatron.parallel import follow_weights, wait_for_weights
from mimo.families.lora import is_adapter
from mimo.recipe.schema import Recipe, key_of
from mimo.recipe.source import dotted

Modules = Mapping[str, Module]
"""By name, the modules of which this rank owns a part."""


def _modules_state(
    modules: Modules, purpose: Literal["save", "load"], with_optimizer: bool = True
) -> State:
    state: State = {}
    for name, module in modules.items():
        wait_for_weights(module.chunks)
        for number, chunk in enumerate(module.raw):
            weights = weights_state(chunk, name, module.groups)
            part = dict(weights)
            if with_optimizer and module.optimizer is not None:
                part |= optimizer_state(module.optimizer, chunk, name, weights, purpose)
            # Local names repeat between chunks; on disk a tensor has its name in the whole model.
            state |= {f"{number}.{key}": value for key, value in part.items()}
    return state


def save_checkpoint(
    modules: Modules, progress: Progress, checkpoints: Path, recipe: Recipe, keep: int
) -> Path:
    """Write ``checkpoints/step_<n>`` and point ``latest`` at it; every rank of the world calls it.

    It is written under another name and renamed once all ranks are done, so a run that ends
    meanwhile leaves the previous checkpoint as the latest. Older ones beyond ``keep`` are removed.
    """
    rank = dist.get_rank()
    final = checkpoints / f"step_{progress.step}"
    partial = checkpoints / f".step_{progress.step}.partial"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    save_sharded(_modules_state(modules, "save"), partial)
    torch.save({"cpu": torch.get_rng_state()}, partial / f"rng_rank_{rank}.pt")
    dist.barrier()
    if rank == 0:
        # First those of the last checkpoint, in case their folder has since been moved away.
        before = latest_checkpoint(checkpoints)
        if before is not None:
            copy_assets(before / ASSETS, partial / ASSETS)
        collect_assets(recipe, partial / ASSETS)
        publish(partial, progress, recipe.to_yaml(), keep)
    dist.barrier()
    return final


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
    state = _modules_state(modules, "load", with_optimizer=False)
    _check_no_adapter_is_lost(modules, checkpoint)
    stored = stored_names(checkpoint)
    new = {k: v for k, v in state.items() if is_adapter(k) and v.key not in stored}
    loaded = load_sharded({k: v for k, v in state.items() if k not in new}, checkpoint)
    loaded |= {name: sharded.data for name, sharded in new.items()}
    _restore(modules, loaded, with_optimizer=False, step=0)


def _check_no_adapter_is_lost(modules: Modules, checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint has adapters where this rank's model has none.

    Megatron would silently leave them out.
    """
    stored = [name for name in stored_names(checkpoint) if is_adapter(name)]
    for name, module in modules.items():
        adapts = any(is_adapter(p) for chunk in module.raw for p, _ in chunk.named_parameters())
        if not adapts and any(key.startswith(f"{name}.") for key in stored):
            key = dotted(key_of(name))
            raise ValueError(
                f"checkpoint {checkpoint} has adapters of {name}, but the recipe has no "
                f"{key}.lora: what they learned would be lost; give that of their training"
            )


def load_checkpoint(modules: Modules, checkpoint: Path, with_optimizer: bool = True) -> Progress:
    """Load weights (and optimizers) in this run's layout; every rank of the world calls it.

    Without the optimizers, those of the model start afresh from the loaded weights. With them the
    random state is restored too, if the world has the size that it had when saving.
    Raises ValueError if the checkpoint does not fit the model.
    """
    progress = read_progress(checkpoint)
    state = _modules_state(modules, "load", with_optimizer)
    _check_no_adapter_is_lost(modules, checkpoint)
    _restore(modules, load_sharded(state, checkpoint), with_optimizer, progress.step)
    states = sorted(checkpoint.glob("rng_rank_*.pt"))
    if with_optimizer and len(states) == dist.get_world_size():
        own = checkpoint / f"rng_rank_{dist.get_rank()}.pt"
        torch.set_rng_state(torch.load(own, weights_only=True)["cpu"])
    return progress


def _restore(modules: Modules, loaded: State, with_optimizer: bool, step: int) -> None:
    """Copy what was loaded into the model, whose optimizers have done ``step`` updates."""
    for name, module in modules.items():
        optimizer = module.optimizer if with_optimizer else None
        for number, chunk in enumerate(module.raw):
            prefix = f"{number}."
            own = {k.removeprefix(prefix): v for k, v in loaded.items() if k.startswith(prefix)}
            restore(chunk, optimizer, name, own, step)
    if not with_optimizer:
        for module in modules.values():
            if module.optimizer is not None:
                follow_weights(module.optimizer)
