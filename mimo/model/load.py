"""Weights of a Hugging Face checkpoint into the modules of one rank: only what the rank owns."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mimo.engines.megatron.cut import Cut
from mimo.engines.megatron.groups import ProcessGroupCollection
from mimo.engines.megatron.initialize import global_name, stored_name
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
        whole = stored_name(global_name(name, chunk.config, groups.pp.rank(), number), chunk)
        if is_adapter(whole):
            continue
        assert whole in by_name, f"the key map does not say what {whole} consists of"
        found.append((by_name[whole], param))
    for weight, param in sorted(found, key=lambda pair: checkpoint.order(pair[0])):
        cut = Cut.of(param, groups.tp)
        for row, column, values in cut.rectangles(param.data.view(-1)):
            columns = slice(column, column + values.shape[1]) if cut.dim == 1 else None
            position = 0
            for run in weight.rows(row, row + len(values)):
                rows = values[position : position + run.count]
                rows.copy_(checkpoint.matrix(run, columns).view_as(rows))
                position += run.count
            values[position:].zero_()  # padding
