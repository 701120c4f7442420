"""`mimo check`: which rank does what."""

from typing import TYPE_CHECKING

from mimo.commands._shared import NumRanksOption, OverridesArgument, RecipeArgument, readable_errors

if TYPE_CHECKING:
    from mimo.layout.grids import Layout
    from mimo.recipe.schema import Recipe


@readable_errors
def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
) -> None:
    """Validate a recipe and print which rank does what."""
    from mimo.hf.recipes import load_phases
    from mimo.layout.grids import num_microbatches
    from mimo.model.memory import in_words, module_memory
    from mimo.model.recipe_checks import check_recipe

    phased = load_phases(recipe, overrides or [])
    layouts = phased.each(lambda recipe: check_recipe(recipe, num_ranks))
    for phase, layout in zip(phased.phases, layouts, strict=True):
        needs = module_memory(phase.recipe, layout)
        memory = {name: in_words(need.bytes_per_rank) for name, need in needs.items()}
        print_layout(layout, num_microbatches(phase.recipe, layout), memory, phase.title)
        print(f"microbatch of a lane: {describe_microbatch(phase.recipe)}")


def describe_microbatch(recipe: "Recipe") -> str:
    """What a lane of the language model processes at a time."""
    tokens, rows = f"up to {recipe.longest_microbatch:,} tokens", recipe.data.rows_per_microbatch
    if recipe.data.tokens_per_microbatch is None:
        samples = recipe.train.micro_batch_size
        return f"{samples} sample{'s' * (samples > 1)}, {tokens}"
    limit = "" if rows is None else f" and {rows:,} rows"
    return f"as many samples as fit, {tokens}{limit}"


def print_layout(
    layout: "Layout", microbatches: int, memory: dict[str, str], phase: str = ""
) -> None:
    """Print a table with one row per module: its ranks, its grid, its lanes and its memory.

    memory: what each rank needs for weights, gradients and optimizer state, by module.
    """
    from rich.console import Console
    from rich.table import Table

    sizes = f"{layout.world_size} ranks · {microbatches} microbatches per step"
    table = Table(title=f"{phase}: {sizes}" if phase else sizes)
    for column in ("module", "ranks", "grid", "lanes", "per rank"):
        table.add_column(column)
    for name, grid in layout.grids.items():
        last = f"-{grid.ranks[-1]}" if grid.size > 1 else ""
        sequence = " · sp" if grid.sp else ""
        virtual = f" · vpp {grid.vpp}" if grid.vpp > 1 else ""
        axes = f"tp {grid.tp}{sequence} · cp {grid.cp} · pp {grid.pp}{virtual} · dp {grid.dp}"
        table.add_row(name, f"{grid.ranks[0]}{last}", axes, str(grid.dp), memory[name])
    Console().print(table)
    print("per rank: weights, gradients and optimizer state; activations come on top")
