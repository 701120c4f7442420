"""Weights of a Hugging Face checkpoint into the modules of one rank: only what the rank owns."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mimo.engines.megatron.groups import ProcessGroupCollection
from mimo.engines.megatron.initialize import global_name
from mimo.families.keymap import Weight
from mimo.families.lora import is_adapter
from mimo.hf.checkpoint import HFCheckpoint


@torch.no_grad()
def load_weights(
    chunk: nn.Module,
    number: int | None,
    groups: ProcessGroupCollection,
    checkpoint: HFCheckpoint,
    weights: Iterable[Weight],
) -> None:
    """Fill this rank's chunk of a module, in place and in the dtype of its parameters.

    number: the chunk's; None without interleaving. weights: of the whole module; adapters stay as
    they were drawn. No collective; each rank reads its own slices, tensor by tensor.
    """
    by_name = {weight.name: weight for weight in weights}
    found: list[tuple[Weight, nn.Parameter]] = []
    for name, param in chunk.named_parameters():
        whole = global_name(name, chunk.config, groups.pp.rank(), number)
        if whole == "output_layer.weight" and whole not in by_name:
            whole = "embedding.word_embeddings.weight"  # the copy on the last stage
        if is_adapter(whole):
            continue
        assert whole in by_name, f"the key map does not say what {whole} consists of"
        found.append((by_name[whole], param))
    for weight, param in sorted(found, key=lambda pair: checkpoint.order(pair[0])):
        _fill(param, weight, checkpoint, groups.tp.rank(), groups.tp.size())


def _fill(
    param: nn.Parameter, weight: Weight, checkpoint: HFCheckpoint, rank: int, size: int
) -> None:
    """Fill one parameter: its rows or, if columns are cut, this rank's columns of all rows."""
    split = size > 1 and bool(getattr(param, "tensor_model_parallel", False))
    dim, stride = (getattr(param, key, 0) for key in ("partition_dim", "partition_stride"))
    columns = None
    if split and dim == 1:
        columns = slice(rank * param.shape[1], (rank + 1) * param.shape[1])
    # Matrices that are stacked on top of each other are each cut separately.
    blocks = stride if split and dim == 0 else 1
    height = param.shape[0] // blocks
    for number in range(blocks):
        first = (number * size + rank) * height if split and dim == 0 else 0
        own = param.data[number * height : (number + 1) * height]
        _copy_rows(own, weight, checkpoint, first, columns)


def _copy_rows(
    own: Tensor, weight: Weight, checkpoint: HFCheckpoint, first: int, columns: slice | None
) -> None:
    """Copy the rows of ``weight`` from ``first`` on into ``own``; after the last comes padding."""
    position = 0
    for run in weight.rows(first, first + own.shape[0]):
        own[position : position + run.count].copy_(checkpoint.matrix(run, columns))
        position += run.count
    own[position:].zero_()
