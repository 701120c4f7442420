"""What a layout must fulfil: how it uses ranks, and which sizes of a recipe they must divide."""

from collections import Counter
from collections.abc import Iterator, Sequence

from mimo.config.schema import Recipe, key_of
from mimo.ops.acceleration import fp8_multiple
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout, sequence_multiple
from mimo.parallel.levels import minimum_run_ahead


def layout_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Lines for a RecipeError: grids that do not tile the world, sizes that do not divide."""
    yield from _tiling_problems(recipe, layout)
    yield from _colocation_problems(recipe, layout)
    yield from _size_problems(recipe, layout)
    for grid in layout.grids.values():
        yield from _engine_problems(recipe, grid)


# What to use instead, by axis.
_MEGATRON_ONLY = {
    "pp": "raise dp or tp, whose ranks share weights too",
    "vpp": "without pipeline stages there is nothing to interleave",
    "cp": "raise tp with sp, which cuts the hidden states of long sequences too",
}


def _engine_problems(recipe: Recipe, grid: GridSpec) -> Iterator[str]:
    """Keys that the module's engine does not know."""
    key = key_of(grid.module)
    replicas = (*key, "grid", "dp_replicate")
    if grid.engine == "megatron":
        if grid.dp_replicate > 1:
            yield recipe.problem(
                replicas,
                f"got {grid.dp_replicate}, but engine: megatron does not cut weights over lanes; "
                f"remove it, or set engine: fsdp",
            )
        if not recipe.module(grid.module).reshard_after_forward:
            yield recipe.problem(
                (*key, "reshard_after_forward"),
                "got false, but engine: megatron gathers no weights; remove it, or set engine: "
                "fsdp",
            )
        if recipe.module(grid.module).reduce_gradients != "step":
            yield recipe.problem(
                (*key, "reduce_gradients"),
                "got microbatch, but engine: megatron reduces gradients once a step; remove it, or "
                "set engine: fsdp",
            )
        return
    for axis, instead in _MEGATRON_ONLY.items():
        if (size := getattr(grid, axis)) > 1:
            yield recipe.problem(
                (*key, "grid", axis),
                f"got {size}, which engine: fsdp does not have; {instead}, or set engine: megatron",
            )
    if grid.dp % grid.dp_replicate:
        yield recipe.problem(
            replicas,
            f"got {grid.dp_replicate}, but it must divide the lanes, dp, of which there are "
            f"{grid.dp}",
        )
    if recipe.init_from is None:
        yield recipe.problem(
            (*key, "engine"),
            "got fsdp, which runs the module of transformers in a Hugging Face folder, but the "
            "recipe names none; set init_from, or engine: megatron",
        )
    if grid.module == LANGUAGE and (fp8 := recipe.train.fp8) != "none":
        yield recipe.problem(
            ("train", "fp8"), f"got {fp8}, which needs language.engine: megatron; set it to none"
        )


def _colocation_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Colocated grids that are not made of exactly the language model's ranks."""
    for name in sorted(layout.colocated):
        grid, size = layout.encoders[name], layout.language.size
        if grid.size != size:
            yield recipe.problem(
                (*key_of(name), "grid"),
                f"got {grid}, but a colocated encoder has all {size} ranks of the language model; "
                f"choose tp · dp = {size}, or leave dp out",
            )
        if grid.pp > 1:
            yield recipe.problem(
                (*key_of(name), "grid", "pp"),
                f"got {grid.pp}, but a colocated encoder runs on one stage; set it to 1",
            )
        if recipe.encoders[name].grid.rank_offset is not None:
            yield recipe.problem(
                (*key_of(name), "grid", "rank_offset"),
                "a colocated encoder has the ranks of the language model; remove rank_offset",
            )
        group, first = (
            recipe.encoders[n].encode_group for n in (name, sorted(layout.colocated)[0])
        )
        if group != first:
            yield recipe.problem(
                (*key_of(name), "encode_group"),
                f"got {group}, but encoders.{sorted(layout.colocated)[0]} has {first}; colocated "
                f"encoders share their groups, give both the same",
            )
        stages = layout.language.pp if layout.language.vpp > 1 else 1
        if group != "all" and group % stages:
            yield recipe.problem(
                (*key_of(name), "encode_group"),
                f"got {group}, needs a multiple of language.grid.pp {stages}, because its stages "
                f"are interleaved",
            )


def _text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _tiling_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Grids that overlap, or do not use every rank of the world exactly once."""
    grids = {name: grid for name, grid in layout.grids.items() if name not in layout.colocated}
    places = ", ".join(f"{name} {_text(grid.ranks)}" for name, grid in grids.items())
    moved = [name for name in grids if recipe.module(name).grid.rank_offset]
    offset = (*key_of(moved[-1] if moved else LANGUAGE), "grid", "rank_offset")
    needed = sum(grid.size for grid in grids.values())
    if layout.world_size != needed:
        sizes = ", ".join(f"{name}: {grid}" for name, grid in grids.items())
        yield recipe.problem(
            (LANGUAGE, "grid"),
            f"got {layout.world_size} ranks, but the grids need {needed} ({sizes}); "
            f"start {needed}, or change dp",
        )
    used = Counter(rank for grid in grids.values() for rank in grid.ranks)
    twice = sorted(rank for rank, times in used.items() if times > 1)
    unused = sorted(set(range(needed)) - used.keys())
    if twice:
        yield recipe.problem(
            offset,
            f"{_text(twice)} would be used twice ({places}), but disjoint grids share none; "
            f"remove rank_offset",
        )
    elif unused and layout.world_size == needed:
        yield recipe.problem(
            offset,
            f"{_text(unused)} of {needed} would be used by no module ({places}); "
            f"remove rank_offset",
        )


def _size_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Batch, sequence and run-ahead sizes that the layout cannot work with."""
    train, language = recipe.train, layout.language
    step = train.micro_batch_size * language.dp
    if train.global_batch_size % step:
        nearby = max(1, round(train.global_batch_size / step)) * step
        yield recipe.problem(
            ("train", "global_batch_size"),
            f"got {train.global_batch_size}, needs a multiple of {step} (train.micro_batch_size "
            f"{train.micro_batch_size} · language.grid.dp {language.dp}), such as {nearby}",
        )
    divisor = sequence_multiple(language.cp, language.tp, language.sp, fp8_multiple(train.fp8))
    if recipe.data.sequence_length % divisor:
        nearby = (recipe.data.sequence_length // divisor + 1) * divisor
        yield recipe.problem(
            ("data", "sequence_length"),
            f"got {recipe.data.sequence_length}, needs a multiple of {divisor} "
            f"(language.grid tp {language.tp}, sp {str(language.sp).lower()}, cp {language.cp}; "
            f"train.fp8 {train.fp8}), such as {nearby}",
        )
    microbatches = max(1, train.global_batch_size // step)
    if language.vpp > 1:
        yield from _interleaving_problems(recipe, language, microbatches)
    needed = minimum_run_ahead(language.pp, language.vpp, microbatches)
    for name, encoder in recipe.encoders.items():
        if name in layout.colocated or encoder.run_ahead == "auto":
            continue
        if encoder.run_ahead < needed:
            yield recipe.problem(
                ("encoders", name, "run_ahead"),
                f"got {encoder.run_ahead}, which would deadlock: language.grid.pp {language.pp} "
                f"with vpp {language.vpp} needs at least {needed}; use auto",
            )


def _interleaving_problems(recipe: Recipe, language: GridSpec, microbatches: int) -> Iterator[str]:
    if language.pp == 1:
        yield recipe.problem(
            (LANGUAGE, "grid", "vpp"),
            f"got {language.vpp}, but interleaving needs pipeline stages; set pp to 2 or more",
        )
    elif microbatches % language.pp:
        yield recipe.problem(
            ("train", "global_batch_size"),
            f"gives {microbatches} microbatches per step, but with vpp {language.vpp} their number "
            f"must be a multiple of language.grid.pp {language.pp}",
        )
