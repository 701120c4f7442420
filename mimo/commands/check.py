"""`mimo check`: which rank does what."""

from typing import TYPE_CHECKING

from mimo.commands._shared import NumRanksOption, OverridesArgument, RecipeArgument, readable_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mimo.layout.grids import Layout
    from mimo.model.roles import RoleMemory
    from mimo.recipe.schema import Recipe, Train


@readable_errors
def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
) -> None:
    """Validate a recipe and print which rank does what."""
    from mimo.hf.recipes import load_phases
    from mimo.launch.environment import VARIABLES
    from mimo.layout.grids import num_microbatches
    from mimo.model.recipe_checks import check_recipe
    from mimo.model.roles import memory_by_role

    phased = load_phases(recipe, overrides or [])
    layouts = phased.each(lambda recipe: check_recipe(recipe, num_ranks))
    for phase, layout in zip(phased.phases, layouts, strict=True):
        print_layout(layout, num_microbatches(phase.recipe, layout), phase.title)
        print(f"microbatch of a lane: {describe_microbatch(phase.recipe)}")
        print_memory(memory_by_role(phase.recipe, layout))
        print_defaults(phase.recipe.train, layout)
        print_variables(layout)
    print("environment of all ranks:", " ".join(map(str, VARIABLES)))


def describe_microbatch(recipe: "Recipe") -> str:
    """What a lane of the language model processes at a time."""
    tokens, rows = f"up to {recipe.longest_microbatch:,} tokens", recipe.data.rows_per_microbatch
    if recipe.data.tokens_per_microbatch is None:
        samples = recipe.train.micro_batch_size
        return f"{samples} sample{'s' * (samples > 1)}, {tokens}"
    limit = "" if rows is None else f" and {rows:,} rows"
    return f"as many samples as fit, {tokens}{limit}"


def print_layout(layout: "Layout", microbatches: int, phase: str = "") -> None:
    """Print a table with one row per module: its ranks, its grid and its lanes."""
    from rich.console import Console
    from rich.table import Table

    sizes = f"{layout.world_size} ranks · {microbatches} microbatches per step"
    table = Table(title=f"{phase}: {sizes}" if phase else sizes)
    for column in ("module", "ranks", "grid", "lanes"):
        table.add_column(column)
    for name, grid in layout.grids.items():
        last = f"-{grid.ranks[-1]}" if grid.size > 1 else ""
        sequence = " · sp" if grid.sp else ""
        virtual = f" · vpp {grid.vpp}" if grid.vpp > 1 else ""
        axes = f"tp {grid.tp}{sequence} · cp {grid.cp} · pp {grid.pp}{virtual} · dp {grid.dp}"
        table.add_row(name, f"{grid.ranks[0]}{last}", axes, str(grid.dp))
    Console().print(table)


def print_memory(roles: "Sequence[RoleMemory]") -> None:
    """Print a table with what a rank of each role keeps in memory."""
    from rich.console import Console
    from rich.table import Table

    from mimo.model.memory import in_words

    table = Table(title="memory of a rank", padding=(0, 0, 0, 1))
    table.add_column("role")
    for column in ("weights", "gradients", "optimizer", "activations", "logits", "in all"):
        table.add_column(column, justify="right")
    for one in roles:
        parts = (one.weights, one.gradients, one.optimizer, one.activations, one.logits, one.total)
        table.add_row(one.role, *(in_words(part) if part else "-" for part in parts))
    Console().print(table)
    print("activations: at most, of full microbatches whose tokens are all rows of items")


def print_defaults(train: "Train", layout: "Layout") -> None:
    """Print the recipe's keys for speed as they are resolved."""
    from mimo.layout.defaults import overlap_of

    on_gpu, on_cpu = overlap_of(train, True), overlap_of(train, False)
    for key, gpu, cpu in (
        ("overlap_grad_reduce", on_gpu.grad_reduce, on_cpu.grad_reduce),
        ("overlap_param_gather", on_gpu.param_gather, on_cpu.param_gather),
    ):
        words = {True: "true", False: "false"}
        found = words[gpu] if gpu == cpu else f"{words[gpu]} on GPUs, {words[cpu]} on CPUs"
        print(f"train.{key}: {found}")
    every = train.collect_garbage_every
    print(f"train.collect_garbage_every: {every} steps" if every else "garbage: left to Python")


def print_variables(layout: "Layout") -> None:
    """Print what ranks get in their environment by their place; what is the user's is marked."""
    from mimo.layout.defaults import variables_of

    by_rank: dict[tuple[str, ...], list[int]] = {}
    for rank in range(layout.world_size):
        own = tuple(map(str, variables_of(layout, rank)))
        by_rank.setdefault(own, []).append(rank)
    for own, ranks in by_rank.items():
        if own:
            print(f"environment of {len(ranks)} ranks, {ranks[0]} the first:", " ".join(own))
