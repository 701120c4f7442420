"""Checks that the ranks of a machine can hold a model, before anything is built.

Weights, gradients and optimizer state are counted exactly, by `mimo.model.roles`. The sum is a
lower bound, so a refused model cannot fit: activations, buffers of communication and kernels, and
the tokenizer's vocabulary if the recipe gives no `vocab_size`, come on top.
"""

from __future__ import annotations

from collections.abc import Mapping

from mimo.config.schema import Recipe, key_of
from mimo.device import Memory
from mimo.errors import RecipeError
from mimo.model.roles import parameters_by_role
from mimo.parallel.grids import LANGUAGE, Layout

RANK_BYTES = 2**25
"""The least memory of a rank's process besides its model: pages that no other process shares."""


def check_processes(recipe: Recipe, num_ranks: int, memory: Memory) -> None:
    """Raise RecipeError unless ``num_ranks`` processes fit into the memory, without any model."""
    if num_ranks * RANK_BYTES > memory.available:
        message = (
            f"{num_ranks} ranks on this machine need {format_bytes(num_ranks * RANK_BYTES)} at "
            f"least, but it has {format_bytes(memory.available)} left; use fewer, or more machines"
        )
        raise RecipeError(recipe.problem((LANGUAGE, "grid"), message))


def check_memory(recipe: Recipe, layout: Layout, ranks: range, memory: Memory) -> None:
    """Raise RecipeError unless ``ranks``, which share ``memory``, can hold their modules."""
    if memory.is_of_processes:
        check_processes(recipe, len(ranks), memory)
    shared = [
        (role, len(range(max(role.ranks.start, ranks.start), min(role.ranks.stop, ranks.stop))))
        for role in parameters_by_role(recipe, layout)
    ]
    processes = len(ranks) * RANK_BYTES if memory.is_of_processes else 0
    needed = sum(role.total * count for role, count in shared) + processes
    if needed <= memory.available:
        return
    available = f"but {memory.name} has {format_bytes(memory.available)} left"
    largest, _ = max(shared, key=lambda pair: pair[0].total * pair[1])
    sizes = "; ".join(
        f"{role.role}: {count} x {format_bytes(role.total)}" for role, count in shared if count
    )
    shares = "tp or pp, set train.distributed_optimizer or train.precision: bf16"
    if layout.grids[largest.module].engine == "fsdp":
        # Between the microbatches of a step gradients are whole on every lane.
        shares = "dp / dp_replicate or tp, have fewer microbatches in a step"
    raise RecipeError(
        recipe.problem(
            (*key_of(largest.module), "model"),
            f"weights, gradients and optimizer state need {format_bytes(needed)} at least "
            f"({sizes}) on {len(ranks)} rank{'s' * (len(ranks) > 1)} that share a memory, "
            f"{available}; make the model smaller, raise {shares}, or use more machines",
        )
    )


def format_memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    """Return the result of `mimo.model.modules.MimoModel.memory` as text."""
    parts = [
        f"{owner}: {', '.join(f'{format_bytes(size)} of {what}' for what, size in sizes.items())}"
        for owner, sizes in memory.items()
    ]
    return "; ".join(parts)


def format_bytes(num_bytes: float) -> str:
    """Return a size as text, such as `1.5 GiB`."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
    unit, size = next((u for u in units if num_bytes >= u[1]), units[-1])
    return f"{num_bytes / size:,.1f} {unit}"
