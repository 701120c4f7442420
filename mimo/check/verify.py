"""`mimo verify`: compare a recipe's layout, on real ranks of this machine, with one rank."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mimo.check.compare import (
    TOLERANCE,
    Comparison,
    Fault,
    IncomparableError,
    RankSteps,
    Reference,
    compare,
    reference_of,
)
from mimo.check.layouts import Cell, Cells, recipe_cells, sweep_cells
from mimo.check.scale import NUM_STEPS, ScaledRecipe, changes, reference_recipe, scale_recipe
from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.phases import Phase
from mimo.device import machine_memory
from mimo.errors import InputError
from mimo.families.registry import language_settings
from mimo.model.recipe_checks import check_processes
from mimo.report.tables import Table, check_writable, scientific, show, write_json
from mimo.runtime.processes import RanksFailed, RanksHung
from mimo.runtime.ranks import run_on_cpu, warm_up_on_cpu

# Named, not imported: only the fork server loads the engine.
_LAYOUT, _REFERENCE = "mimo.check.steps:run_layout", "mimo.check.steps:run_reference"
_PRELOAD = ("mimo.engines.megatron.preload", "mimo.check.steps", "mimo.model.fsdp")
_PRELOAD_OF_GENERATORS = ("mimo.model.generators", "diffusers.models.transformers")
_TIMEOUT_SECONDS = 300.0
# An fp32 error up to this many tolerances may be rounding: fp64 decides. A larger one is not.
_DOUBTFUL = 10.0
_ERRORS = {"loss": "loss", "norm": "grad_norm", "gradients": "gradients", "weights": "weights"}
_FAILURE_LINES = 12  # of a rank's traceback


@dataclass
class CellResult:
    """The comparison of one layout; None if the run failed, for the reason in ``failure``.

    repeated: the same layout in fp64, if the fp32 error may be rounding; it decides.
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
        later = [comparison for comparison in (self.repeated, self.plain) if comparison is not None]
        return [] if self.failure or not self.comparison else later or [self.comparison]

    @property
    def passed(self) -> bool:
        return bool(self.deciding) and all(c.first is None for c in self.deciding)

    @property
    def verdict(self) -> str:
        word = "equal" if self.passed else "DIFFERS" if self.deciding else "FAILED"
        return f"{word} (fp64)" if self.repeated and self.deciding else word


class Verifier:
    """Compares layouts. folder: for the data. Start the fork server (`warm_up_on_cpu`) first."""

    def __init__(self, folder: Path, precision: str) -> None:
        self.folder = folder
        self.precision = precision
        self.tolerance = TOLERANCE[precision]
        self._references: dict[str, Reference] = {}

    def run(self, cell: Cell, fault: Fault | None = None) -> CellResult:
        """Run one layout. fault: for tests. Raises RecipeError for grids that a family refuses."""
        started, result = time.monotonic(), CellResult(cell)
        try:
            self._compare(result, fault)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            result.failure = str(error)
        result.seconds = time.monotonic() - started
        return result

    def _compare(self, result: CellResult, fault: Fault | None) -> None:
        """Fill in the comparisons; repeat a small fp32 error in fp64: only rounding shrinks."""
        cell = result.cell
        scaled = scale_recipe(cell.recipe, cell.layout, self.folder, self.precision)
        reference, got = self._reference(scaled), _run_layout(scaled, fault)
        result.comparison = compare(got, reference, self.tolerance)
        # Rounding may let a token choose another expert, with errors of any size.
        has_experts = language_settings(cell.recipe).routers[0] > 0
        most = sys.float_info.max if has_experts else _DOUBTFUL * self.tolerance
        is_small = result.comparison.error <= most  # which NaN is not
        if self.precision != "fp32" or result.comparison.first is None or not is_small:
            return
        exact = scale_recipe(cell.recipe, cell.layout, self.folder, "fp64")
        expected = self._reference(exact)
        result.repeated = compare(_run_layout(exact, fault), expected, TOLERANCE["fp64"])
        if scaled.recipe.train.distributed_optimizer:
            floors = {name: p.weight_floors for name, p in reference.parameters.items()}
            off = {"distributed_optimizer": False, "overlap_param_gather": False}
            train = scaled.recipe.train.model_copy(update=off)
            without = replace(scaled, recipe=scaled.recipe.model_copy(update={"train": train}))
            plain = reference_of(_run_layout(without, fault), floors)
            result.plain = compare(got, plain, self.tolerance)

    def _reference(self, scaled: ScaledRecipe) -> Reference:
        on_one_rank = reference_recipe(scaled)
        key = on_one_rank.to_yaml()
        if key not in self._references:
            args = (on_one_rank, NUM_STEPS, scaled.workload)
            (self._references[key],) = run_on_cpu(_REFERENCE, args, 1, _TIMEOUT_SECONDS)
        return self._references[key]


def _run_layout(scaled: ScaledRecipe, fault: Fault | None) -> Sequence[RankSteps]:
    args = (scaled.recipe, scaled.layout, NUM_STEPS, fault)
    return run_on_cpu(_LAYOUT, args, scaled.layout.world_size, _TIMEOUT_SECONDS)


def main(
    path: Path,
    overrides: Sequence[str],
    max_ranks: int,
    full: bool,
    sweep: bool,
    precision: str,
    json: Path | None,
) -> int:
    """Print a table of errors; return 0 if every layout of every phase equals one rank, else 1.

    sweep: run the built-in matrix instead of the recipe's layout. full: do not shrink that layout.
    Raises InputError for bad input, before any rank starts.
    """
    phased = load_phases(path, overrides)
    check_writable(json)
    if sweep and full:
        raise InputError("--layouts sweep has its own layouts; remove --full")
    if sweep:
        # The matrix sets layouts and freezing itself, so one phase stands for all.
        phases = phased.phases[-1:]
        chosen = [sweep_cells(phases[0].recipe, max_ranks, precision)]
    else:
        phases = phased.phases
        chosen = phased.each(lambda recipe: recipe_cells(recipe, max_ranks, full))
    cells, notes = _join_phases(phases, chosen, precision)
    for cell in cells:
        check_processes(cell.recipe, cell.layout.world_size, machine_memory())
    results: list[CellResult] = []
    with tempfile.TemporaryDirectory(prefix="mimo-verify-") as folder:
        for cell in cells:  # report what a family refuses before anything runs
            scale_recipe(cell.recipe, cell.layout, Path(folder), precision)
        draws = any(cell.recipe.generators for cell in cells)
        warm_up_on_cpu((*_PRELOAD, *(_PRELOAD_OF_GENERATORS if draws else ())))
        print("\n".join(notes))
        verifier = Verifier(Path(folder), precision)
        for number, cell in enumerate(cells, 1):
            result = verifier.run(cell)
            results.append(result)
            line = f"[{number}/{len(cells)}] {result.verdict:7} {cell.name}"
            print(f"{line} ({result.seconds:.1f} s)", flush=True)
    print_results(results, verifier.tolerance)
    if json is not None:
        write_results(json, results, recipe=str(path), precision=precision, notes=notes)
    differing = sum(not result.passed for result in results)
    print(f"{len(results) - differing} of {len(results)} layouts take the steps of one rank")
    return 1 if differing else 0


def _join_phases(phases: Sequence[Phase], chosen: Sequence[Cells], precision: str) -> Cells:
    """Return the layouts and notes of all phases; with several phases, both name theirs."""
    cells, notes = joined = Cells([], [])
    for phase, of_phase in zip(phases, chosen, strict=True):
        prefix = f"{phase.name}: " if phase.name else ""
        cells += [cell._replace(name=f"{prefix}{cell.name}") for cell in of_phase.cells]
        notes += [*([phase.title] if phase.title else ()), *of_phase.notes]
        notes += [f"changed: {change}" for change in changes(phase.recipe, precision)]
    return joined


def print_results(results: Sequence[CellResult], tolerance: float) -> None:
    """Print the errors of every layout, what fp64 decided, and the first differences."""
    rows = []
    for result in results:
        errors = ["-"] * len(_ERRORS)
        if result.comparison:
            errors = [scientific(result.comparison.worst(what)) for what in _ERRORS.values()]
        size = str(result.cell.layout.world_size)
        rows.append((result.cell.name, size, *errors, result.verdict))
    title = f"errors against one rank (tolerance {tolerance:g})"
    show(Table(("layout", "ranks", *_ERRORS, "result"), rows, title=title))
    for result in results:
        lines = _repetition(result, tolerance)
        for comparison in result.deciding:
            lines += comparison.lines()
        if result.failure:
            lines += result.failure.strip().splitlines()[-_FAILURE_LINES:]
        if lines:
            print("\n  ".join([result.cell.name, *lines]))


def _repetition(result: CellResult, tolerance: float) -> list[str]:
    """Return how a layout was judged if its fp32 error may be rounding."""
    if result.repeated is None:
        return []
    judged = {
        "fp32": (result.comparison, tolerance),
        "fp64": (result.repeated, TOLERANCE["fp64"]),
        "fp32, distributed against plain optimizer on this layout": (result.plain, tolerance),
    }
    return [
        f"{how}: error {scientific(comparison.error)} (tolerance {limit:g})"
        for how, (comparison, limit) in judged.items()
        if comparison is not None
    ]


def write_results(path: Path, results: Sequence[CellResult], **facts: object) -> None:
    """Write every error of every tensor of every layout as JSON, and facts about the command."""
    layouts = [
        {
            "name": result.cell.name,
            "ranks": result.cell.layout.world_size,
            "grids": result.cell.layout.grids,
            "colocated": sorted(result.cell.layout.colocated),
            "passed": result.passed,
            "failure": result.failure,
            "comparison": result.comparison,
            "repeated_in_fp64": result.repeated,
            "against_plain_optimizer": result.plain,
        }
        for result in results
    ]
    passed = all(result.passed for result in results)
    write_json(path, {**facts, "passed": passed, "layouts": layouts})
