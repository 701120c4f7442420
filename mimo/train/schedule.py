"""The learning rate of every module at every step, as a function of the recipe alone."""

import math

from mimo.config.schema import Recipe, Train


def learning_rate(train: Train, peak: float, warmup_steps: int, step: int) -> float:
    """Return a module's learning rate in a step, from 0; steps without an update count, too."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    # Warm-up, a long stretch at the peak and a short decay: Hu et al. 2024, arXiv:2404.06395.
    begin = train.steps - train.last_decay_steps if train.schedule == "wsd" else warmup_steps
    progress = min(1.0, max(0.0, (step - begin) / max(1, train.steps - begin)))
    match train.schedule:
        case "constant":
            height = 1.0
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            height = 1 - progress
    lowest = train.min_learning_rate_ratio
    return peak * (lowest + (1 - lowest) * height)


def learning_rates(recipe: Recipe, step: int) -> dict[str, float]:
    """Return the learning rate of every module that trains, whichever rank owns it."""
    train = recipe.train
    return {
        name: learning_rate(
            train, part.learning_rate or train.learning_rate, recipe.warmup_steps(name), step
        )
        for name, part in recipe.modules.items()
        if recipe.trains(name)
    }
