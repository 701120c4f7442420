"""Tensors of our checkpoints, read and written one by one without building the model.

The format is that of Megatron's `dist_checkpointing`: torch's distributed checkpoints.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem


def describe(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by key."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(
    checkpoint: Path, wanted: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Whole tensors by key, as `describe` describes them; no others are read."""
    state = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in wanted.items()}
    with _alone():
        state_dict_loader.load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return state


def write(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensor_of: Callable[[str], Tensor],
) -> None:
    """Write a checkpoint's tensors; each is asked for when its turn comes, in order."""
    described = {k: torch.empty(shape, dtype=dtype, device="meta") for k, shape in shapes.items()}
    with _alone():
        state_dict_saver.save(
            described,
            # torch keeps the tensors of a file until it is complete: so one file each.
            storage_writer=FileSystemWriter(folder, single_file_per_rank=False),
            planner=_AskingPlanner(tensor_of),
            no_dist=True,
        )
    # What else Megatron expects of a checkpoint: its kind, and a state that is not sharded.
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    torch.save({}, folder / "common.pt")


class _AskingPlanner(DefaultSavePlanner):
    """Plans from descriptions and asks for a tensor when the writer wants it."""

    def __init__(self, tensor_of: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.tensor_of = tensor_of

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.tensor_of(write_item.index.fqn)


@contextmanager
def _alone() -> Iterator[None]:
    """Silence torch's remark that there are no other processes, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
