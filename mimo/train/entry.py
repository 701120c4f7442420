"""Where a rank begins: it settles environment, device and kernels, and then imports the engine.

Megatron imports Transformer Engine, which initialises the GPU. A wheel that does not fit raises an
AssertionError that Megatron does not expect.
"""

from __future__ import annotations

from typing import Any

from mimo.config.schema import Recipe
from mimo.device import local_device
from mimo.ops.acceleration import this_machine
from mimo.parallel.grids import Layout, variables_of
from mimo.runtime.environment import set_variables
from mimo.runtime.ranks import rank_environment


def run_rank(recipe: Recipe, layout: Layout, *args: Any) -> int:
    """Be one rank of a job launched on this machine; see `mimo.train.rank.run_rank`."""
    prepare_process(layout)
    from mimo.train.rank import run_rank as run

    return run(recipe, layout, *args)


def prepare_process(layout: Layout) -> None:
    """Choose what has to be known before the engine is imported, and look at the kernels.

    Raises InputError for a package of kernels that is installed but cannot be imported.
    """
    environment = rank_environment()
    assert environment is not None, "ranks run inside a launched job"
    set_variables(variables_of(layout, environment.rank))
    local_device(environment.local_rank)
    this_machine()
