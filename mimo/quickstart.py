"""`mimo quickstart`: prepare, train, evaluate on held-out images, and show a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from mimo import job
from mimo.device import choose_before_fork
from mimo.launch import warm_up
from mimo.prepare import prepare
from mimo.stages import load_stages


def recipe_path() -> Path:
    """The quickstart's recipe: the one in this folder's checkout, else the installed one."""
    local = Path("recipes/quickstart.yaml")
    return local if local.is_file() else Path(str(files("recipes"))) / "quickstart.yaml"


def main(overrides: Sequence[str]) -> int:
    """Run the quickstart; its last line is ``exact_match=0.944 per_digit=0.978``."""
    path = recipe_path()
    staged = load_stages(path, overrides)
    layouts = staged.each(lambda recipe: job.check_recipe(recipe, None))
    choose_before_fork(max(layout.world_size for layout in layouts))
    job.check_room(staged, layouts, None)
    # The engine loads in the background while the data is prepared.
    warm_up(job.PRELOAD)
    staged.each(prepare)
    code = job.main(path, overrides)
    if code != 0:
        return code
    from mimo.evaluate import answer_split, draw, score

    run_dir = staged.run_dir
    print("answering held-out samples ...", flush=True)
    answered = answer_split(run_dir)
    picture = run_dir / "held_out.png"
    draw(answered, picture)
    result = score(answered)
    print(f"run folder: {run_dir}")
    print(f"picture: {picture}")
    print(f"exact_match={result.exact_match:.3f} per_digit={result.per_word:.3f}")
    return 0
