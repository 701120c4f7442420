"""Sharded checkpoints with Megatron's `dist_checkpointing`: written in one layout, read in any."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mimo.engines.megatron.optimizer_state import Share, share_of, tensors_to_load, tensors_to_save

State = dict[str, Any]


def _module_state(module: nn.Module, prefix: str, metadata: dict, tp_group) -> State:
    """Sharded tensors of a module, even if its class is not one of Megatron's."""
    if hasattr(module, "sharded_state_dict"):
        return cast("Any", module).sharded_state_dict(
            prefix=prefix, sharded_offsets=(), metadata=metadata
        )
    own = dict(module.named_parameters(recurse=False))
    state = make_sharded_tensors_for_checkpoint(
        own, prefix, tp_group=tp_group, dp_cp_group=metadata["dp_cp_group"]
    )
    for name, child in module.named_children():
        state.update(_module_state(child, f"{prefix}{name}.", metadata, tp_group))
    return state


def weights_state(module: nn.Module, name: str, groups: ProcessGroupCollection) -> State:
    """Sharded weights of this rank's chunk of module ``name``; keys are ``<name>.<parameter>``."""
    metadata = {"dp_cp_group": groups.dp_cp, "non_homogeneous_layers": True}
    state = _module_state(module, f"{name}.", metadata, groups.tp)
    # Extra state belongs to fp8 layers, which we do not use.
    return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


def _shares(optimizer: MegatronOptimizer, module: nn.Module) -> Iterator[tuple[str, Share]]:
    """(parameter, what this rank's optimizer holds of it), created first if need be."""
    base = optimizer.optimizer
    assert base is not None, "a module that trains has parameters"
    optimizer.init_state_fn(base, optimizer.config)
    for name, param in module.named_parameters():
        if param.requires_grad:
            yield name, share_of(optimizer, param)


def optimizer_state(
    optimizer: MegatronOptimizer,
    module: nn.Module,
    name: str,
    weights: State,
    purpose: Literal["save", "load"],
) -> State:
    """Sharded optimizer tensors, cut like the ``weights`` (`weights_state`) they belong to.

    Those of a distributed optimizer have the same form, so either can load what the other saved.
    Every rank of the module calls it.
    """
    whole_tensors = tensors_to_save if purpose == "save" else tensors_to_load
    state: State = {}
    for local, share in _shares(optimizer, module):
        key = f"{name}.{local}"
        for kind, tensor in whole_tensors(optimizer, share).items():
            state[f"{kind}.{key}"] = make_sharded_optimizer_tensor(
                weights[key], tensor, f"optimizer.{kind}"
            )
    return state


@torch.no_grad()
def restore(
    module: nn.Module, optimizer: MegatronOptimizer | None, name: str, loaded: State, step: int
) -> None:
    """Copy loaded tensors into a module and, if given, its optimizer after ``step`` updates.

    Raises KeyError for a parameter that was not loaded.
    """
    for local, param in module.named_parameters():
        param.copy_(loaded[f"{name}.{local}"])
    if optimizer is None:
        return
    for local, share in _shares(optimizer, module):
        for kind, tensor in share.tensors.items():
            whole = loaded[f"{kind}.{name}.{local}"]
            tensor.copy_(whole.view(-1)[share.start : share.end].view_as(tensor))
    base = optimizer.optimizer
    assert base is not None
    for state in base.state.values():
        # One tensor each: a shared one would be advanced once per parameter.
        if "step" in state:
            state["step"] = torch.full_like(state["step"], step)


def save_sharded(state: State, directory: Path) -> None:
    """Write a sharded state; every rank of the world calls it with its part."""
    # Synchronous saves need no manager process, whose start would import everything again.
    cast("Any", filesystem_async)._results_queue = queue.Queue()
    dist_checkpointing.save(state, str(directory))


def stored_names(directory: Path) -> set[str]:
    """Names of all tensors of a checkpoint, as in the whole model; no collective."""
    # Megatron's reader of metadata does not know all properties that torch 2.15 writes.
    return set(FileSystemReader(directory).read_metadata().state_dict_metadata)


def _check_vocabulary(state: State, directory: Path) -> None:
    """Raise ValueError for a checkpoint with another vocabulary than the model's.

    Megatron would silently fill in missing rows of an embedding or head and leave out surplus
    ones. It does so because vocabulary padding may differ; ours is the same in every layout.
    """
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    for wanted in state.values():
        if not (isinstance(wanted, ShardedTensor) and wanted.allow_shape_mismatch):
            continue
        found = stored.get(wanted.key)
        if isinstance(found, TensorStorageMetadata) and found.size[0] != wanted.global_shape[0]:
            raise ValueError(
                f"checkpoint {directory}: {wanted.key} has {found.size[0]} rows, but the model has "
                f"{wanted.global_shape[0]}; give the tokenizer, language.model.vocab_size and "
                f"language.model.vocab_multiple of its training"
            )


def load_sharded(state: State, directory: Path) -> State:
    """Read the parts that ``state`` describes; every rank of the world calls it.

    Raises ValueError when the checkpoint lacks something, or has another vocabulary.
    """
    _check_vocabulary(state, directory)
    try:
        return cast("State", dist_checkpointing.load(state, str(directory)))
    except Exception as error:
        raise ValueError(f"checkpoint {directory} cannot be loaded: {error}") from error
