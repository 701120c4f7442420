"""What lies beside a checkpoint's tensors: recipe, configuration, tokenizer; and its overview.

``assets/`` has copies of the small files of the model's and the tokenizer's folders. So a moved
checkpoint answers questions and can be exported, even if those folders are gone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mimo.checkpoint.folder import read_progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.checkpoint.manifest import listed_files
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.config.schema import Recipe, read_recipe
from mimo.engines.contract import EMA, MASTER, MOMENTS, kind_of
from mimo.errors import InputError
from mimo.families.hf_config import write_json
from mimo.families.keymap import is_adapter
from mimo.parallel.build import build_layout

ASSETS = "assets"
# In ``assets/``: the files of a tokenizer's folder that is not the model's. Its chat template may
# be in a file that the model's folder has as well.
_TOKENIZER = "tokenizer"
_SUFFIXES = {".json", ".jinja", ".txt", ".model"}
_TOKENIZER_FILES = (
    *("tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab", "merges.txt"),
    "chat_template",
)
# A file in ``assets/`` that records the contents of the model's folder.
RECORD = "source_folder.json"
_NOT_COPIED = (".index.json", "mimo_tiny.json", RECORD)
# Weights in any format; they would contradict the trained ones. Samples are no part of a model.
_NOT_CARRIED = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    ".tar",
}


def copy_assets(source: Path, target: Path) -> None:
    """Copy the small files of a folder into ``target``, replacing those of the same name."""
    for path in _small_files(source).values():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)


def _small_files(folder: Path) -> dict[str, Path]:
    """Return the small files of a folder by name; none if there is no folder."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    small = (path for path in paths if path.suffix in _SUFFIXES)
    return {path.name: path for path in small if not path.name.endswith(_NOT_COPIED)}


def contents_of(folder: Path) -> dict[str, Any]:
    """Return shapes of tensors by name under ``tensors``, and ``files`` that are no assets.

    Raises InputError for damaged weights.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    others = [path.name for path in files if path.suffix.lower() not in _SUFFIXES | _NOT_CARRIED]
    return {"tensors": WeightsFolder(folder).shapes, "files": others}


def collect_assets(recipe: Recipe, target: Path) -> None:
    """Copy the assets of a recipe's model into ``target``, if their folders exist.

    A record there says what the model's folder held at first, for exports. From a tokenizer in
    another folder only its own files go beside the model's, for exports.
    """
    tokenizer = Path(recipe.data.tokenizer)
    if recipe.init_from is not None:
        copy_assets(Path(recipe.init_from), target)
        if target.is_dir() and not (target / RECORD).exists():
            with suppress(InputError):  # the folder is gone, or its weights are
                write_json(target / RECORD, contents_of(Path(recipe.init_from)))
    if recipe.init_from == recipe.data.tokenizer or not tokenizer.is_dir():
        return
    copy_assets(tokenizer, target / _TOKENIZER)
    if recipe.init_from is None:
        return
    for path in target.iterdir():  # such as a template in a file that the other folder lacks
        if path.is_file() and path.name.startswith(_TOKENIZER_FILES):
            path.unlink()
    for path in sorted(tokenizer.iterdir()):
        if path.name.startswith(_TOKENIZER_FILES):
            shutil.copyfile(path, target / path.name)


def recipe_of(checkpoint: Path) -> Recipe:
    """Return the recipe of a checkpoint; its tokenizer is the copy if the folder is gone."""
    recipe, copy = load_recipe(checkpoint / "recipe.yaml"), _tokenizer_copy(checkpoint)
    if copy is None or Path(recipe.data.tokenizer).is_dir():
        return recipe
    return load_recipe(checkpoint / "recipe.yaml", [f"data.tokenizer={json.dumps(str(copy))}"])


def portable_recipe(checkpoint: Path) -> Recipe:
    """Return the recipe of a checkpoint with its copies as the folders of tokenizer and model.

    Without copies, in checkpoints of earlier versions, the folders stay. Raises RecipeError.
    """
    recipe, copies = _recorded_recipe(checkpoint), checkpoint / ASSETS
    folders = {"data.tokenizer": _tokenizer_copy(checkpoint)}
    if recipe.init_from is not None and (copies / "config.json").is_file():
        folders["init_from"] = copies
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in folders.items() if path]
    return load_recipe(checkpoint / "recipe.yaml", overrides)


def _recorded_recipe(checkpoint: Path) -> Recipe:
    """Return the recipe as recorded: it is complete, so no folder is read."""
    return read_recipe(checkpoint / "recipe.yaml", (), lambda data: ())


def _tokenizer_copy(checkpoint: Path) -> Path | None:
    """Return the folder in ``assets/`` with a tokenizer; None if there is none."""
    copies = (checkpoint / ASSETS / _TOKENIZER, checkpoint / ASSETS)
    return next((copy for copy in copies if (copy / "tokenizer.json").is_file()), None)


def changed_assets(checkpoint: Path) -> Iterator[Path]:
    """Yield small files that differ between the recipe's existing folders and the copies."""
    recipe, model_copy = _recorded_recipe(checkpoint), checkpoint / ASSETS
    tokenizer_copy = _tokenizer_copy(checkpoint)
    if tokenizer_copy is not None:
        yield from _changed_files(Path(recipe.data.tokenizer), tokenizer_copy)
    if recipe.init_from is not None and recipe.init_from != recipe.data.tokenizer:
        for path in _changed_files(Path(recipe.init_from), model_copy):
            if not path.name.startswith(_TOKENIZER_FILES):
                yield path


def _changed_files(folder: Path, copy: Path) -> Iterator[Path]:
    now, then = _small_files(folder), _small_files(copy)
    for name in sorted({*now, *then}) if now and then else ():
        if name not in now or name not in then or now[name].read_bytes() != then[name].read_bytes():
            yield folder / name


def _cells(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Describe the tensors of a module: parameters, adapters, dtype and optimizer."""
    counts, dtypes, kinds, optimizer_bytes = Counter[bool](), set[str](), set[str](), 0
    for key, tensor in tensors.items():
        count = math.prod(tensor.shape)
        if kind := kind_of(key)[0]:
            kinds.add(kind)
            optimizer_bytes += count * tensor.dtype.itemsize
        else:
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            counts[is_adapter(key)] += count
    parts = ["Adam"] if kinds & set(MOMENTS) else []
    parts += ["fp32 weights"] if MASTER in kinds else []
    parts += ["moving average"] if EMA in kinds else []
    size = f", {optimizer_bytes / 1e6:,.1f} MB" if parts else ""
    adapters = f"{counts[True]:,}" if counts[True] else "-"
    optimizer = " and ".join(parts) + size or "none"
    return [f"{counts[False]:,}", adapters, ", ".join(sorted(dtypes)), optimizer]


def overview(checkpoint: Path) -> Group:
    """Return what `mimo checkpoint inspect` prints. Raises InputError if it cannot be read."""
    progress, index = read_progress(checkpoint), read_index(checkpoint)
    modules = defaultdict[str, dict[str, StoredTensor]](dict)
    for key, tensor in index.items():
        modules[kind_of(key)[1].partition(".")[0]][key] = tensor
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    num_ranks = len({piece.file for tensor in index.values() for piece in tensor.pieces})
    try:
        layout = build_layout(load_recipe(checkpoint / "recipe.yaml"), num_ranks)
        grids = {name: str(grid) for name, grid in layout.grids.items()}
    except (InputError, OSError):  # a recipe of another version
        grids = {}
    table = Table("module", "parameters", "adapters", "dtype", "optimizer", "layout")
    # Names come from a file, so they are text without markup.
    for name, tensors in modules.items():
        cells = [name, *_cells(tensors), grids.get(name, "unknown")]
        table.add_row(*map(Text, cells))
    sums = "with checksums" if listed_files(checkpoint) is not None else "without checksums"
    size = sum(path.stat().st_size for path in files)
    lines = [
        f"{checkpoint}: step {progress.step}, {progress.samples:,} samples used",
        f"{size / 1e6:,.1f} MB in {len(files)} files, {sums}",
    ]
    return Group(*map(Text, lines), table)
