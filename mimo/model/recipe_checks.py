"""Checks of a recipe before any rank starts: its model on its layout, its data, its memory."""

import math
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from data.index.reader import SampleReader
from data.index.remote import is_remote
from data.index.shards import find_shards
from data.index.store import Build
from mimo.checkpoint.hf.pipelines import schedule_of
from mimo.config.modules import TARGETS, LoRA
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.config.training import Source
from mimo.device import Memory, has_gpu, machine_memory
from mimo.errors import RecipeError, format_bytes
from mimo.families.keymap import num_elements
from mimo.families.registry import (
    GENERAL,
    encoder_settings,
    generator_family,
    generator_settings,
    language_settings,
    trainable_names,
    weights_of,
)
from mimo.model.dataset import (
    SPLITS,
    added_tokens,
    check_index,
    for_each_source,
    item_processors,
    modality_problems,
    open_dataset,
    open_tokenizer,
    sources_of,
    unknown_text,
)
from mimo.model.indexing import build_in_processes, survey_source
from mimo.model.module_sizes import CUT_BY_COLUMNS, parameters_by_role
from mimo.ops.acceleration import fp8_multiple, fp8_problem, this_machine
from mimo.parallel.build import build_layout
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.runtime.ranks import RankEnv


def check_recipe(recipe: Recipe, num_ranks: int | None) -> Layout:
    """Check layout, families and sizes; return the layout. Raises RecipeError with all problems."""
    layout = build_layout(recipe, num_ranks)
    problems = list[str]()
    for check in (
        _profile_problems(recipe, layout),
        _language_problems(recipe, layout.language),
        modality_problems(recipe),
        *(_encoder_problems(recipe, grid) for grid in layout.encoders.values()),
        *(_generator_problems(recipe, name) for name in layout.generators),
    ):
        try:
            problems += check
        except RecipeError as error:
            problems += error.problems
    for grid in () if problems else layout.grids.values():
        problems += _pattern_problems(recipe, grid)
    modules = {**layout.encoders, LANGUAGE: layout.language}
    if not problems and any(grid.engine == "fsdp" for grid in modules.values()):
        from mimo.model.fsdp import fsdp_problems  # late: transformers takes seconds

        problems += fsdp_problems(recipe, layout)
    if problems:
        raise RecipeError(*problems)
    return layout


def largest_layout(phased: PhasedRecipe, num_ranks: int | None) -> Layout:
    """Check all phases; return the layout with the most ranks. Raises RecipeError."""
    layouts = phased.each(lambda recipe: check_recipe(recipe, num_ranks))
    return max(layouts, key=lambda layout: layout.world_size)


def _language_problems(recipe: Recipe, grid: GridSpec) -> Iterator[str]:
    """Yield what the language model's family cannot do; raises RecipeError for bad settings."""
    if not any(map(recipe.trains, recipe.modules)):
        yield recipe.problem(("language", "freeze"), "every module is frozen; train at least one")
    settings, family = language_settings(recipe), recipe.language.family
    if grid.engine not in settings.engines:
        yield recipe.problem(
            ("language", "engine"),
            f"got {grid.engine}, which cannot run a language model of family {family}; set it to "
            f"{settings.engines[0]}",
        )
    elif grid.engine == "megatron":
        for message in settings.grid_problems(grid.tp, grid.pp * grid.vpp, grid.cp):
            yield recipe.problem(("language", "grid"), message)
        for axis, message in settings.expert_problems(grid.ep, grid.etp):
            yield recipe.problem(("language", "grid", axis), message)
        if grid.etp > 1 and recipe.language.lora is not None:
            message = f"got {grid.etp}, but adapters of experts are not split; raise ep instead"
            yield recipe.problem(("language", "grid", "etp"), message)
    yield from _fp8_problems(recipe, grid.tp)
    for key in ("balance_loss", "z_loss"):
        if (coefficient := getattr(settings, key, 0)) and not (
            grid.engine == "megatron" and recipe.data.packing
        ):
            yield recipe.problem(
                ("language", "model", key),
                f"got {coefficient}, which needs language.engine: megatron and data.packing: true; "
                "set it to 0",
            )
    if settings.item_rules.bidirectional and recipe.encoders and not recipe.data.packing:
        yield recipe.problem(
            ("data", "packing"),
            f"got false, but in language.family {family} the tokens of an item see each other in "
            "both directions, which needs packed sequences; set it to true",
        )


def _encoder_problems(recipe: Recipe, grid: GridSpec) -> Iterator[str]:
    settings = encoder_settings(recipe, grid.module)
    if grid.engine == "megatron":
        for message in settings.grid_problems(grid.tp, grid.pp):
            yield recipe.problem((*recipe.key_of(grid.module), "grid"), message)


def _generator_problems(recipe: Recipe, name: str) -> Iterator[str]:
    """Yield what a generator cannot do; raises RecipeError for bad settings."""
    part, key, length = recipe.generators[name], recipe.key_of(name), recipe.data.sequence_length
    family, settings = generator_family(recipe, name), generator_settings(recipe, name)
    if recipe.language.family == GENERAL:
        yield recipe.problem(
            (LANGUAGE, "family"),
            f"got {GENERAL}, but generators.{name} needs hidden states, which models of this "
            f"family do not hand out; name another family, or remove the generator",
        )
    if part.num_queries + 2 >= length:
        yield recipe.problem(
            (*key, "queries"),
            f"got {part.num_queries}, but an item takes {part.num_queries + 2} tokens beside its "
            f"prompt, and data.sequence_length is {length}; lower one or raise the other",
        )
    if part.num_queries > settings.most_rows:
        message = f"got {part.num_queries}, but {part.family} takes {settings.most_rows} at most"
        yield recipe.problem((*key, "queries"), message)
    try:
        schedule_of(recipe, name)
    except ValueError as error:
        yield recipe.problem(key, f"the folder's scheduler cannot be used: {error}")
    if isinstance(recipe.language.freeze, tuple) and not recipe.trains_before_language:
        is_trainable = trainable_names(recipe, LANGUAGE)
        weights = weights_of(recipe, LANGUAGE, language_settings(recipe).padded_vocab_size(1))
        if all(w.name.startswith("output_layer") for w in weights if is_trainable(w.name)):
            yield recipe.problem(
                (LANGUAGE, "freeze"),
                f"its patterns leave only the head, which has no part in the condition of "
                f"generators.{name}; set it to true, or let layers train",
            )
    if part.recompute == "selective":
        message = "got selective, but its attention is diffusers' own; set it to full or none"
        yield recipe.problem((*key, "recompute"), message)
    for target in part.lora.targets if part.lora else ():
        weights = [w for w in family.weights(settings) if LoRA(targets=(target,)).adapts(w.name)]
        others = [weight.name for weight in weights if len(weight.sources[0].shape) < 2]
        if not weights or others:
            fault = f"{others[0]} is no linear's" if others else "no linear has such a name"
            yield recipe.problem(
                (*key, "lora"),
                f"got {target} among its targets, but in {part.family} {fault}; give patterns "
                f"such as '*.to_q'",
            )


def _pattern_problems(recipe: Recipe, grid: GridSpec) -> Iterator[str]:
    """Yield patterns that match no name, and lists of patterns that freeze everything."""
    part, key = recipe.module(grid.module), recipe.key_of(grid.module)
    for target in part.lora.targets if part.lora and grid.engine == "megatron" else ():
        if target not in TARGETS:
            yield recipe.problem(
                (*key, "lora", "targets"),
                f"got {target}, but engine: megatron has no names of transformers; give some of "
                f"{', '.join(TARGETS)}",
            )
    if not isinstance(part.freeze, tuple):
        return
    vocab_size = language_settings(recipe).padded_vocab_size(1)
    names = [weight.name for weight in weights_of(recipe, grid.module, vocab_size)]
    for pattern in part.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield recipe.problem(
                (*key, "freeze"),
                f"got {pattern}, but no parameter has such a name; one is {names[-1]}",
            )
    if part.lora is None and not any(map(trainable_names(recipe, grid.module), names)):
        yield recipe.problem((*key, "freeze"), "its patterns freeze everything; set it to true")


def _profile_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    profile, steps, size = recipe.train.profile, recipe.train.steps, layout.world_size
    if profile is None:
        return
    for key, given, limit, what in (
        ("steps", profile.steps[1], steps, f"train.steps is {steps}, and steps"),
        ("ranks", max(profile.ranks, default=0), size, f"there are {size} ranks, and ranks"),
    ):
        if given >= limit:
            message = f"got {given}, but {what} count from 0; give at most {limit - 1}"
            yield recipe.problem(("train", "profile", key), message)


def _fp8_problems(recipe: Recipe, tp: int) -> Iterator[str]:
    """Yield adapters and sizes that 8-bit linears cannot have on any machine."""
    fp8, multiple = recipe.train.fp8, fp8_multiple(recipe.train.fp8)
    if fp8 == "none":
        return
    if recipe.language.lora is not None:
        yield recipe.problem(
            ("train", "fp8"),
            f"got {fp8}, but linears with adapters (language.lora) compute in bf16; remove one",
        )
    if language_settings(recipe).routers[0]:
        message = f"got {fp8}, but experts compute in the model's precision; set it to none"
        yield recipe.problem(("train", "fp8"), message)
        return
    vocab_size = language_settings(recipe).padded_vocab_size(1)
    period = language_settings(recipe).layer_period
    for weight in weights_of(recipe, LANGUAGE, vocab_size, num_layers=period):
        linear = weight.name.removesuffix(".weight").rpartition(".")[2]
        if not (linear.startswith("linear_") and weight.name.endswith(".weight")):
            continue
        rows, columns = weight.num_rows, num_elements([weight]) // weight.num_rows
        by_columns = weight.name.endswith(CUT_BY_COLUMNS)
        sizes = (rows, columns // tp) if by_columns else (rows // tp, columns)
        if any(size % multiple for size in sizes):
            yield recipe.problem(
                ("train", "fp8"),
                f"got {fp8}, which needs linears whose sizes on a rank are multiples of "
                f"{multiple}, but {linear} is {sizes[0]} x {sizes[1]} with language.grid.tp {tp}; "
                f"set it to none",
            )


def check_device(recipe: Recipe) -> None:
    """Raise RecipeError unless this machine has what the recipe asks for; initialises its GPU."""
    if problem := fp8_problem(recipe.train.fp8, this_machine()):
        raise RecipeError(recipe.problem(("train", "fp8"), problem))


def check_data(recipe: Recipe, build: Build = build_in_processes) -> None:
    """Open all splits, indexed by ``build``, and warn of unknown text. Raises RecipeError."""
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    problems: list[str] = []
    for line in added_tokens(chat):
        print(line, flush=True)
    for split in SPLITS:
        try:
            dataset = open_dataset(recipe, split, chat, processors, build=build)
            for line in unknown_text(sources_of(recipe, split), dataset.indexes if dataset else ()):
                print(line, flush=True)
            readers = iter(dataset.readers if dataset else ())
            for_each_source(
                recipe, [split], lambda _, readers=readers: _check_first(recipe, next(readers))
            )
            if split == "sources" and dataset is not None:
                problems += _too_few_samples(recipe, sum(map(len, dataset.indexes)))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(*problems)


def check_indexed_data(recipe: Recipe) -> list[str]:
    """Check the data as far as it is indexed; return notes on sources. Raises RecipeError."""
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    notes = added_tokens(chat)

    def num_samples(source: Source) -> float:
        survey = survey_source(recipe, source, chat, processors)
        if survey.tasks:
            notes.append(
                f"note: {source.path}: not indexed yet, so its samples are not checked; "
                "`mimo data index` does both"
            )
            return math.inf
        index = survey.open()
        check_index(index, source, recipe)
        _check_first(recipe, SampleReader(index, chat, processors))
        notes.extend(unknown_text([source], [index]))
        return len(index)

    counts = for_each_source(recipe, SPLITS, num_samples)
    if problems := [*_too_few_samples(recipe, sum(counts[: len(recipe.data.sources)]))]:
        raise RecipeError(*problems)
    return notes


def unreadable_inputs(recipe: Recipe) -> Iterator[str]:
    """Name the folders and shards of a recipe that this machine cannot read; URLs are not tried."""
    folders = {"init_from": recipe.init_from, "data.tokenizer": recipe.data.tokenizer}
    for key, folder in folders.items():
        try:
            if folder is not None and not os.listdir(folder):
                yield f"{key}: {folder} is empty"
        except OSError as error:
            yield f"{key}: {folder} cannot be read: {error}"
    for split in SPLITS:
        for path in (source.path for source in sources_of(recipe, split)):
            try:
                if not is_remote(path):
                    find_shards(path)
            except ValueError as error:
                yield f"data.{split}: {error}"


def _check_first(recipe: Recipe, reader: SampleReader) -> None:
    if recipe.language.family == GENERAL:
        from mimo.model.first_samples import check_first_samples  # late: it needs transformers

        check_first_samples(recipe, reader)


def _too_few_samples(recipe: Recipe, num_samples: float) -> Iterator[str]:
    size = recipe.train.micro_batch_size
    if size > num_samples:
        yield recipe.problem(
            ("train", "micro_batch_size"),
            f"got {size}, but data.sources have {num_samples} samples together; a microbatch "
            f"holds each once at most, so set it to {num_samples} or less",
        )


RANK_BYTES = 2**25
"""The least that a rank's process takes besides its model: pages that no other process shares."""


def check_processes(recipe: Recipe, num_ranks: int, memory: Memory) -> None:
    """Raise RecipeError unless ``num_ranks`` processes fit into the memory, without any model."""
    if num_ranks * RANK_BYTES > memory.available:
        message = (
            f"{num_ranks} ranks on this machine need {format_bytes(num_ranks * RANK_BYTES)} at "
            f"least, but it has {format_bytes(memory.available)} left; use fewer, or more machines"
        )
        raise RecipeError(recipe.problem((LANGUAGE, "grid"), message))


def check_memory(recipe: Recipe, layout: Layout, ranks: range, memory: Memory) -> None:
    """Raise RecipeError unless ``ranks``, which share ``memory``, can hold their modules."""
    if memory.is_of_processes:
        check_processes(recipe, len(ranks), memory)
    counts = [
        (role, len(range(max(role.ranks.start, ranks.start), min(role.ranks.stop, ranks.stop))))
        for role in parameters_by_role(recipe, layout)
    ]
    processes = len(ranks) * RANK_BYTES if memory.is_of_processes else 0
    needed = sum(role.total * count for role, count in counts) + processes
    if needed <= memory.available:
        return
    largest, _ = max(counts, key=lambda pair: pair[0].total * pair[1])
    sizes = "; ".join(
        f"{role.role}: {count} x {format_bytes(role.total)}" for role, count in counts if count
    )
    shares = "tp or pp, set train.distributed_optimizer or train.precision: bf16"
    if layout.grids[largest.module].engine == "fsdp":
        # Between the microbatches of a step gradients are whole on every lane.
        shares = "dp / dp_replicate or tp, have fewer microbatches in a step"
    raise RecipeError(
        recipe.problem(
            (*recipe.key_of(largest.module), "model"),
            f"weights, gradients and optimizer state need {format_bytes(needed)} at least "
            f"({sizes}) on {len(ranks)} rank{'s' * (len(ranks) > 1)} that share a memory, but "
            f"{memory.name} has {format_bytes(memory.available)} left; make the model smaller, "
            f"raise {shares}, or use more machines",
        )
    )


def check_room(
    phased: PhasedRecipe, layouts: Sequence[Layout], environment: RankEnv | None
) -> None:
    """Raise RecipeError if this machine cannot hold a phase's model; ranks check GPUs later."""
    if has_gpu():
        return
    phased.each(check_device)
    memory, pairs = machine_memory(), zip(phased.phases, layouts, strict=True)
    layout_of = {id(phase.recipe): layout for phase, layout in pairs}

    def check(recipe: Recipe) -> None:
        layout = layout_of[id(recipe)]
        ranks = range(layout.world_size) if environment is None else environment.ranks_here
        check_memory(recipe, layout, ranks, memory)

    phased.each(check)
