"""Runs layouts on real ranks of this machine and compares each with one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mimo.check.verify.cells import Cell
from mimo.check.verify.compare import (
    Comparison,
    Fault,
    IncomparableError,
    RankSteps,
    Reference,
    assembled,
    compare,
)
from mimo.check.verify.scale import (
    DOUBTFUL,
    NUM_STEPS,
    TOLERANCE,
    ScaledRecipe,
    reference_recipe,
    scale_recipe,
)
from mimo.runtime.processes import RanksFailed, RanksHung
from mimo.runtime.ranks import run_on_cpu

# Named, not imported: only the fork server loads the engine.
_LAYOUT, _REFERENCE = (
    "mimo.check.verify.run:run_layout",
    "mimo.check.verify.reference:run_reference",
)
PRELOAD = (
    "mimo.engines.megatron.preload",
    "mimo.check.verify.run",
    "mimo.check.verify.reference",
    "mimo.model.fsdp",
)
_TIMEOUT_SECONDS = 300.0


@dataclass
class CellResult:
    """comparison: None if the run failed; then ``failure`` says how.

    repeated: the same layout in fp64, if fp32 left open whether the error is rounding; it decides.
    plain: the distributed optimizer has no fp64, so where the fp64 run had to do without it, this
    compares the layout with it to the layout without, in fp32; it decides too.
    """

    cell: Cell
    seconds: float = 0.0
    comparison: Comparison | None = None
    failure: str | None = None
    repeated: Comparison | None = None
    plain: Comparison | None = None

    @property
    def deciding(self) -> list[Comparison]:
        """The comparisons that must show equality; none if the run failed."""
        last = [one for one in (self.repeated, self.plain) if one is not None]
        return [] if self.failure or not self.comparison else last or [self.comparison]

    @property
    def passed(self) -> bool:
        """Whether the layout takes the steps of one rank."""
        return bool(self.deciding) and all(one.first is None for one in self.deciding)

    @property
    def verdict(self) -> str:
        """One or two words for a table."""
        word = "equal" if self.passed else "DIFFERS" if self.deciding else "FAILED"
        return f"{word} (fp64)" if self.repeated and self.deciding else word


class Verifier:
    """Compares layouts; layouts that share model and batches share the run on one rank.

    folder: for the data, written once. Start the fork server (`warm_up_on_cpu`) first.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        self.folder = folder
        self.precision = precision
        self.tolerance = TOLERANCE[precision]
        self._references: dict[str, Reference] = {}

    def run(self, cell: Cell, fault: Fault | None = None) -> CellResult:
        """Run one layout. ``fault``: a deliberate bug of the layout's ranks, for tests.

        Raises RecipeError if a family cannot work on the layout's grids.
        """
        started, result = time.monotonic(), CellResult(cell)
        try:
            self._compare(result, fault)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            result.failure = str(error)
        result.seconds = time.monotonic() - started
        return result

    def _compare(self, result: CellResult, fault: Fault | None) -> None:
        """Fill in the comparisons.

        A difference in fp32 between the tolerance and `DOUBTFUL` tolerances is rounding or a small
        bug. Then everything runs again in fp64: rounding shrinks, the effect of a bug does not.
        """
        cell = result.cell
        scaled = scale_recipe(cell.recipe, cell.layout, self.folder, self.precision)
        reference, got = self._reference(scaled), _run(scaled, fault)
        result.comparison = found = compare(got, reference, self.tolerance)
        is_small = found.error <= DOUBTFUL * self.tolerance  # which NaN is not
        if self.precision != "fp32" or found.first is None or not is_small:
            return
        exact = scale_recipe(cell.recipe, cell.layout, self.folder, "fp64")
        expected = self._reference(exact)
        result.repeated = compare(_run(exact, fault), expected, TOLERANCE["fp64"])
        if scaled.recipe.train.distributed_optimizer:
            floors = {name: one.weight_floors for name, one in reference.parameters.items()}
            off = {"distributed_optimizer": False, "overlap_param_gather": False}
            train = scaled.recipe.train.model_copy(update=off)
            without = replace(scaled, recipe=scaled.recipe.model_copy(update={"train": train}))
            plain = assembled(_run(without, fault), floors)
            result.plain = compare(got, plain, self.tolerance)

    def _reference(self, scaled: ScaledRecipe) -> Reference:
        alone = reference_recipe(scaled)
        key = alone.to_yaml()
        if key not in self._references:
            args = (alone, NUM_STEPS, scaled.workload)
            (self._references[key],) = run_on_cpu(_REFERENCE, args, 1, _TIMEOUT_SECONDS)
        return self._references[key]


def _run(scaled: ScaledRecipe, fault: Fault | None) -> Sequence[RankSteps]:
    args = (scaled.recipe, scaled.layout, NUM_STEPS, fault)
    return run_on_cpu(_LAYOUT, args, scaled.layout.world_size, _TIMEOUT_SECONDS)
