"""`mimo quickstart`: prepare, train, evaluate on held-out images, and show a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mimo import job
from mimo.launch import warm_up
from mimo.prepare import prepare
from mimo.recipe import load_recipe

RECIPE = Path("recipes/quickstart.yaml")


def main(overrides: Sequence[str]) -> int:
    """Run the quickstart; its last line is ``exact_match=0.944 per_digit=0.978``."""
    recipe = load_recipe(RECIPE, overrides)
    # The engine loads in the background while the data is prepared.
    warm_up(job.PRELOAD)
    prepare(recipe)
    code = job.main(RECIPE, overrides)
    if code != 0:
        return code
    from mimo.evaluate import answer_split, draw, score

    run_dir = job.run_dir_of(recipe)
    print("answering held-out samples ...", flush=True)
    answered = answer_split(run_dir)
    picture = run_dir / "held_out.png"
    draw(answered, picture)
    result = score(answered)
    print(f"run folder: {run_dir}")
    print(f"picture: {picture}")
    print(f"exact_match={result.exact_match:.3f} per_digit={result.per_word:.3f}")
    return 0
