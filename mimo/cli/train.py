"""`mimo check` and `mimo train`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mimo.cli.options import ClusterOption, NumRanksOption, OverridesArgument, RecipeArgument
from mimo.report.tables import Table, percent, scientific, show

if TYPE_CHECKING:
    from mimo.config.schema import Recipe
    from mimo.parallel.grids import Layout
    from mimo.plan.rates import Gpu


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Run a microbatch of each role on fake tensors.")
    ] = False,
    role: Annotated[
        str | None, Option(help="With --dry-run, one rank, such as language:pp=1,tp=3.")
    ] = None,
    gpu: Annotated[
        str, Option(help="With --dry-run: h100, h200, b200, a100-40, a100-80, or GiB of memory.")
    ] = "h100",
) -> None:
    """Validate a recipe and its data, and print ranks, grids and memory. Indexes nothing."""
    gc.disable()  # the collector would scan torch's million objects again and again
    try:
        from mimo.checkpoint.hf.recipes import load_phases

        phased = load_phases(recipe, overrides or [])
        # Imported after the recipe is read: a mistyped key is reported before torch loads.
        from mimo.model.recipe_checks import check_indexed_data, check_recipe
        from mimo.plan.rates import parse_gpu

        layouts = phased.each(lambda recipe: check_recipe(recipe, num_ranks))
        notes = phased.each(check_indexed_data)
        memory = parse_gpu(gpu)
        for phase, layout in zip(phased.phases, layouts, strict=True):
            _print_layout(phase.recipe, layout, phase.title)
            _print_memory(phase.recipe, layout)
            _print_flops(phase.recipe, layout)
            if dry_run:
                _print_dry_run(phase.recipe, layout, role, memory)
        for note in dict.fromkeys(note for of_phase in notes for note in of_phase):
            print(note)
    finally:
        gc.enable()
        gc.freeze()  # so that it does not scan them at exit either


def _print_layout(recipe: Recipe, layout: Layout, phase: str) -> None:
    from mimo.parallel.grids import num_microbatches

    microbatches = num_microbatches(recipe, layout)
    sizes = f"{layout.world_size} ranks · {microbatches} microbatches per step"
    rows = []
    for name, grid in layout.grids.items():
        last = f"-{grid.ranks[-1]}" if grid.size > 1 else ""
        sequence = " · sp" if grid.sp else ""
        virtual = f" · vpp {grid.vpp}" if grid.vpp > 1 else ""
        axes = f"tp {grid.tp}{sequence} · cp {grid.cp} · pp {grid.pp}{virtual} · dp {grid.dp}"
        rows.append((name, f"{grid.ranks[0]}{last}", axes, str(grid.dp)))
    columns, title = ("module", "ranks", "grid", "lanes"), f"{phase}: {sizes}" if phase else sizes
    show(Table(columns, rows, words=True, title=title))
    samples, rows = recipe.train.micro_batch_size, recipe.data.rows_per_microbatch
    number = f"{samples} sample{'s' * (samples > 1)}"
    if recipe.data.tokens_per_microbatch is not None:
        number = "as many samples as fit"
    limit = "" if rows is None else f" and {rows:,} rows"
    print(f"microbatch of a lane: {number}, up to {recipe.longest_microbatch:,} tokens{limit}")
    if layout.blocks > 1:
        print(f"bridges: embeddings stay within each of {layout.blocks} blocks of lanes")


def _print_memory(recipe: Recipe, layout: Layout) -> None:
    from mimo.errors import format_bytes
    from mimo.model.memory import memory_by_role

    columns, rows = ("weights", "gradients", "optimizer", "inputs", "activations"), []
    columns += ("logits", "buffers")
    for usage in memory_by_role(recipe, layout):
        parts = (*(getattr(usage, column) for column in columns), usage.total)
        rows.append((usage.role, *(format_bytes(part) if part else "-" for part in parts)))
    show(Table(("role", *columns, "in all"), rows, title="memory of a rank"))
    print("inputs, activations, buffers: for full microbatches of item embeddings alone")


def _print_dry_run(recipe: Recipe, layout: Layout, role: str | None, gpu: Gpu) -> None:
    from mimo.errors import format_bytes
    from mimo.plan.dry_run_verdict import run_roles, verdict

    runs, notes = run_roles(recipe, layout, role)
    columns, rows = ("role", "rank", "state", "inputs", "waiting", "one microbatch", "in all"), []
    for run in runs:
        total, formula = run.total, run.formula.total
        sizes = (run.state, run.inputs, run.waiting, run.step, total, formula)
        error = percent(formula / total - 1)
        rows.append((run.formula.role, str(run.rank), *map(format_bytes, sizes), error))
    show(Table((*columns, "formula", "its error"), rows, title="dry run of a rank"))
    print("dry run: full microbatches; all of their tokens stand for items and have a loss")
    print(*notes, *verdict(recipe, layout, runs, gpu), sep="\n")


def _print_flops(recipe: Recipe, layout: Layout) -> None:
    """Print the FLOPs of the first step by module, if the data are indexed."""
    from mimo.model.indexing import indexed_dataset
    from mimo.model.step_plan import StepFlops, step_planner

    if (dataset := indexed_dataset(recipe)) is None:
        return
    planner = step_planner(recipe, layout, dataset, links=())
    plan = planner.finish(planner.microbatches(0))
    flops = StepFlops(recipe, dataset.readers[0].chat.vocab_size, dataset).of(plan)
    total = sum(flops.values()) or 1.0
    parts = (f"{name} {scientific(of)} ({percent(of / total)})" for name, of in flops.items())
    print(f"FLOPs of the first step: {', '.join(parts)}")


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue from the run's latest checkpoint, if there is one.")
    ] = False,
    resume_from: Annotated[Path | None, Option(help="Continue from this checkpoint.")] = None,
    max_restarts: Annotated[
        int, Option(min=0, help="How often to restart all ranks when one of them fails.")
    ] = 0,
    cluster: ClusterOption = None,
) -> int | None:
    """Train a recipe on this machine, or as one rank of a torchrun or srun job."""
    from mimo.train.main import main as run

    return run(
        recipe,
        overrides or [],
        num_ranks,
        resume=resume,
        resume_from=resume_from,
        max_restarts=max_restarts,
        site=cluster,
    )
