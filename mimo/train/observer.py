"""Who watches a run: where it stands, and what the steps compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # so that watching needs no engine
    from mimo.engines.megatron.module import Module
    from mimo.step.plan import StepPlan

ACTIVITIES = (
    "setup",
    "forward and backward",
    "gradients",
    "data of the next step",
    "norm and loss",
    "update",
    "validation",
    "checkpoint",
)
"""What a rank does, in this order."""


class StepObserver(Protocol):
    """Watches the steps of one rank. Each method does nothing; an observer overrides what it needs.

    All ranks call in the same order, so an observer that every rank has may use collectives.
    """

    def at(self, step: int, activity: str) -> None:
        """The rank begins with one of `ACTIVITIES`."""

    def planned(self, step: int, plan: StepPlan) -> None:
        """The plan of a step is complete; nothing has been computed yet."""

    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        """All gradients are summed and divided; they are not clipped.

        modules: those that this rank owns a part of, by name.
        """

    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        """The weights are those after the step."""
