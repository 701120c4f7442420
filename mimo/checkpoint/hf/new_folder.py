"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo.errors import InputError


@contextmanager
def new_folder(target: Path, marker: str = "", writer: str = "") -> Iterator[Path]:
    """A folder to write to, which becomes ``target`` at the end and is gone after an error.

    marker: a file by which one is known that may be replaced. writer: the command that wrote it.
    Raises InputError, before anything is written, when ``target`` holds something else already.
    """
    target = target.absolute()
    _refuse_other_folders(target, marker, writer)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _refuse_other_folders(target, marker, writer)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_other_folders(target: Path, marker: str, writer: str) -> None:
    if target.is_dir() and (not any(target.iterdir()) or (marker and (target / marker).is_file())):
        return
    if target.exists() or target.is_symlink():
        said = f"exists and was not written by `{writer}`" if writer else "exists already"
        raise InputError(f"{target} {said}; give an empty or a new folder")
