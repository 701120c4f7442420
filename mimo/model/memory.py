"""Whether the ranks of a machine can hold a model, checked before anything is built.

    bytes of a rank = parameters / (tp · pp) · bytes of a parameter

A parameter costs what is kept of it: the weight (bf16 2 bytes, fp32 4, fp64 8) and, if it is
trained, also the gradient (4; fp64 8) and the optimizer's state. That is a master copy for bf16 (4)
and two moments for Adam (4 each; fp64 8); with a distributed optimizer each rank keeps only
1 / (dp · cp) of it. The bytes are those that `mimo.engines.megatron.parallel` allocates.

This is a lower bound, so what is refused cannot work. It leaves out activations, buffers of
communication and kernels, adapters and a projector next to frozen weights, the tokenizer's
vocabulary if the recipe gives no `vocab_size`, and weights that each tensor-parallel rank has whole
(norms). It also ignores that the first and last stages hold the embedding as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mimo.device import Memory
from mimo.errors import RecipeError
from mimo.families.contracts import FamilySettings
from mimo.families.dtypes import DTYPES
from mimo.families.keymap import Weight, num_elements
from mimo.families.registry import (
    encoder_family,
    encoder_settings,
    language_family,
    language_settings,
)
from mimo.layout.grids import LANGUAGE, Layout
from mimo.recipe.schema import Recipe, Train, key_of

RANK_BYTES = 2**25
"""The least that a rank's process takes besides its model: pages that no other process shares."""


@dataclass(frozen=True)
class ModuleMemory:
    """One module's number of parameters, and what each of its ranks keeps of them."""

    parameters: int
    bytes_per_parameter: float
    bytes_per_rank: float


def parameters(recipe: Recipe) -> dict[str, int]:
    """Parameters of every module, vocabulary padding included, by its family's list of weights."""
    settings = language_settings(recipe)
    vocabulary = settings.padded_vocab_size(1)
    found = {
        name: _of_layers(
            encoder_settings(recipe, name),
            lambda own, name=name: encoder_family(recipe, name).weights_in_hf(
                own, settings.hidden_size
            ),
        )
        for name in recipe.encoders
    }
    found[LANGUAGE] = _of_layers(
        settings.model_copy(update={"vocab_size": vocabulary}),
        language_family(recipe).weights_in_hf,
    )
    return found


def _of_layers[S: FamilySettings](settings: S, weights: Callable[[S], list[Weight]]) -> int:
    """Elements of all weights. All layers have the same sizes, so counting two is enough."""
    one, two = (
        num_elements(weights(settings.model_copy(update={"num_layers": count}))) for count in (1, 2)
    )
    return one + (settings.num_layers - 1) * (two - one)


def bytes_per_parameter(train: Train, learns: bool, replicas: int) -> float:
    """What a rank keeps of a parameter. replicas: ranks that share its optimizer state, dp · cp."""
    weight = DTYPES[train.precision].itemsize
    number = max(4, weight)
    if not learns:
        return weight
    state = 2 * number * (train.optimizer == "adam") + 4 * (train.precision == "bf16")
    return weight + number + state / (replicas if train.distributed_optimizer else 1)


def module_memory(recipe: Recipe, layout: Layout) -> dict[str, ModuleMemory]:
    """What each rank of every module keeps, if stages and tensor-parallel ranks share evenly."""
    found = {}
    for name, count in parameters(recipe).items():
        part = recipe.module(name)
        grid = layout.grids[name]
        learns = part.freeze is False and part.lora is None
        each = bytes_per_parameter(recipe.train, learns, grid.dp * grid.cp)
        found[name] = ModuleMemory(count, each, count * each / (grid.tp * grid.pp))
    return found


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
    needs: dict[str, float] = {}
    found = module_memory(recipe, layout)
    for name, module in found.items():
        own = layout.grids[name].ranks
        count = max(0, min(own.stop, ranks.stop) - max(own.start, ranks.start))
        needs[name] = count * module.bytes_per_rank
    processes = len(ranks) * RANK_BYTES if memory.is_of_processes else 0
    needed = sum(needs.values()) + processes
    if needed <= memory.available:
        return
    has = f"but {memory.name} has {in_words(memory.available)} left"
    largest = max(needs, key=lambda name: needs[name])
    sizes = ", ".join(
        f"{name} {found[name].parameters:,} parameters · {found[name].bytes_per_parameter:.3g} B"
        for name in needs
        if needs[name]
    )
    raise RecipeError(
        recipe.problem(
            (*key_of(largest), "model"),
            f"weights, gradients and optimizer state need {in_words(needed)} at least ({sizes}) "
            f"on {len(ranks)} rank{'s' * (len(ranks) > 1)} that share a memory, {has}; make the "
            f"model smaller, raise tp or pp, set train.distributed_optimizer or train.precision: "
            f"bf16, or use more machines",
        )
    )


def in_words(num_bytes: float) -> str:
    """A size for people to read, such as `1.5 GiB`."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
    unit, size = next((one for one in units if num_bytes >= one[1]), units[-1])
    return f"{num_bytes / size:,.1f} {unit}"
