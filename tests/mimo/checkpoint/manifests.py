"""Checkpoints with checksums, made and damaged by tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from mimo.checkpoint import manifest
from mimo.checkpoint.folder import Progress, write_progress
from mimo.checkpoint.manifest import Sum, Summing
from mimo.checkpoint.tensors import write_index, write_pieces
from mimo.engines.contract import Piece


def write_manifest(checkpoint: Path) -> None:
    """List every file of a checkpoint with its size and checksums."""
    sums = dict[str, Sum]()
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        if path.name != "manifest.json":
            summing = Summing()
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    summing.add(chunk)
            written = summing.sum("")
            has_blocks = path.suffix == ".safetensors"
            name = path.relative_to(checkpoint).as_posix()
            sums[name] = written if has_blocks else replace(written, blocks="")
    manifest.write_manifest(checkpoint, sums)


def finish(folder: Path, num_ranks: int) -> None:
    """Add index and manifest to the ranks' files, so that they can be read."""
    write_index(folder, num_ranks)
    write_manifest(folder)


def small_checkpoint(checkpoints: Path, step: int, recipe: str = "name: x\n") -> Path:
    """A whole checkpoint of one tensor, cut over two ranks, and `latest` that names it."""
    folder = checkpoints / f"step_{step}"
    (folder / "assets").mkdir(parents=True)
    whole = torch.arange(4000.0).view(40, 100) + step
    for rank, (row, rows) in enumerate([(0, 25), (25, 15)]):
        part = whole[row : row + rows]
        write_pieces(folder, rank, [Piece("language.w", (40, 100), row, 0, part)])
    write_index(folder, 2)
    write_progress(folder, Progress(step, 4 * step))
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "assets" / "tokenizer.json").write_text("{}")
    write_manifest(folder)
    (checkpoints / "latest").write_text(folder.name)
    os.utime(folder, (1000 + step, 1000 + step))
    return folder


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a bit of a tensor": ("tensors_1.safetensors", flip_bit, "has checksum"),
    "tensors cut off": ("tensors_1.safetensors", truncate, r"has \d+ bytes, not"),
    "tensors grown": ("tensors_0.safetensors", grow, r"has \d+ bytes, not"),
    "tensors missing": ("tensors_0.safetensors", Path.unlink, "is missing"),
    "a bit of the index": ("tensors.json", flip_bit, "has checksum|is damaged"),
    "no index": ("tensors.json", Path.unlink, "tensors.json is missing"),
    "no progress": ("progress.json", Path.unlink, "progress.json is missing"),
    "a bit of the recipe": ("recipe.yaml", flip_bit, "has checksum"),
    "a bit of the tokenizer": ("assets/tokenizer.json", flip_bit, "has checksum"),
    "manifest cut off": ("manifest.json", truncate, "manifest.json is damaged"),
}
"""A file of a checkpoint, what happens to it, and what is said of it."""
