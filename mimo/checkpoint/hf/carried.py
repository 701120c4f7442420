"""Carry tensors and files of the source folder to an export, bit for bit.

The tensors are not trained, such as further heads; the files are neither weights nor assets.
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from data.index.shards import first_three
from mimo.checkpoint.assets import RECORD, contents_of
from mimo.checkpoint.hf.conversion import Conversion
from mimo.checkpoint.hf.initial import COMPUTED
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.errors import InputError, StartError
from mimo.families.hf_config import read_json
from mimo.families.keymap import Source


@dataclass(frozen=True)
class Carried:
    """Tensors, with their bytes, and files to carry. to_disk: conversion of trained tensors."""

    folder: Path
    to_disk: Conversion
    stored: WeightsFolder | None
    tensors: Mapping[str, int]
    files: list[str]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        assert self.stored is not None, "all tensors are there"
        return {name: self.stored.read(name) for name in names}

    def copy_files(self, target: Path) -> None:
        """Copy the files that still exist; print what is carried and what is missing."""
        present = [name for name in self.files if (self.folder / name).is_file()]
        for name in present:
            shutil.copyfile(self.folder / name, target / name)
        sizes = {name: (target / name).stat().st_size for name in present}
        for kind, carried in (("tensors", self.tensors), ("files", sizes)):
            if carried:
                size = f"{sum(carried.values()):,} bytes"
                what = f"{len(carried)} {kind} ({first_three([*carried])}), {size}"
                print(f"carried unchanged from {self.folder}: {what}")
        if gone := [name for name in self.files if name not in sizes]:
            what = f"{len(gone)} files ({first_three(gone)})"
            print(f"no longer in {self.folder}, so not carried: {what}")


def carried_of(folder: Path, assets: Path, trained: list[Source]) -> Carried:
    """Return the tensors and files to carry. folder: `init_from`, which may no longer exist.

    assets: the checkpoint's. Raises InputError if tensors that were in the folder are gone.
    """
    contents = read_json(assets / RECORD) if (assets / RECORD).is_file() else None
    try:
        stored = WeightsFolder(folder)
        contents = contents or contents_of(folder)
    except StartError:
        raise
    except InputError:  # it was moved, or its weights removed
        stored = None
    if contents is None:
        raise InputError(
            f"init_from is {folder}, which cannot be read, and the checkpoint has no record of "
            f"what it held: put the folder back"
        )
    shapes = {name: tuple(shape) for name, shape in contents["tensors"].items()}
    conversion = Conversion.of_folder(assets, shapes)
    used = {disk for source in trained for disk in conversion.sources(source.key)}
    names = [name for name in shapes if name not in used]
    now = stored.shapes if stored else {}
    kept = {name for name in names if now.get(name) == shapes[name]}
    if lost := [name for name in names if name not in kept and not name.endswith(COMPUTED)]:
        raise InputError(
            f"init_from is {folder}, which no longer has {len(lost)} tensors that are not trained "
            f"but belong to the model ({first_three(lost)}): put the folder back"
        )
    dtypes = stored.dtypes if stored else {}
    tensors = {n: math.prod(shapes[n]) * dtypes[n].itemsize for n in names if n in kept}
    return Carried(folder, conversion, stored, tensors, contents["files"])
