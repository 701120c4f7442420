"""A training job: checks everything that can be checked, makes the run folder, starts ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mimo.checkpoint_folder import find_checkpoint
from mimo.dataset import check_media, item_processors, open_dataset, open_tokenizer
from mimo.device import choose_before_fork
from mimo.families import encoder_family, encoder_settings, language_family, language_settings
from mimo.hf.initial import initial_weights
from mimo.launch import launch, rank_environment
from mimo.layout import Layout, build_layout
from mimo.rank_processes import end_with_failed_thread, print_and_exit
from mimo.recipe import Recipe, load_recipe
from mimo.recipe_errors import RecipeError

# What the forkserver imports once, so that ranks start in a tenth of a second.
PRELOAD = ("mimo.megatron.preload", "mimo.train", "transformers")


def check_recipe(recipe: Recipe, num_ranks: int | None) -> Layout:
    """Everything about a recipe that needs no data: layout, families, sizes against grids.

    Raises RecipeError with all problems found.
    """
    layout = build_layout(recipe, num_ranks)
    problems: list[str] = []
    if not recipe.language.trains and not any(e.trains for e in recipe.encoders.values()):
        problems.append(
            recipe.problem(("language", "freeze"), "every module is frozen; train at least one")
        )
    try:
        settings = language_settings(recipe)
        grid = layout.language
        problems += [
            recipe.problem(("language", "grid"), message)
            for message in language_family(recipe).check_grid(
                settings,
                grid.tp,
                grid.pp * grid.vpp,
                settings.padded_vocab_size(1),
            )
        ]
        rules = language_family(recipe).ITEM_RULES
        if rules.bidirectional and recipe.encoders and not recipe.data.packing:
            message = (
                f"got false, but in language.family {recipe.language.family} the tokens of an item "
                "see each other in both directions, which needs packed sequences; set it to true"
            )
            problems.append(recipe.problem(("data", "packing"), message))
    except RecipeError as error:
        problems += error.problems
    try:
        check_media(recipe)
    except RecipeError as error:
        problems += error.problems
    for name, spec in layout.encoders.items():
        try:
            settings = encoder_settings(recipe, name)
            problems += [
                recipe.problem(("encoders", name, "grid"), message)
                for message in encoder_family(recipe, name).check_grid(settings, spec.tp, spec.pp)
            ]
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(*problems)
    return layout


def check_data(recipe: Recipe) -> None:
    """Open all splits, building indexes where there are none. Raises RecipeError."""
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    problems: list[str] = []
    for split in ("sources", "validation", "test"):
        try:
            open_dataset(recipe, split, chat, processors)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(*problems)


def run_dir_of(recipe: Recipe) -> Path:
    """Where the run of this recipe lives."""
    return Path(recipe.train.run_dir) / recipe.name


def make_run_dir(recipe: Recipe, resumes: bool) -> Path:
    """The run folder with the resolved recipe in it; an older run of that name steps aside."""
    run_dir = run_dir_of(recipe)
    if run_dir.exists() and not resumes:
        number = 1
        while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(aside)
        print(f"the previous run moved to {aside}")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").write_text(recipe.to_yaml())
    return run_dir


def main(
    path: Path,
    overrides: Sequence[str],
    num_ranks: int | None = None,
    *,
    resume: bool = False,
    resume_from: Path | None = None,
) -> int:
    """`mimo train`: run the recipe on this machine, or be one rank of a torchrun or srun job."""
    environment = rank_environment()
    recipe = load_recipe(path, overrides)
    layout = check_recipe(recipe, environment.world_size if environment else num_ranks)
    check_data(recipe)
    checkpoint = _checkpoint_to_resume(recipe, resume, resume_from)
    if checkpoint is None:
        initial_weights(recipe)  # here, so that a wrong folder is named before any rank starts
    if environment is not None:
        return _run_in_place(recipe, checkpoint)
    if (note := choose_before_fork(layout.world_size)) is not None:
        print(note)
    run_dir = make_run_dir(recipe, resumes=checkpoint is not None)
    print(f"run folder: {run_dir}")
    sys.stdout.flush()
    return launch(
        "mimo.train:run_rank", (recipe, run_dir, checkpoint), layout.world_size, PRELOAD, run_dir
    )


def _checkpoint_to_resume(recipe: Recipe, resume: bool, resume_from: Path | None) -> Path | None:
    if not resume and resume_from is None:
        return None
    run_dir = run_dir_of(recipe)
    return find_checkpoint(resume_from or run_dir)


def _run_in_place(recipe: Recipe, checkpoint: Path | None) -> int:
    """This process is a rank already; once all have joined, rank 0 makes the run folder."""
    import torch.distributed as dist

    from mimo.train import join_world, train_in_world

    end_with_failed_thread(print_and_exit)
    run_dir = run_dir_of(recipe)
    if join_world(recipe).rank == 0:
        make_run_dir(recipe, resumes=checkpoint is not None)
    dist.barrier()
    train_in_world(recipe, run_dir, checkpoint)
    return 0
