"""A smaller layout for fewer nodes: fewer data-parallel lanes train the same steps.

The order of samples, and which of them make a step, do not depend on lanes, and gradients are sums
over lanes that are divided once by all tokens: with the same global batch, fewer lanes take more
microbatches each and follow the same losses. tp, cp and pp stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe, key_of
from mimo.config.source import dotted
from mimo.errors import InputError, RecipeError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.slurm.placement import Placement, num_nodes, place


def fit(path: Path, overrides: Sequence[str], nodes: int) -> tuple[list[str], Placement]:
    """The overrides with which a recipe fits so many nodes, and where its ranks are then.

    Those given are among them, but for numbers of lanes that are replaced.

    All phases keep their global batch and never have more lanes than the recipe gives them. First
    choice are layouts that keep the ratio of encoders' lanes to the language model's; of these, or
    else of all, the one that leaves fewest places unused.

    Raises InputError, which says how many nodes are enough, if none fits; RecipeError for a wrong
    recipe.
    """
    phased, layouts = _checked(path, overrides)
    if phased.phases[0].recipe.cluster.encoder_nodes is not None:
        message = (
            "nodes of two kinds come back together or not at all, so fewer lanes would not help; "
            "remove it, or leave --elastic out"
        )
        problem = phased.phases[0].recipe.problem(("cluster", "encoder_nodes"), message)
        raise RecipeError(problem)
    if num_nodes(phased, layouts) <= nodes:
        return list(overrides), place(phased, layouts)
    places = phased.phases[0].recipe.cluster.places_per_node
    for choice in _choices(phased, layouts, nodes * places):
        if num_nodes(phased, choice) > nodes:
            continue
        more = _overridden(phased, overrides, _overrides(phased, layouts, choice))
        try:
            return more, place(*_checked(path, more))
        except RecipeError:
            continue  # sizes that these lanes do not divide
    smallest = min(
        _choices(phased, layouts, layouts[0].world_size), key=lambda one: one[0].world_size
    )
    more = _overridden(phased, overrides, _overrides(phased, layouts, smallest))
    found = _checked(path, more)
    sizes = "; ".join(f"{name}: {grid}" for name, grid in found[1][0].grids.items())
    raise InputError(
        f"{path}: got {nodes} node{'s' * (nodes > 1)} of {places} ranks, but the smallest layout "
        f"with this global batch needs {num_nodes(*found)} ({sizes}); wait for more nodes, or give "
        f"a layout with smaller lanes"
    )


def _checked(path: Path, overrides: Sequence[str]) -> tuple[PhasedRecipe, list[Layout]]:
    phased = load_phases(path, overrides)
    return phased, phased.each(lambda recipe: check_recipe(recipe, None))


def _choices(
    phased: PhasedRecipe, layouts: Sequence[Layout], places: int
) -> Iterator[list[Layout]]:
    """A layout for each phase, all of as many ranks: the best choice first."""
    smaller = [
        [one for one in _smaller(phase.recipe, layout) if one.world_size <= places]
        for phase, layout in zip(phased.phases, layouts, strict=True)
    ]
    for keeps_ratio in (True, False):
        by_size = []
        for layout, found in zip(layouts, smaller, strict=True):
            own: dict[int, Layout] = {}
            for one in found:
                if _keeps_ratio(layout, one) or not keeps_ratio:
                    own[one.world_size] = one  # the last has most lanes of the language model
            by_size.append(own)
        common = set(by_size[0]).intersection(*by_size[1:])
        for size in sorted(common, reverse=True):
            yield [own[size] for own in by_size]


def _smaller(recipe: Recipe, layout: Layout) -> Iterator[Layout]:
    """Layouts with as many lanes or fewer; disjoint encoders shrink together."""
    language, train = layout.language, recipe.train
    disjoint = {n: grid for n, grid in layout.encoders.items() if n not in layout.colocated}
    most = max((grid.dp for grid in disjoint.values()), default=1)
    for lanes in range(1, language.dp + 1):
        if train.global_batch_size % (train.micro_batch_size * lanes):
            continue
        for share in range(1, most + 1):
            grids, first = {}, 0
            for name, grid in disjoint.items():
                grids[name] = replace(grid, dp=max(1, grid.dp * share // most), rank_offset=first)
                first += grids[name].size
            own = replace(language, dp=lanes, rank_offset=first)
            for name in layout.colocated:
                grid = layout.encoders[name]
                grids[name] = replace(grid, dp=own.size // grid.lane_size, rank_offset=first)
            encoders = {name: grids[name] for name in layout.encoders}
            size = first + own.size
            yield replace(layout, language=own, encoders=encoders, world_size=size)


def _keeps_ratio(layout: Layout, smaller: Layout) -> bool:
    """Whether disjoint encoders have as many lanes for each of the language model as before."""
    return all(
        smaller.encoders[name].dp * layout.language.dp == grid.dp * smaller.language.dp
        for name, grid in layout.encoders.items()
        if name not in layout.colocated
    )


def _overrides(
    phased: PhasedRecipe, layouts: Sequence[Layout], choice: Sequence[Layout]
) -> Iterator[tuple[str, str]]:
    """What turns a phase's layout into that chosen; ranks then follow one another.

    Yields the phase as the beginning of a key, empty without phases, and the rest of the override.
    """
    grids = zip(phased.phases, layouts, choice, strict=True)
    for number, (phase, before, after) in enumerate(grids):
        above = f"phases.{number}." if phased.has_phases else ""
        for name in (*before.encoders, LANGUAGE):
            key = dotted((*key_of(name), "grid"))
            if after.grids[name].dp != before.grids[name].dp:
                yield above, f"{key}.dp={after.grids[name].dp}"
            if phase.recipe.module(name).grid.rank_offset is not None:
                yield above, f"{key}.rank_offset=null"


def _overridden(
    phased: PhasedRecipe, given: Sequence[str], more: Iterable[tuple[str, str]]
) -> list[str]:
    """All overrides but those given for keys that every phase now has of its own.

    Those would be refused, since they change nothing.
    """
    more = list(more)
    phases_of = Counter(override.partition("=")[0] for _, override in more)
    replaced = {key for key, count in phases_of.items() if count == len(phased.phases)}
    kept = [override for override in given if override.partition("=")[0].strip() not in replaced]
    return [*kept, *(above + override for above, override in more)]
