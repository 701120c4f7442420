"""Runs layouts on real ranks of this machine and compares each with one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo.launch import run_on_cpu
from mimo.rank_processes import RanksFailed, RanksHung
from mimo.verify.cells import Cell
from mimo.verify.compare import Comparison, IncomparableError, compare
from mimo.verify.results import Fault, Reference
from mimo.verify.scale import NUM_STEPS, TOLERANCE, reference_recipe, scale_recipe

# Named, not imported: the engine is loaded in the fork server only.
_LAYOUT, _REFERENCE = "mimo.verify.run:run_layout", "mimo.verify.reference:run_reference"
PRELOAD = ("mimo.megatron.preload", "mimo.verify.run", "mimo.verify.reference", "transformers")
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class CellResult:
    """comparison: None when the run failed; then ``failure`` says how."""

    cell: Cell
    seconds: float
    comparison: Comparison | None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the layout takes the steps of one rank."""
        return self.comparison is not None and self.comparison.first is None


class Verifier:
    """Compares layouts; the run on one rank is kept for all that share model and batches.

    folder: for the data, written once. Start the fork server (`warm_up_on_cpu`) before.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        self.folder = folder
        self.precision = precision
        self.tolerance = TOLERANCE[precision]
        self._references: dict[str, Reference] = {}

    def run(self, cell: Cell, fault: Fault | None = None) -> CellResult:
        """Run one layout. ``fault``: a deliberate bug of the layout's ranks, for tests.

        Raises RecipeError when a family cannot work on the layout's grids.
        """
        started = time.monotonic()
        scaled = scale_recipe(cell.recipe, cell.layout, self.folder, self.precision)
        comparison = failure = None
        try:
            alone = reference_recipe(scaled)
            key = alone.to_yaml()
            if key not in self._references:
                args = (alone, NUM_STEPS, scaled.workload)
                (self._references[key],) = run_on_cpu(_REFERENCE, args, 1, _TIMEOUT_SECONDS)
            results = run_on_cpu(
                _LAYOUT,
                (scaled.recipe, NUM_STEPS, fault),
                cell.layout.world_size,
                _TIMEOUT_SECONDS,
            )
            comparison = compare(results, self._references[key], self.tolerance)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            failure = str(error)
        return CellResult(cell, time.monotonic() - started, comparison, failure)


def failed(results: Sequence[CellResult]) -> list[CellResult]:
    """Those that differ from one rank, or did not run to the end."""
    return [result for result in results if not result.passed]
