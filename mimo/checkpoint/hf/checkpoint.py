"""A Hugging Face checkpoint whose tensors have been checked against a model of ours."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mimo.checkpoint.hf.architectures import Architecture, KeyLayout
from mimo.checkpoint.hf.folder import WeightsFolder
from mimo.errors import RecipeError
from mimo.families.keymap import Run, Source, Weight

# Buffers that older versions stored; they follow from the configuration.
_COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
_COMPARED_ROWS = 1 << 14


class HFCheckpoint:
    """Tensors of a folder under the names of the key map, whatever they are called on disk.

    weights: what is to be read, by module. Building it reads headers only (and a head that is
    stored beside the embedding that it is tied to). Raises RecipeError with every tensor that is
    missing, unknown or has another shape.
    """

    def __init__(
        self, path: Path, architecture: Architecture, weights: Mapping[str, Iterable[Weight]]
    ) -> None:
        self.folder = WeightsFolder(path)
        sources = {s.key: s for own in weights.values() for w in own for s in w.sources}
        # Of the layouts, the one that finds most of the names.
        self.layout: KeyLayout = max(
            architecture.layouts,
            key=lambda layout: sum(layout.on_disk(key) in self.folder.shapes for key in sources),
        )
        self._disk = {key: self.layout.on_disk(key) for key in sources}
        problems = [*self._unfit(sources), *self._unknown(architecture, set(weights))]
        if problems:
            raise RecipeError(f"{path} does not fit the model:", *problems)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds every number of all tensors."""
        used = {self.folder.dtypes[disk] for disk in self._disk.values()}
        return functools.reduce(torch.promote_types, used)

    def matrix(self, run: Run, columns: slice | None = None) -> Tensor:
        """The rows of a run, (count, C) or (count,), and of a matrix the given columns of them."""
        key, rows = self._disk[run.source.key], slice(run.start, run.start + run.count)
        if run.source.transposed:
            return self.folder.read(key, columns or slice(None), rows).T
        if columns is not None and len(run.source.shape) > 2:
            return run.source.matrix(self.folder.read(key, rows))[:, columns]
        return run.source.matrix(self.folder.read(key, rows, columns))

    def part(self, key: str, rows: slice, columns: slice) -> Tensor:
        """Rows of the tensor with this name in memory, and of a matrix these columns of them."""
        disk = self._disk[key]
        is_matrix = len(self.folder.shapes[disk]) == 2
        return self.folder.read(disk, rows, columns if is_matrix else None)

    def stored(self, sources: Iterable[Source]) -> dict[str, Tensor]:
        """Whole tensors as they are stored, by name in memory."""
        return {source.key: self.folder.read(self._disk[source.key]) for source in sources}

    def num_bytes(self, source: Source) -> int:
        """Of a whole tensor as it is stored."""
        return math.prod(source.shape) * self.folder.dtypes[self._disk[source.key]].itemsize

    def order(self, weight: Weight) -> tuple[str, str]:
        """A sort key of weights by which files are read one after the other."""
        return self.folder.order(self._disk[weight.sources[0].key])

    def _unfit(self, sources: Mapping[str, Source]) -> Iterator[str]:
        for key, source in sources.items():
            disk, needed = self._disk[key], list(source.shape)
            shape = self.folder.shapes.get(disk)
            if shape is None:
                yield f"  {disk} is missing"
            elif list(shape) != needed:
                yield f"  {disk} is {list(shape)}, the configuration asks for {needed}"

    def _unknown(self, architecture: Architecture, modules: set[str]) -> Iterator[str]:
        head = self.layout.on_disk("lm_head.weight")
        towers = tuple(self.layout.on_disk(prefix) for prefix in architecture.tower_prefixes)
        left_out = towers if modules == {"language"} else ()  # the recipe has no encoders
        for disk in sorted(set(self.folder.shapes) - set(self._disk.values())):
            if disk.endswith(_COMPUTED) or disk.startswith(left_out):
                continue
            if disk != head or not self._is_copy_of_embedding(disk, architecture):
                yield f"  {disk} is unknown"

    def _is_copy_of_embedding(self, head: str, architecture: Architecture) -> bool:
        embedding = self.layout.on_disk(architecture.language_prefix + "embed_tokens.weight")
        shape = self.folder.shapes.get(embedding)
        if shape is None or shape != self.folder.shapes[head]:
            return False
        read = self.folder.read
        parts = (slice(n, n + _COMPARED_ROWS) for n in range(0, shape[0], _COMPARED_ROWS))
        return all(torch.equal(read(head, rows), read(embedding, rows)) for rows in parts)
