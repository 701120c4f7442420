"""Where a training run begins. Needs no engine, so a launcher can hand it to its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FromScratch:
    """Freshly drawn weights, step 0."""


@dataclass(frozen=True)
class Resume:
    """Where the run that wrote ``checkpoint`` stood: weights, optimizers, step and data."""

    checkpoint: Path


@dataclass(frozen=True)
class FromWeights:
    """The weights of ``checkpoint``, in whatever layout; fresh optimizers, step 0."""

    checkpoint: Path


Start = FromScratch | Resume | FromWeights
