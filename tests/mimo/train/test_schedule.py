"""Learning rates of every schedule against their closed forms, and per module."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.train.schedule import learning_rates
from tests.mimo import tiny

PEAK, WARMUP, STEPS, RATIO = 0.5, 4, 20, 0.2
LOWEST = RATIO * PEAK


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("schedule")
    tiny.write_samples(directory, (1,))
    return tiny.write_recipe(directory)


def recipe_of(path: Path, *overrides: str) -> Recipe:
    train = {"learning_rate": PEAK, "warmup_steps": WARMUP, "steps": STEPS}
    train |= {"min_learning_rate_ratio": RATIO, "global_batch_size": 4}
    return load_recipe(path, [*(f"train.{key}={train[key]}" for key in train), *overrides])


def rates(recipe: Recipe, module: str = "language") -> list[float]:
    return [learning_rates(recipe, step)[module] for step in range(recipe.train.steps)]


RISE = [PEAK * (step + 1) / WARMUP for step in range(WARMUP)]
LEFT = [step / (STEPS - WARMUP) for step in range(STEPS - WARMUP)]
FORMS = {
    "constant": [*RISE, *[PEAK] * (STEPS - WARMUP)],
    "linear": [*RISE, *(PEAK + (LOWEST - PEAK) * share for share in LEFT)],
    "cosine": [
        *RISE,
        *(LOWEST + (PEAK - LOWEST) * math.cos(math.pi / 2 * share) ** 2 for share in LEFT),
    ],
    "wsd": [*RISE, *[PEAK] * 10, *(PEAK + (LOWEST - PEAK) * n / 6 for n in range(6))],
}


@pytest.mark.parametrize("schedule", FORMS)
def test_a_schedule_is_its_closed_form(path: Path, schedule: str) -> None:
    decay = ["train.decay_steps=6"] if schedule == "wsd" else []
    curve = rates(recipe_of(path, f"train.schedule={schedule}", *decay))
    assert curve == pytest.approx(FORMS[schedule], rel=1e-12)


def test_without_a_schedule_it_is_a_cosine_and_wsd_falls_in_the_last_tenth(path: Path) -> None:
    assert rates(recipe_of(path)) == pytest.approx(FORMS["cosine"], rel=1e-12)
    curve = rates(recipe_of(path, "train.schedule=wsd"))
    assert curve[WARMUP:-1] == [PEAK] * (STEPS - WARMUP - 1)
    assert curve[-1] == pytest.approx((PEAK + LOWEST) / 2)


def test_a_module_rises_over_its_own_steps_and_falls_from_there(path: Path) -> None:
    warmup = ["encoders.vision.warmup_steps=10", "encoders.vision.learning_rate=0.02"]
    recipe = recipe_of(path, *warmup, "language.warmup_steps=0", "train.schedule=linear")
    vision = rates(recipe, "vision")
    assert vision[:10] == pytest.approx([0.002 * (step + 1) for step in range(10)])
    assert vision[10:] == pytest.approx([0.02 - 0.016 * n / 10 for n in range(10)])
    assert rates(recipe)[0] == PEAK


def test_a_frozen_module_has_no_rate(path: Path) -> None:
    recipe = recipe_of(path, "encoders.vision.freeze=true")
    assert learning_rates(recipe, 3).keys() == {"language"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.decay_steps=5"], "decay_steps: 5 needs schedule: wsd, but it is cosine"),
        (
            ["train.schedule=wsd", "train.decay_steps=12", "encoders.vision.warmup_steps=9"],
            "encoders.vision.warmup_steps 9 + train.decay_steps 12 exceed train.steps 20",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(
    path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe_of(path, *overrides)
