"""Dry runs of a layout's roles, whether these fit into a GPU, and what would help most.

Light to import: torch's fake tensors and Megatron load with the first simulated rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError, format_bytes, suggestion
from mimo.families.registry import language_settings
from mimo.model.memory import RoleMemory, memory_by_role
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.plan.gpus import Gpu

if TYPE_CHECKING:
    from mimo.plan.dry_run import DryRun

Variant = Callable[[Sequence[str]], tuple[Recipe, Layout]]
"""Loads and checks the recipe with further overrides. Raises RecipeError."""


def run_roles(
    recipe: Recipe, layout: Layout, role: str | None
) -> tuple[list[DryRun], dict[str, str]]:
    """Simulate one rank of each role, or the rank of ``role``, such as ``language:pp=1,tp=3``.

    Returns the dry runs, and by role the reason why there is none. Raises InputError for a role
    that does not exist, and if no role can be simulated.
    """
    roles = memory_by_role(recipe, layout)
    chosen = [(one, one.ranks[0]) for one in roles]
    if role is not None:
        chosen = [_rank_of(role, roles, layout)]
    refused = {one.role: reason for one, _ in chosen if (reason := _refusal(recipe, layout, one))}
    if len(refused) == len(chosen):
        raise InputError("\n".join(map(describe_refusal, refused.items())))
    from mimo.plan.dry_run import dry_run  # late: it imports Megatron

    return [dry_run(recipe, layout, *one) for one in chosen if one[0].role not in refused], refused


def worst_experts(recipe: Recipe, layout: Layout, runs: Sequence[DryRun]) -> Iterator[str]:
    """Yield a line for each role with experts: what it needs if all tokens choose its own."""
    from mimo.plan.dry_run import dry_run  # late: it imports Megatron

    if language_settings(recipe).routers[0] and layout.language.ep * layout.language.etp > 1:
        for run in (run for run in runs if run.formula.module == LANGUAGE):
            worst = dry_run(recipe, layout, run.formula, run.rank, worst_experts=True)
            yield (
                f"experts: equal loads; {format_bytes(worst.total)} on a rank of "
                f"{run.formula.role} if the tokens of all ranks choose its experts"
            )


def describe_refusal(refused: tuple[str, str]) -> str:
    """Format a role and the reason why it cannot be simulated."""
    return "--dry-run does not cover {}: {}".format(*refused)


def _refusal(recipe: Recipe, layout: Layout, role: RoleMemory) -> str | None:
    """Return why a role cannot be simulated; None if it can."""
    if role.module in recipe.generators:
        return "generators run diffusers' modules; the formula stands"
    if layout.grids[role.module].engine == "fsdp":
        return "engine: fsdp; the formula stands"
    return None


# --------------------------------------------------------------------------- one role


_AXES = ("tp", "cp", "dp", "pp")


def _rank_of(text: str, roles: Sequence[RoleMemory], layout: Layout) -> tuple[RoleMemory, int]:
    """Return the role and rank of a text such as ``language:pp=1,tp=3``; missing axes are 0."""
    name, _, places = text.partition(":")
    if name not in layout.grids:
        raise InputError(f"--role: no module {name!r}; {suggestion(name, layout.grids)}")
    grid, coords = layout.grids[name], dict[str, int]()
    for place in filter(None, places.split(",")):
        axis, _, number = place.partition("=")
        if axis not in _AXES:
            raise InputError(f"--role: no axis {axis!r} in {text!r}; {suggestion(axis, _AXES)}")
        size = getattr(grid, axis)
        if not number.isdecimal() or int(number) >= size:
            raise InputError(
                f"--role: got {place} in {text!r}, but {name}.grid.{axis} is {size}; "
                f"give {axis}=0 to {axis}={size - 1}"
            )
        coords[axis] = int(number)
    rank = grid.rank(**coords)
    return next(role for role in roles if role.module == name and rank in role.ranks), rank


# ------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Need:
    """Bytes of a rank of a role, for all modules on it. inputs: those of them for inputs."""

    role: RoleMemory
    total: float
    inputs: float


def combine_modules(runs: Sequence[DryRun], layout: Layout) -> list[Need]:
    """Return what the ranks of each role need.

    Colocated encoders keep activations while the language model runs; when its own are gone, they
    run their backward.
    """
    guests = [run for run in runs if run.formula.module in layout.colocated]
    hosts = [run for run in runs if run not in guests]
    needs = []
    for host in hosts or guests:
        here = [host, *(guests if host.formula.module == LANGUAGE else ())]
        kept = sum(run.kept for run in here[1:])
        peaks = [host.waiting + host.step + kept]
        peaks += [run.step + kept - run.kept for run in here[1:]]
        inputs = sum(run.inputs for run in here)
        needs.append(
            Need(host.formula, sum(run.state for run in here) + inputs + max(peaks), inputs)
        )
    return needs


def verdict(
    recipe: Recipe, layout: Layout, runs: Sequence[DryRun], gpu: Gpu, variant: Variant
) -> Iterator[str]:
    """Yield lines: whether all ranks fit into a GPU's memory, else what would help most."""
    needs = combine_modules(runs, layout)
    largest = max(needs, key=lambda need: need.total)
    limit, name = format_bytes(gpu.memory), largest.role.role
    if largest.total <= gpu.memory:
        yield f"fits {limit}: yes, {format_bytes(largest.total)} ({name})"
        return
    for need in needs:
        if need.total > gpu.memory:
            yield f"fits {limit}: no, {need.role.role} needs {format_bytes(need.total)}"
    best = min(_remedies(recipe, layout, largest.role, variant), default=None)
    if best is None:
        yield f"no key of the recipe saves memory of {name}; use a smaller model"
        return
    saved, overrides = -best[0], " ".join(best[1])
    enough = largest.total - saved <= gpu.memory
    yield (
        f"{overrides} would save most of {name}: {format_bytes(saved)} by the formula, which is "
        f"{'enough' if enough else 'not enough alone'}"
    )


def _remedies(
    recipe: Recipe, layout: Layout, role: RoleMemory, variant: Variant
) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Yield overrides that save memory of a role, after minus the bytes by the formula."""
    before = _most(recipe, layout, role.module)
    for overrides in _candidates(recipe, layout.grids[role.module]):
        try:
            changed = _most(*variant(overrides), role.module)
        except RecipeError:
            continue
        if changed < before:
            yield changed - before, overrides


def _most(recipe: Recipe, layout: Layout, module: str) -> float:
    return max(r.total for r in memory_by_role(recipe, layout) if r.module == module)


def _candidates(recipe: Recipe, grid: GridSpec) -> Iterator[tuple[str, ...]]:
    """Yield overrides that may save memory of a module on the same ranks."""
    train, data = recipe.train, recipe.data
    key = ".".join(map(str, recipe.key_of(grid.module)))
    if recipe.module(grid.module).recompute != "full":
        yield (f"{key}.recompute=full",)
    if not train.distributed_optimizer and grid.engine == "megatron":
        yield ("train.distributed_optimizer=true",)
    if train.precision != "bf16":
        yield ("train.precision=bf16",)
    for axis in ("tp", "pp") if grid.dp % 2 == 0 else ():
        sequence = (f"{key}.grid.sp=true",) if axis == "tp" and not grid.sp else ()
        size = 2 * getattr(grid, axis)
        yield f"{key}.grid.{axis}={size}", *sequence, f"{key}.grid.dp={grid.dp // 2}"
    if data.tokens_per_microbatch and data.tokens_per_microbatch >= 2 * data.sequence_length:
        yield (f"data.tokens_per_microbatch={data.tokens_per_microbatch // 2}",)
    if train.micro_batch_size % 2 == 0:
        yield (f"train.micro_batch_size={train.micro_batch_size // 2}",)
