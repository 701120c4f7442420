"""Estimates of the memory that a rank needs, by its role.

Weights, gradients and optimizer state are exact; activations and buffers are estimates for full
microbatches: see `mimo.model.activations`. The device's context, memory of libraries such as NCCL,
and fragmentation come on top.
"""

from dataclasses import asdict, replace
from itertools import pairwise

from mimo.config.schema import Recipe
from mimo.model.activations import Activations
from mimo.model.fsdp_activations import FsdpActivations
from mimo.model.module_sizes import CUT_BY_COLUMNS as CUT_BY_COLUMNS
from mimo.model.module_sizes import ModuleSizes
from mimo.model.module_sizes import RoleMemory as RoleMemory
from mimo.parallel.grids import Layout


def memory_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Return the memory of every encoder, then of the language model's different stages."""
    roles = []
    for role in parameters_by_role(recipe, layout):
        module = ModuleSizes(recipe, layout, role.module)
        kind = FsdpActivations if module.grid.engine == "fsdp" else Activations
        stage = module.grid.coords(role.ranks[0]).pp
        roles.append(replace(role, **asdict(kind(module).of_stage(stage))))
    return roles


def parameters_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Like `memory_by_role`, but of weights, gradients and optimizer state only."""
    roles: list[RoleMemory] = []
    for name, grid in layout.grids.items():
        module = ModuleSizes(recipe, layout, name)
        if grid.engine == "fsdp":
            roles.append(module.sharded_parameters())
            continue
        starts = sorted({0, min(1, grid.pp - 1), grid.pp - 1})
        roles += (module.stage_parameters(range(*ends)) for ends in pairwise([*starts, grid.pp]))
    return roles
