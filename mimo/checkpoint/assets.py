"""What lies beside a checkpoint's tensors: recipe, configuration, tokenizer; and its overview.

``assets/`` has copies of the small files of the model's and the tokenizer's folders. So a moved
checkpoint answers questions and can be exported, even if those folders are gone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mimo.checkpoint.folder import read_progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.manifest import listed_files
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.config.schema import Recipe, read_recipe
from mimo.engines.contract import EMA, MASTER, MOMENTS, kind_of
from mimo.errors import InputError
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
_NOT_COPIED = (".safetensors.index.json", "mimo_tiny.json")


def copy_assets(source: Path, target: Path) -> None:
    """Copy the small files of a folder into ``target``, replacing those of the same name."""
    for path in _small_files(source).values():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)


def _small_files(folder: Path) -> dict[str, Path]:
    """Return the small files of a folder by name; none if there is no folder."""
    return {
        path.name: path
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if path.suffix in _SUFFIXES and not path.name.endswith(_NOT_COPIED)
    }


def collect_assets(recipe: Recipe, target: Path) -> None:
    """Copy the assets of a recipe's model into ``target``, if their folders exist.

    If the tokenizer is in another folder than the model, only the tokenizer's files go beside the
    model's, for exports: the folder may hold another model.
    """
    tokenizer = Path(recipe.data.tokenizer)
    if recipe.init_from is not None:
        copy_assets(Path(recipe.init_from), target)
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
    """Return the recipe of a checkpoint, with the tokenizer in ``assets/`` if its folder is gone.

    Raises RecipeError.
    """
    recipe = load_recipe(checkpoint / "recipe.yaml")
    copy = _tokenizer_copy(checkpoint)
    if Path(recipe.data.tokenizer).is_dir() or copy is None:
        return recipe
    data = recipe.data.model_copy(update={"tokenizer": str(copy)})
    return recipe.model_copy(update={"data": data})


def portable_recipe(checkpoint: Path) -> Recipe:
    """Return the recipe of a checkpoint with its copies as the folders of tokenizer and model.

    A module of transformers is built by the configuration in the latter. The checkpoint of an
    earlier version has no copy; then the recipe's folder is used. Raises RecipeError.
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
    """Yield small files of the recipe's folders that differ from the copies, are new, or are gone.

    A folder that is gone counts as unchanged: the checkpoint may have been moved.
    """
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


# ------------------------------------------------------------------------------ overview


@dataclass
class _Contents:
    """What a checkpoint holds of a module: numbers of elements, and bytes."""

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

    def optimizer(self) -> str:
        parts = ["Adam"] if self.kinds & set(MOMENTS) else []
        parts += ["fp32 weights"] if MASTER in self.kinds else []
        parts += ["moving average"] if EMA in self.kinds else []
        size = f", {self.optimizer_bytes / 1e6:,.1f} MB" if parts else ""
        return " and ".join(parts) + size or "none"


def overview(checkpoint: Path) -> Group:
    """Return what `mimo checkpoint inspect` prints, from the small files alone.

    Raises InputError for a checkpoint that cannot be read.
    """
    progress, index = read_progress(checkpoint), read_index(checkpoint)
    modules: defaultdict[str, _Contents] = defaultdict(_Contents)
    for key, tensor in index.items():
        modules[kind_of(key)[1].partition(".")[0]].add(key, tensor)
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    num_ranks = len({piece.file for tensor in index.values() for piece in tensor.pieces})
    try:
        layout = build_layout(load_recipe(checkpoint / "recipe.yaml"), num_ranks)
        grids = {name: str(grid) for name, grid in layout.grids.items()}
    except (InputError, OSError):  # a recipe of another version
        grids = {}
    table = Table("module", "parameters", "adapters", "dtype", "optimizer", "layout")
    # Names come from a file, so they are text without markup.
    for name, module in modules.items():
        cells = [name, f"{module.weights:,}", f"{module.adapters:,}" if module.adapters else "-"]
        cells += [", ".join(sorted(module.dtypes)), module.optimizer(), grids.get(name, "unknown")]
        table.add_row(*map(Text, cells))
    sums = "with checksums" if listed_files(checkpoint) is not None else "without checksums"
    size = sum(path.stat().st_size for path in files)
    lines = [
        f"{checkpoint}: step {progress.step}, {progress.samples:,} samples used",
        f"{size / 1e6:,.1f} MB in {len(files)} files, {sums}",
    ]
    return Group(*map(Text, lines), table)
