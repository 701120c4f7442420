"""Assets."""

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
from mimo.checkpoint.resume import listed_files
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.config.schema import Recipe, read_recipe
from mimo.engines.piece import EMA, MASTER, MOMENTS, kind_of
from mimo.errors import InputError
from mimo.families.lora import is_adapter
from mimo.parallel.build import build_layout

ASSETS = "assets"
_TOKENIZER = "tokenizer"
"""In ``assets/``, all of a tokenizer's folder that is not the model's: its template may be in a
file that the model's folder has as well."""
_SUFFIXES = {".json", ".jinja", ".txt", ".model"}
_TOKENIZER_FILES = (
    *("tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab", "merges.txt"),
    "chat_template",
)
_NOT_CARRIED = (".safetensors.index.json", "mimo_tiny.json")


def copy_assets(source: Path, target: Path) -> None:
    """Copy the small files of a folder into ``target``, replacing those of the same name."""
    for path in _small_files(source).values():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)


def _small_files(folder: Path) -> dict[str, Path]:
    """The small files of a folder, by name; none where there is no folder."""
    return {
        path.name: path
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if path.suffix in _SUFFIXES and not path.name.endswith(_NOT_CARRIED)
    }


def collect_assets(recipe: Recipe, target: Path) -> None:
    """Copy the assets of a recipe's model into ``target``, if their folders exist.

    If the tokenizer is in another folder than the model, only the tokenizer's files are put beside
    the model's, for exports: the folder may hold another model.
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
    """The recipe of a checkpoint; its tokenizer is the one in ``assets/`` if its folder is gone.

    Raises RecipeError.
    """
    recipe = load_recipe(checkpoint / "recipe.yaml")
    copy = tokenizer_copy(checkpoint)
    if Path(recipe.data.tokenizer).is_dir() or copy is None:
        return recipe
    data = recipe.data.model_copy(update={"tokenizer": str(copy)})
    return recipe.model_copy(update={"data": data})


def own_recipe(checkpoint: Path) -> Recipe:
    """The recipe of a checkpoint with its own copies for the folders of tokenizer and model.

    A module of transformers is built by the configuration in the latter. Where the checkpoint of an
    earlier version has no copy, the recipe's folder is used. Raises RecipeError.
    """
    recipe, carried = _recorded_recipe(checkpoint), checkpoint / ASSETS
    copies = {"data.tokenizer": tokenizer_copy(checkpoint)}
    if recipe.init_from is not None and (carried / "config.json").is_file():
        copies["init_from"] = carried
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in copies.items() if path]
    return load_recipe(checkpoint / "recipe.yaml", overrides)


def _recorded_recipe(checkpoint: Path) -> Recipe:
    """The recipe as it is in the checkpoint: it is complete, so no folder is asked."""
    return read_recipe(checkpoint / "recipe.yaml", (), lambda data: ())


def tokenizer_copy(checkpoint: Path) -> Path | None:
    """The folder with the tokenizer that a checkpoint carries; None if it carries none."""
    copies = (checkpoint / ASSETS / _TOKENIZER, checkpoint / ASSETS)
    return next((one for one in copies if (one / "tokenizer.json").is_file()), None)


def changed_assets(checkpoint: Path) -> Iterator[Path]:
    """Small files of the recipe's folders that are not as in the checkpoint, or new, or gone.

    A folder that is gone has changed nothing: the checkpoint may have been moved.
    """
    recipe, carried = _recorded_recipe(checkpoint), checkpoint / ASSETS
    model, tokenizer = recipe.init_from, recipe.data.tokenizer
    own = tokenizer_copy(checkpoint)
    shared = own == carried and model != tokenizer  # an earlier version put both into one folder
    copies = [(tokenizer, own, {True} if shared else {True, False})]
    if model is not None and model != tokenizer:
        copies.append((model, carried, {False}))
    for folder, copy, kinds in copies:
        now = _small_files(Path(folder))
        then = {} if copy is None else _small_files(copy)
        for name in sorted({*now, *then}) if now and then else ():
            paths = now.get(name), then.get(name)
            if name.startswith(_TOKENIZER_FILES) in kinds and not _are_equal(*paths):
                yield Path(folder) / name


def _are_equal(one: Path | None, other: Path | None) -> bool:
    return one is not None and other is not None and one.read_bytes() == other.read_bytes()


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
