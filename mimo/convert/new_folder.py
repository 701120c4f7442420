"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo.errors import InputError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``target`` at the end and is gone after an error.

    Raises InputError, before anything is written, when ``target`` holds something already.
    """
    target = target.absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target} exists already; give an empty or a new folder")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
