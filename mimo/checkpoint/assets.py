"""What lies beside a checkpoint's tensors: recipe, configuration, tokenizer; and its overview.

``assets/`` has copies of the small files of the model's and the tokenizer's folders. So a moved
checkpoint answers questions and can be exported, even if those folders are gone. Only a generator's
autoencoder is not copied.
"""

import json
import math
import shutil
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mimo.checkpoint.folder import read_progress
from mimo.checkpoint.hf import pipelines
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.checkpoint.tensors import StoredTensor, read_index
from mimo.config.schema import Recipe, read_recipe
from mimo.engines.contract import kind_of
from mimo.errors import InputError
from mimo.families.hf_config import write_json

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
    for path in source.iterdir() if source.is_dir() else ():
        if path.suffix in _SUFFIXES and not path.name.endswith(_NOT_COPIED):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)


def contents_of(folder: Path) -> dict[str, Any]:
    """Return shapes under ``tensors``, names of other files under ``files``. Raises InputError."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    others = [path.name for path in files if path.suffix.lower() not in _SUFFIXES | _NOT_CARRIED]
    return {"tensors": WeightsFolder(folder).shapes, "files": others}


def collect_assets(recipe: Recipe, target: Path) -> None:
    """Copy the assets of a recipe's model into ``target``, if their folders exist.

    Exports need them. A record lists what the model's folder held at first. The files of a
    tokenizer in another folder replace those of the model.
    """
    tokenizer = Path(recipe.data.tokenizer)
    if recipe.init_from is not None:
        copy_assets(Path(recipe.init_from), target)
        pipelines.copy_small_files(recipe, target / pipelines.COPY)
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


def move_tokenizer(source: Path, target: Path) -> None:
    """Move the files of a tokenizer from a model's folder into a new one."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        if path.name.startswith(_TOKENIZER_FILES):
            path.rename(target / path.name)


def portable_recipe(checkpoint: Path) -> Recipe:
    """Return a checkpoint's recipe, with copies of its folders where stored. Raises RecipeError."""
    path, copies = checkpoint / "recipe.yaml", checkpoint / ASSETS
    with_tokenizer = [c for c in (copies / _TOKENIZER, copies) if (c / "tokenizer.json").is_file()]
    overrides = [f"data.tokenizer={json.dumps(str(folder))}" for folder in with_tokenizer[:1]]
    # The recipe is complete, so no folder need be read to know this.
    starts_from_folder = read_recipe(path, (), lambda data: ()).init_from is not None
    if starts_from_folder and (copies / "config.json").is_file():
        overrides.append(f"init_from={json.dumps(str(copies))}")
    return load_recipe(path, overrides)


def overview(checkpoint: Path) -> Group:
    """Return what `mimo checkpoint inspect` prints. Raises InputError if it cannot be read."""
    progress, index = read_progress(checkpoint), read_index(checkpoint)
    modules = defaultdict[str, dict[str, StoredTensor]](dict)
    for key, tensor in index.items():
        modules[kind_of(key)[1].partition(".")[0]][key] = tensor
    table = Table("module", "parameters", "dtype", "optimizer")
    for name, tensors in modules.items():
        weights = [tensor for key, tensor in tensors.items() if not kind_of(key)[0]]
        count = sum(math.prod(tensor.shape) for tensor in weights)
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights}
        state = {kind for key in tensors if (kind := kind_of(key)[0])}
        cells = [name, f"{count:,}", ", ".join(sorted(dtypes)), ", ".join(sorted(state)) or "none"]
        table.add_row(*map(Text, cells))  # names come from a file, so they are without markup
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    line = f"{checkpoint}: step {progress.step}, {progress.samples:,} samples used"
    return Group(Text(f"{line}, {size / 1e6:,.1f} MB"), table)
