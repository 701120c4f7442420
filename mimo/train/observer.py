"""How to watch a run: where it stands, and what its steps compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # so that watching needs no engine
    from mimo.engines.contract import Module
    from mimo.model.step_plan import StepPlan

ACTIVITIES = (
    "setup",
    "batch",
    "forward and backward",
    "gradients",
    "data of a later step",
    "norm and loss",
    "update",
    "checkpoint",
    "validation",
)
"""What a rank does, in this order."""


class StepObserver(Protocol):
    """Watches the steps of one rank. The methods do nothing; an observer overrides those it needs.

    All ranks call them in the same order, so an observer on every rank may use collectives.
    """

    def at(self, step: int, activity: str) -> None:
        """The rank begins one of `ACTIVITIES`."""

    def planned(self, step: int, plan: StepPlan) -> None:
        """The plan of a step is complete; nothing has been computed yet."""

    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        """All gradients are summed and divided, but not yet clipped.

        modules: those of which this rank owns a part, by name.
        """

    def updated(self, step: int, modules: Mapping[str, Module]) -> None:
        """The weights have been updated by the step."""
