"""`mimo quickstart`: prepare, train, evaluate on held-out images, and show a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_phases
from mimo.device import choose_before_fork
from mimo.model.prepare import prepare
from mimo.model.recipe_checks import check_data, check_recipe, check_room
from mimo.runtime.ranks import warm_up
from mimo.runtime.run_lock import run_lock
from mimo.train.main import PRELOAD, Job, train_here
from mimo.train.run_folder import check_run_dir


def recipe_path() -> Path:
    """The quickstart's recipe: that of the checkout if run in one, else the installed one."""
    local = Path("recipes/quickstart.yaml")
    return local if local.is_file() else Path(str(files("recipes"))) / "quickstart.yaml"


def main(overrides: Sequence[str]) -> int:
    """Run the quickstart; its last line is like ``exact_match=0.951 per_digit=0.979``."""
    path = recipe_path()
    phased = load_phases(path, overrides)
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    if (note := choose_before_fork(max(layout.world_size for layout in layouts))) is not None:
        print(note)
    check_room(phased, layouts, None)
    check_run_dir(phased)
    with run_lock(phased.run_dir):
        # The engine loads in the background while the data is prepared.
        warm_up(PRELOAD)
        phased.each(prepare)
        phased.each(check_data)
        code = train_here(Job(phased, layouts))
        return code or _show(phased.run_dir)


def _show(run_dir: Path) -> int:
    from mimo.generate.evaluate import evaluate

    print("answering held-out samples ...", flush=True)
    picture = run_dir / "held_out.png"
    result = evaluate(run_dir, picture)
    print(f"run folder: {run_dir}")
    print(f"picture: {picture}")
    print(str(result).replace("per_word", "per_digit"))
    return 0
