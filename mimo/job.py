"""A training job: checks everything that can be checked, makes the run folder, starts ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mimo.checkpoint_folder import latest_checkpoint
from mimo.dataset import check_media, item_processors, open_dataset, open_tokenizer
from mimo.device import choose_before_fork, has_gpu, machine_memory
from mimo.families import encoder_family, encoder_settings, language_family, language_settings
from mimo.hf.initial import initial_weights
from mimo.launch import RankEnv, launch, rank_environment
from mimo.layout import Layout, build_layout
from mimo.memory import check_memory
from mimo.rank_processes import end_with_failed_thread, print_and_exit
from mimo.recipe import Recipe
from mimo.recipe_errors import RecipeError
from mimo.stage_runs import Run, runs_to_do
from mimo.stages import StagedRecipe, load_stages
from mimo.start import FromScratch

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
            dataset = open_dataset(recipe, split, chat, processors)
            if split == "sources" and dataset is not None:
                problems += _too_few_samples(recipe, sum(map(len, dataset.indexes)))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(*problems)


def _too_few_samples(recipe: Recipe, num_samples: int) -> Iterator[str]:
    size = recipe.train.micro_batch_size
    if size > num_samples:
        yield recipe.problem(
            ("train", "micro_batch_size"),
            f"got {size}, but data.sources have {num_samples} samples together; a microbatch "
            f"holds each once at most, so set it to {num_samples} or less",
        )


def check_run_dir(staged: StagedRecipe) -> None:
    """Raise RecipeError unless the run's folder can be made. Makes the one that it goes into."""
    parent = staged.run_dir.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=parent, prefix=".mimo-"):
            pass
    except OSError as error:
        message = f"no folder can be made in {parent} ({error.strerror}); name another"
        recipe = staged.stages[0].recipe
        raise RecipeError(recipe.problem(("train", "run_dir"), message)) from error


def check_room(
    staged: StagedRecipe, layouts: Sequence[Layout], environment: RankEnv | None
) -> None:
    """Raise RecipeError where the ranks of this machine cannot hold a stage's model.

    On GPUs each rank looks at its own, once it has one: see `mimo.train`.
    """
    memory = None if has_gpu() else machine_memory()
    if memory is None:
        return
    of_recipe = {id(stage.recipe): own for stage, own in zip(staged.stages, layouts, strict=True)}

    def check(recipe: Recipe) -> None:
        layout = of_recipe[id(recipe)]
        ranks = range(layout.world_size) if environment is None else environment.ranks_here
        check_memory(recipe, layout, ranks, memory)

    staged.each(check)


def make_run_dir(recipe: Recipe, resumes: bool) -> Path:
    """The run folder with the resolved recipe in it; an older run of that name steps aside."""
    run_dir = recipe.run_dir
    if not resumes:
        _step_aside(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").write_text(recipe.to_yaml())
    return run_dir


def make_run_dirs(staged: StagedRecipe, runs: Sequence[Run], resumes: bool) -> None:
    """The folders of all runs that a job has to do.

    resumes: whether the job was begun before. Then only what it does anew steps aside; a stage that
    was ended before its first checkpoint begins again in its folder.
    """
    if staged.has_stages:
        if not resumes:
            _step_aside(staged.run_dir)
        staged.run_dir.mkdir(parents=True, exist_ok=True)
        (staged.run_dir / "recipe.yaml").write_text(staged.to_yaml())
    for run in runs:
        has_nothing = resumes and latest_checkpoint(run.recipe.run_dir) is None
        make_run_dir(run.recipe, resumes=run.resumes or has_nothing)
    print(f"run folder: {staged.run_dir}", flush=True)


def _step_aside(run_dir: Path) -> None:
    if not run_dir.exists():
        return
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(aside)
    print(f"the previous run moved to {aside}")


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
    staged = load_stages(path, overrides)
    ranks = environment.world_size if environment else num_ranks
    layouts = staged.each(lambda recipe: check_recipe(recipe, ranks))
    num_ranks = max(layout.world_size for layout in layouts)
    if environment is None and (note := choose_before_fork(num_ranks)) is not None:
        print(note)
    check_room(staged, layouts, environment)
    check_run_dir(staged)
    staged.each(check_data)
    resumes = resume or resume_from is not None
    runs = runs_to_do(staged, layouts, resume, resume_from)
    for run in runs:
        if isinstance(run.start, FromScratch):
            initial_weights(run.recipe)  # so that a wrong folder is named before any rank starts
    if environment is not None:
        return _run_in_place(staged, runs, resumes)
    make_run_dirs(staged, runs, resumes)
    for run in runs:
        if staged.has_stages:
            print(run, flush=True)
        run_dir = run.recipe.run_dir
        args = (run.recipe, run_dir, run.start)
        code = launch("mimo.train:run_rank", args, run.layout.world_size, PRELOAD, run_dir)
        if code != 0:
            return code
    return 0


def _run_in_place(staged: StagedRecipe, runs: Sequence[Run], resumes: bool) -> int:
    """This process is a rank already; once all have joined, rank 0 makes the run folders.

    The same ranks do all runs, one after another.
    """
    import torch.distributed as dist

    from mimo.train import join_world, leave_world, train_in_world

    end_with_failed_thread(print_and_exit)
    rank = join_world(*(run.recipe for run in runs)).rank
    if rank == 0:
        make_run_dirs(staged, runs, resumes)
    dist.barrier()
    for run in runs:
        if staged.has_stages and rank == 0:
            print(run, flush=True)
        train_in_world(run.recipe, run.recipe.run_dir, run.start)
    leave_world()
    return 0
