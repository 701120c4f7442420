"""Warm-up, then cosine: the learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(
    step: int, total_steps: int, peak: float, warmup_steps: int, minimum_ratio: float
) -> float:
    """Learning rate of ``step`` (from 0): linear up to ``peak``, cosine down to a ratio of it."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (minimum_ratio + (1 - minimum_ratio) * cosine)
