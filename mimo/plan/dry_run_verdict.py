"""Dry runs of a layout's roles, whether these fit into a GPU, and what would help most.

Light to import: torch's fake tensors and Megatron load with the first simulated rank.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError, format_bytes, suggestion
from mimo.families.registry import language_settings
from mimo.model.memory import RoleMemory, memory_by_role
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.plan.rates import Gpu
from mimo.plan.search import Space

if TYPE_CHECKING:
    from mimo.plan.dry_run import DryRun

_AXES = ("tp", "cp", "dp", "pp")


def run_roles(
    recipe: Recipe, layout: Layout, role: str | None = None
) -> tuple[list[DryRun], list[str]]:
    """Simulate one rank of each role, or the rank of ``role``, such as ``language:pp=1,tp=3``.

    Returns the dry runs, and notes on experts. Raises InputError for a role that does not exist or
    cannot run.
    """
    from mimo.plan.dry_run import dry_run  # late: it imports Megatron

    roles = memory_by_role(recipe, layout)
    chosen = [_rank_of(role, roles, layout)] if role else [(one, one.ranks[0]) for one in roles]
    has_experts = language_settings(recipe).routers[0] > 0
    runs, notes = [], []
    for one, rank in chosen:
        runs.append(dry_run(recipe, layout, one, rank))
        if one.module == LANGUAGE and has_experts and layout.language.ep * layout.language.etp > 1:
            worst = dry_run(recipe, layout, one, rank, worst_experts=True)
            notes.append(
                f"experts: equal loads; {format_bytes(worst.total)} on a rank of {one.role} if "
                "the tokens of all ranks choose its experts"
            )
    return runs, notes


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


def combine_modules(runs: Sequence[DryRun], layout: Layout) -> list[tuple[RoleMemory, float]]:
    """Return the bytes that the ranks of each role need, for all modules on them.

    Colocated encoders keep activations while the language model runs; when its own are gone, they
    run their backward. Colocated generators run between its forward and its backward.
    """
    guests = [run for run in runs if run.formula.module in layout.colocated]
    needs = []
    for host in [run for run in runs if run not in guests] or guests:
        others = guests if host.formula.module == LANGUAGE else []
        encoders = [run for run in others if run.formula.module in layout.encoders]
        held = host.state + host.inputs + sum(run.state + run.inputs for run in others)
        held += sum(run.kept for run in encoders)
        peaks = [host.waiting + host.step, *(run.step - run.kept for run in encoders), 0.0]
        peaks += [host.waiting + host.kept + run.step for run in others if run not in encoders]
        needs.append((host.formula, held + max(peaks)))
    return needs


def verdict(recipe: Recipe, layout: Layout, runs: Sequence[DryRun], gpu: Gpu) -> Iterator[str]:
    """Yield lines: whether all ranks fit into a GPU's memory, else what would help most."""
    needs = combine_modules(runs, layout)
    limit = format_bytes(gpu.memory)
    largest, total = max(needs, key=operator.itemgetter(1))
    if total <= gpu.memory:
        yield f"fits {limit}: yes, {format_bytes(total)} ({largest.role})"
        return
    for role, needed in needs:
        if needed > gpu.memory:
            yield f"fits {limit}: no, {role.role} needs {format_bytes(needed)}"
    saved, overrides = _remedy(recipe, layout, largest.module)
    if not saved:
        yield f"no key of the recipe saves memory of {largest.role}; use a smaller model"
        return
    enough = "enough" if total - saved <= gpu.memory else "not enough alone"
    yield (
        f"{overrides} would save most of {largest.role}: {format_bytes(saved)} by the formula, "
        f"which is {enough}"
    )


def _remedy(recipe: Recipe, layout: Layout, module: str) -> tuple[float, str]:
    """Return the most bytes that overrides save on the ranks of a module, and these overrides."""
    key, grid = ".".join(map(str, recipe.key_of(module))), layout.grids[module]
    half, tokens = grid.dp // 2, recipe.data.tokens_per_microbatch or 0
    space, best = Space(recipe, layout.world_size, layout.world_size, {}), (0.0, "")
    before = _most(recipe, layout, module)
    for overrides in (
        {f"{key}.recompute": "full"},
        {"train.distributed_optimizer": True},
        {"train.precision": "bf16"},
        {f"{key}.grid.tp": 2 * grid.tp, f"{key}.grid.sp": True, f"{key}.grid.dp": half},
        {f"{key}.grid.pp": 2 * grid.pp, f"{key}.grid.dp": half},
        {"data.tokens_per_microbatch": tokens // 2},
        {"train.micro_batch_size": recipe.train.micro_batch_size // 2},
    ):
        try:
            saved = before - _most(*space.check(overrides), module)
        except RecipeError:
            continue
        text = " ".join(f"{key}={str(value).lower()}" for key, value in overrides.items())
        best = max(best, (saved, text))
    return best


def _most(recipe: Recipe, layout: Layout, module: str) -> float:
    return max(role.total for role in memory_by_role(recipe, layout) if role.module == module)
