"""Whether the ranks of a machine can hold a model, checked before anything is built.

What ranks keep of parameters is counted exactly, by `mimo.model.roles`. It is still a lower bound,
so what is refused cannot work: activations, buffers of communication and kernels, and the
tokenizer's vocabulary if the recipe gives no `vocab_size`, come on top.
"""

from __future__ import annotations

from collections.abc import Mapping

from mimo.config.schema import Recipe, key_of
from mimo.device import Memory
from mimo.errors import RecipeError
from mimo.model.roles import parameters_by_role
from mimo.parallel.grids import LANGUAGE, Layout

RANK_BYTES = 2**25
"""The least that a rank's process takes besides its model: pages that no other process shares."""


def check_processes(recipe: Recipe, num_ranks: int, memory: Memory) -> None:
    """Raise RecipeError unless ``num_ranks`` processes fit into the memory, without any model."""
    if num_ranks * RANK_BYTES > memory.available:
        message = (
            f"{num_ranks} ranks on this machine need {in_words(num_ranks * RANK_BYTES)} at least, "
            f"but it has {in_words(memory.available)} left; use fewer, or more machines"
        )
        raise RecipeError(recipe.problem((LANGUAGE, "grid"), message))


def check_memory(recipe: Recipe, layout: Layout, ranks: range, memory: Memory) -> None:
    """Raise RecipeError unless ``ranks``, which share ``memory``, can hold their modules."""
    if memory.is_of_processes:
        check_processes(recipe, len(ranks), memory)
    shared = [
        (one, len(range(max(one.ranks.start, ranks.start), min(one.ranks.stop, ranks.stop))))
        for one in parameters_by_role(recipe, layout)
    ]
    processes = len(ranks) * RANK_BYTES if memory.is_of_processes else 0
    needed = sum(one.total * count for one, count in shared) + processes
    if needed <= memory.available:
        return
    has = f"but {memory.name} has {in_words(memory.available)} left"
    largest, _ = max(shared, key=lambda pair: pair[0].total * pair[1])
    sizes = "; ".join(
        f"{one.role}: {count} x {in_words(one.total)}" for one, count in shared if count
    )
    shares = "tp or pp, set train.distributed_optimizer or train.precision: bf16"
    if layout.grids[largest.module].engine == "fsdp":
        # Between the microbatches of a step gradients are whole on every lane.
        shares = "dp / dp_replicate or tp, have fewer microbatches in a step"
    raise RecipeError(
        recipe.problem(
            (*key_of(largest.module), "model"),
            f"weights, gradients and optimizer state need {in_words(needed)} at least ({sizes}) "
            f"on {len(ranks)} rank{'s' * (len(ranks) > 1)} that share a memory, {has}; make the "
            f"model smaller, raise {shares}, or use more machines",
        )
    )


def memory_in_words(memory: Mapping[str, Mapping[str, int]]) -> str:
    """What `mimo.model.modules.MimoModel.memory` gives, for people to read."""
    parts = [
        f"{owner}: {', '.join(f'{in_words(size)} of {what}' for what, size in sizes.items())}"
        for owner, sizes in memory.items()
    ]
    return "; ".join(parts)


def in_words(num_bytes: float) -> str:
    """A size for people to read, such as `1.5 GiB`."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
    unit, size = next((one for one in units if num_bytes >= one[1]), units[-1])
    return f"{num_bytes / size:,.1f} {unit}"
