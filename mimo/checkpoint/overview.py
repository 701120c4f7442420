"""What a checkpoint holds, as `mimo checkpoint inspect` shows it, from its small files alone."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mimo.checkpoint.folder import read_progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.integrity import listed_files
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.engines.piece import EMA, MASTER, MOMENTS, kind_of
from mimo.errors import InputError
from mimo.families.lora import is_adapter
from mimo.parallel.build import build_layout


@dataclass
class _Held:
    """What a checkpoint holds of a module; numbers of elements, and bytes."""

    weights: int = 0
    adapters: int = 0
    dtypes: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    optimizer_bytes: int = 0

    def add(self, key: str, tensor: StoredTensor) -> None:
        count = math.prod(tensor.shape)
        if kind := kind_of(key)[0]:
            self.kinds.add(kind)
            self.optimizer_bytes += count * tensor.dtype.itemsize
            return
        self.dtypes.add(str(tensor.dtype).removeprefix("torch."))
        if is_adapter(key):
            self.adapters += count
        else:
            self.weights += count

    @property
    def optimizer(self) -> str:
        """What it keeps, in words."""
        words = ["Adam"] if self.kinds & set(MOMENTS) else []
        words += ["fp32 weights"] if MASTER in self.kinds else []
        words += ["moving average"] if EMA in self.kinds else []
        size = f", {self.optimizer_bytes / 1e6:,.1f} MB" if words else ""
        return " and ".join(words) + size or "none"


def overview(checkpoint: Path) -> Group:
    """For the console. Raises InputError for a checkpoint that cannot be read."""
    progress, index = read_progress(checkpoint), read_index(checkpoint)
    held: defaultdict[str, _Held] = defaultdict(_Held)
    for key, tensor in index.items():
        held[kind_of(key)[1].partition(".")[0]].add(key, tensor)
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    grids = _grids(checkpoint, len({p.file for tensor in index.values() for p in tensor.pieces}))
    table = Table("module", "parameters", "adapters", "dtype", "optimizer", "layout")
    # Names come from a file, so they are text without markup.
    for module, own in held.items():
        cells = [module, f"{own.weights:,}", f"{own.adapters:,}" if own.adapters else "-"]
        cells += [", ".join(sorted(own.dtypes)), own.optimizer, grids.get(module, "unknown")]
        table.add_row(*map(Text, cells))
    sums = "with checksums" if listed_files(checkpoint) is not None else "without checksums"
    size = sum(path.stat().st_size for path in files)
    lines = [
        f"{checkpoint}: step {progress.step}, {progress.samples:,} samples used",
        f"{size / 1e6:,.1f} MB in {len(files)} files, {sums}",
    ]
    return Group(*map(Text, lines), table)


def _grids(checkpoint: Path, num_ranks: int) -> dict[str, str]:
    """The grid of every module, as its recipe says; nothing if this version cannot read it."""
    try:
        layout = build_layout(load_recipe(checkpoint / "recipe.yaml"), num_ranks)
    except (InputError, OSError):
        return {}
    return {name: str(grid) for name, grid in layout.grids.items()}
