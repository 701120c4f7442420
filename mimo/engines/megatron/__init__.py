"""The engine adapter: the only part of the project that imports Megatron-core.

The names of `mimo.engines.megatron.api` are names of this package, too. They load on first use,
because importing Megatron takes about ten seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mimo.engines.megatron.notices import leave_out_notices

if TYPE_CHECKING:
    from mimo.engines.megatron.api import *  # noqa: F403

leave_out_notices()  # whoever imports the engine comes through here first


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api"), name)
