"""A training job: checks everything that can be checked, makes the run folder, starts ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from mimo.checkpoint.folder import latest_checkpoint
from mimo.checkpoint.runs import Run, runs_to_do
from mimo.checkpoint.start import FromScratch
from mimo.device import choose_before_fork, has_gpu, machine_memory
from mimo.errors import InputError, RecipeError
from mimo.families.registry import (
    encoder_family,
    encoder_settings,
    language_family,
    language_settings,
)
from mimo.hf.initial import initial_weights
from mimo.launch.processes import end_with_failed_thread, exit_code_of
from mimo.launch.ranks import RankEnv, launch, rank_environment
from mimo.layout.grids import Layout, build_layout
from mimo.model.memory import check_memory
from mimo.recipe.phases import StagedRecipe, load_stages
from mimo.recipe.schema import Recipe
from mimo.step.dataset import check_media, item_processors, open_dataset, open_tokenizer
from mimo.train.run_lock import run_lock

if TYPE_CHECKING:
    from mimo.launch.meeting import Meeting

# What the forkserver imports once, so that ranks start in a tenth of a second.
PRELOAD = ("mimo.engines.megatron.preload", "mimo.train.rank", "transformers")
# How far apart ranks may come, where no recipe that can be read says so.
_MEETING_SECONDS = 600.0


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

    On GPUs each rank looks at its own, once it has one: see `mimo.train.rank`.
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

    resumes: whether the job was begun before. Then only what it does anew steps aside; what was
    ended before its first checkpoint begins again in its folder.
    """
    if staged.has_stages:
        if not resumes:
            _step_aside(staged.run_dir)
        staged.run_dir.mkdir(parents=True, exist_ok=True)
        (staged.run_dir / "recipe.yaml").write_text(staged.to_yaml())
    for run in runs:
        has_nothing = resumes and latest_checkpoint(run.recipe.run_dir) is None
        make_run_dir(run.recipe, resumes=run.resumes or has_nothing)
    if resumes and isinstance(runs[0].start, FromScratch):
        print(f"no checkpoint in {staged.run_dir} yet: starting anew")
    elif resumes and not staged.has_stages:
        print(f"the run {runs[0].begins}")
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
    request = Request(path, overrides, num_ranks, resume, resume_from)
    environment = rank_environment()
    if environment is not None:
        return _be_a_rank(request, environment)
    job = request.check(None)
    with run_lock(job.staged.run_dir):
        return train_here(job)


@dataclass(frozen=True)
class Request:
    """What a person asks `mimo train` for."""

    path: Path
    overrides: Sequence[str] = ()
    num_ranks: int | None = None
    resume: bool = False
    resume_from: Path | None = None

    def check(self, environment: RankEnv | None) -> Job:
        """Check all that can be checked without ranks. Raises RecipeError with all problems.

        environment: of this rank, where torchrun or srun has started it.
        """
        ranks = environment.world_size if environment else self.num_ranks
        staged = load_stages(self.path, self.overrides)
        layouts = staged.each(lambda recipe: check_recipe(recipe, ranks))
        num_ranks = max(layout.world_size for layout in layouts)
        if environment is None and (note := choose_before_fork(num_ranks)) is not None:
            print(note)
        check_room(staged, layouts, environment)
        check_run_dir(staged)
        staged.each(check_data)
        return Job(staged, layouts, self.resume, self.resume_from)


@dataclass(frozen=True)
class Job:
    """A checked recipe, on which layout each of its stages trains, and whether it goes on."""

    staged: StagedRecipe
    layouts: Sequence[Layout]
    resume: bool = False
    resume_from: Path | None = None

    def begin(self) -> list[Run]:
        """The runs to do, with their folders; called by one process, which holds the run's lock."""
        runs = runs_to_do(self.staged, self.layouts, self.resume, self.resume_from)
        for run in runs:
            if isinstance(run.start, FromScratch):
                initial_weights(run.recipe)  # so that a wrong folder is named before any rank reads
        make_run_dirs(self.staged, runs, self.resume or self.resume_from is not None)
        return runs


def train_here(job: Job) -> int:
    """Train on ranks of this machine; returns an exit code."""
    for run in job.begin():
        if job.staged.has_stages:
            print(run, flush=True)
        run_dir = run.recipe.run_dir
        args = (run.recipe, run.layout, run_dir, run.start)
        code = launch("mimo.train.rank:run_rank", args, run.layout.world_size, PRELOAD, run_dir)
        if code != 0:
            return code
    return 0


def _be_a_rank(request: Request, environment: RankEnv) -> int:
    """Train as a rank that torchrun or srun has started; returns an exit code.

    All ranks check the recipe; rank 0 makes the run folders, and speaks for all.
    """
    job, problem = None, ""
    try:
        job = request.check(environment)
    except InputError as error:
        problem = str(error)
    from mimo.launch.meeting import Meeting, Refused

    recipes = [stage.recipe for stage in job.staged.stages] if job else []
    timeouts = [recipe.bridge.timeout_seconds for recipe in recipes]
    meeting = Meeting(environment, max(timeouts, default=_MEETING_SECONDS))
    with ExitStack() as stack:

        def begin() -> list[Run]:
            assert job is not None, "a rank without a job has a problem"
            stack.enter_context(run_lock(job.staged.run_dir))
            return job.begin()

        try:
            meeting.agree(problem)
            runs = meeting.from_rank_0(begin)
        except Refused:
            return InputError.exit_code
        _train_in_place(runs, meeting)
    return 0


def _train_in_place(runs: Sequence[Run], meeting: Meeting) -> None:
    """The same ranks do all runs, one after another. Does not return when one of them fails."""
    from mimo.train.rank import join_world, leave_world, train_in_world

    run_dir = runs[0].recipe.run_dir

    def end(error: BaseException) -> NoReturn:
        meeting.last_words(error, run_dir)
        # Not by way of the interpreter, which may wait for a backend that waits for other ranks.
        os._exit(exit_code_of(error))

    end_with_failed_thread(end)
    try:
        rank = join_world(*(run.recipe for run in runs), store=meeting.store).rank
        for run in runs:
            run_dir = run.recipe.run_dir
            if run.stage.name and rank == 0:
                print(run, flush=True)
            train_in_world(run.recipe, run.layout, run_dir, run.start)
        leave_world()
    except Exception as error:
        end(error)
