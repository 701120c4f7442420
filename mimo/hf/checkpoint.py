"""A Hugging Face checkpoint whose tensors have been checked against a model of ours."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mimo.errors import RecipeError
from mimo.families.keymap import Run, Source, Weight
from mimo.hf.architectures import Architecture, KeyLayout, best_layout
from mimo.hf.folder import WeightsFolder

# Buffers that older versions stored; they follow from the configuration.
_COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
_COMPARED_ROWS = 1 << 14


class HFCheckpoint:
    """Tensors of a folder under the names of the key map, whatever they are called on disk.

    weights: what is to be read, by module. Building it reads headers only (and a head that is
    stored beside the embedding that it is tied to).

    Raises RecipeError with every tensor that is missing, unknown or has another shape.
    """

    def __init__(
        self, path: Path, architecture: Architecture, weights: Mapping[str, Iterable[Weight]]
    ) -> None:
        self.folder = WeightsFolder(path)
        sources = {s.key: s for own in weights.values() for w in own for s in w.sources}
        self.layout: KeyLayout = best_layout(architecture, [*sources], self.folder.shapes)
        self._disk = {key: self.layout.on_disk(key) for key in sources}
        problems = [
            problem
            for key, source in sources.items()
            if (problem := self._problem_of(key, source)) is not None
        ]
        problems += self._unknown(architecture, set(weights), sources)
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

    def stored(self, source: Source) -> Tensor:
        """A whole tensor as it is stored."""
        return self.folder.read(self._disk[source.key])

    def num_bytes(self, source: Source) -> int:
        """Of a whole tensor as it is stored."""
        return math.prod(source.shape) * self.folder.dtypes[self._disk[source.key]].itemsize

    def order(self, weight: Weight) -> tuple[str, str]:
        """A sort key of weights by which files are read one after the other."""
        return self.folder.order(self._disk[weight.sources[0].key])

    def _problem_of(self, key: str, source: Source) -> str | None:
        disk = self._disk[key]
        shape = self.folder.shapes.get(disk)
        if shape is None:
            return f"  {disk} is missing"
        if shape != source.shape:
            return f"  {disk} is {list(shape)}, the configuration asks for {list(source.shape)}"
        return None

    def _unknown(
        self, architecture: Architecture, modules: set[str], sources: Mapping[str, Source]
    ) -> list[str]:
        known = set(self._disk.values())
        head = self.layout.on_disk("lm_head.weight")
        towers = tuple(self.layout.on_disk(prefix) for prefix in architecture.tower_prefixes)
        problems = []
        for disk in sorted(set(self.folder.shapes) - known):
            if disk.endswith(_COMPUTED):
                continue
            if disk == head and self._is_copy_of_embedding(disk, architecture):
                continue
            if modules == {"language"} and towers and disk.startswith(towers):
                continue  # the recipe has no encoders
            problems.append(f"  {disk} is unknown")
        return problems

    def _is_copy_of_embedding(self, head: str, architecture: Architecture) -> bool:
        """Whether the head of a model with tied embeddings is stored beside them, as it should."""
        embedding = self.layout.on_disk(architecture.language_prefix + "embed_tokens.weight")
        shape = self.folder.shapes.get(embedding)
        if shape is None or shape != self.folder.shapes[head]:
            return False
        for start in range(0, shape[0], _COMPARED_ROWS):
            rows = slice(start, start + _COMPARED_ROWS)
            if not torch.equal(self.folder.read(head, rows), self.folder.read(embedding, rows)):
                return False
        return True
