"""A job: a request that was checked, and the runs that it begins, continues or restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mimo.checkpoint.folder import named_by_latest, return_to
from mimo.checkpoint.hf.recipes import load_phases
from mimo.checkpoint.manifest import naming
from mimo.checkpoint.resume import Choice, Run, candidates, choose, runs_to_do
from mimo.config.phases import PhasedRecipe
from mimo.device import choose_before_fork
from mimo.model.recipe_checks import check_data, check_recipe, check_room
from mimo.parallel.grids import Layout
from mimo.runtime.processes import warm_up
from mimo.runtime.ranks import RankEnv
from mimo.train import run_folder
from mimo.train.loggers import check_loggers
from mimo.train.restarts import record_restart, start_time

# Imported once by the fork server, so that ranks start in a tenth of a second.
PRELOAD = ("mimo.engines.megatron.preload", "mimo.train.rank", "transformers")


@dataclass(frozen=True)
class Request:
    """The arguments of `mimo train`. site: a file whose keys override `cluster:`."""

    path: Path
    overrides: Sequence[str] = ()
    num_ranks: int | None = None
    resume: bool = False
    resume_from: Path | None = None
    site: Path | None = None

    def check(self, environment: RankEnv | None) -> Job:
        """Check everything that needs no ranks. Raises RecipeError with all problems.

        environment: of a rank of torchrun or srun, which checks the data after the rendezvous.
        """
        ranks = environment.world_size if environment else self.num_ranks
        phased = load_phases(self.path, self.overrides, self.site)
        layouts = phased.each(lambda recipe: check_recipe(recipe, ranks))
        num_ranks = max(layout.world_size for layout in layouts)
        if environment is None and (note := choose_before_fork(num_ranks)) is not None:
            print(note)
        check_room(phased, layouts, environment)
        phased.each(check_loggers)
        if environment is None:
            warm_up(PRELOAD)  # ranks and indexing processes need the same
            phased.each(check_data)
        return Job(phased, layouts, self.resume, self.resume_from)


@dataclass(frozen=True)
class Job:
    """A checked recipe, the layout of each of its phases, and whether it resumes a run."""

    phased: PhasedRecipe
    layouts: Sequence[Layout]
    resume: bool = False
    resume_from: Path | None = None

    def candidates(self) -> list[Path]:
        """Return the checkpoints that it may continue from, best first. Raises InputError."""
        return candidates(self.phased, self.resume, self.resume_from)

    def begin(self, choice: Choice | None = None) -> list[Run]:
        """Make the folders of the runs to do and return these, none where all steps are done.

        The one process that holds the run's lock calls it. choice: among `candidates`; None to make
        it now. Raises RecipeError as `check_start` does, before anything is written.
        """
        if choice is None:
            choice = choose(self.candidates())
        runs = runs_to_do(self.phased, self.layouts, choice.checkpoint)
        first = runs[0]  # later runs follow from it
        changes = run_folder.check_start(first)
        if run_folder.is_at_end(first):
            return []
        with naming(self.phased.run_dir):
            if self.resume_from is None and choice.checkpoint is not None:
                if not choice.damaged and not named_by_latest(choice.checkpoint):
                    print(f"`latest` names no checkpoint; using {choice.checkpoint}, the newest")
                return_to(choice.checkpoint, choice.damaged)
            elif choice.checkpoint is not None and first.resumes:
                return_to(choice.checkpoint.resolve(), ())  # `latest` of another run stays as it is
            run_folder.make_run_dirs(self.phased, runs, self.resume or self.resume_from is not None)
        run_folder.report_choice(choice, first.recipe.run_dir)
        for line in changes:
            print(line, flush=True)
        run_folder.print_save_intervals(runs)
        return runs

    def after_failure(self) -> Job:
        """Return the job that continues from the last checkpoint of this one, if there is any."""
        has_any = bool(candidates(self.phased, True, None))
        return replace(self, resume=True, resume_from=None if has_any else self.resume_from)

    def restart(
        self,
        max_restarts: int,
        cause: str = "",
        rank: int | None = None,
        choice: Choice | None = None,
    ) -> list[Run]:
        """Begin again after the ranks have failed, and return the runs to do.

        cause, rank: if known. choice: among the candidates of `after_failure`; None to make it now.
        Raises NotRestarted where a restart would not help.
        """
        job = self.after_failure()
        choice = choice or choose(job.candidates())
        run_dir = runs_to_do(self.phased, self.layouts, choice.checkpoint)[0].recipe.run_dir
        started = start_time(self.phased.run_dir)
        record_restart(run_dir, max_restarts, started, cause, rank)
        return job.begin(choice)
