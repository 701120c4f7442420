"""`mimo check`: whether a recipe can run, and which rank does what."""

import itertools
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mimo.cli._shared import NumRanksOption, OverridesArgument, RecipeArgument

if TYPE_CHECKING:
    from mimo.config.schema import Recipe
    from mimo.parallel.grids import Layout


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
) -> None:
    """Validate a recipe and its data, and print which rank does what. Indexes nothing."""
    from mimo.checkpoint.hf.recipes import load_phases

    phased = load_phases(recipe, overrides or [])
    # After the recipe is read: it imports torch, and a mistyped key is answered at once.
    from mimo.model.recipe_checks import check_indexed_data, check_recipe
    from mimo.runtime.environment import VARIABLES

    layouts = phased.each(lambda recipe: check_recipe(recipe, num_ranks))
    notes = phased.each(check_indexed_data)
    for phase, layout in zip(phased.phases, layouts, strict=True):
        _print_layout(phase.recipe, layout, phase.title)
        _print_memory(phase.recipe, layout)
        _print_defaults(phase.recipe, layout)
    print("environment of all ranks:", " ".join(map(str, VARIABLES)))
    for note in dict.fromkeys(itertools.chain.from_iterable(notes)):
        print(note)


def _print_layout(recipe: "Recipe", layout: "Layout", phase: str) -> None:
    """A row per module, with its ranks, its grid and its lanes; then what a lane processes."""
    from mimo.parallel.grids import num_microbatches

    microbatches = num_microbatches(recipe, layout)
    sizes = f"{layout.world_size} ranks · {microbatches} microbatches per step"
    table = Table("module", "ranks", "grid", "lanes", title=f"{phase}: {sizes}" if phase else sizes)
    for name, grid in layout.grids.items():
        last = f"-{grid.ranks[-1]}" if grid.size > 1 else ""
        sequence = " · sp" if grid.sp else ""
        virtual = f" · vpp {grid.vpp}" if grid.vpp > 1 else ""
        axes = f"tp {grid.tp}{sequence} · cp {grid.cp} · pp {grid.pp}{virtual} · dp {grid.dp}"
        table.add_row(name, f"{grid.ranks[0]}{last}", axes, str(grid.dp))
    Console().print(table)
    samples, rows = recipe.train.micro_batch_size, recipe.data.rows_per_microbatch
    number = f"{samples} sample{'s' * (samples > 1)}"
    if recipe.data.tokens_per_microbatch is not None:
        number = "as many samples as fit"
    limit = "" if rows is None else f" and {rows:,} rows"
    print(f"microbatch of a lane: {number}, up to {recipe.longest_microbatch:,} tokens{limit}")
    if layout.blocks > 1:
        print(f"bridges: rows stay within each of {layout.blocks} blocks of lanes")


def _print_memory(recipe: "Recipe", layout: "Layout") -> None:
    """What a rank of each role keeps in memory."""
    from mimo.model.memory import in_words
    from mimo.model.roles import memory_by_role

    table = Table("role", title="memory of a rank", padding=(0, 0, 0, 1))
    columns = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    for column in (*columns, "in all"):
        table.add_column(column, justify="right")
    for one in memory_by_role(recipe, layout):
        parts = (*(getattr(one, column) for column in columns), one.total)
        table.add_row(one.role, *(in_words(part) if part else "-" for part in parts))
    Console().print(table)
    print(
        "activations and buffers: at most, of full microbatches whose tokens are all rows of items"
    )


def _print_defaults(recipe: "Recipe", layout: "Layout") -> None:
    """The keys for speed as they are resolved, and what ranks get in their environment."""
    from mimo.parallel.defaults import overlap_of, variables_of

    on_gpu, on_cpu = overlap_of(recipe.train, True), overlap_of(recipe.train, False)
    for key in ("grad_reduce", "param_gather"):
        gpu, cpu = (str(getattr(overlap, key)).lower() for overlap in (on_gpu, on_cpu))
        both = gpu if gpu == cpu else f"{gpu} on GPUs, {cpu} on CPUs"
        print(f"train.overlap_{key}: {both}")
    every = recipe.train.collect_garbage_every
    print(f"train.collect_garbage_every: {every} steps" if every else "garbage: left to Python")
    ranks_of: dict[str, list[int]] = {}
    for rank in range(layout.world_size):
        own = " ".join(map(str, variables_of(layout, rank)))
        ranks_of.setdefault(own, []).append(rank)
    for own, ranks in ranks_of.items():
        if own:
            print(f"environment of {len(ranks)} ranks, {ranks[0]} the first:", own)
