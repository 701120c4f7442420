"""`mimo experiment FILE`: run what is not done yet, compare the layouts, and write the results."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mimo.checkpoint.hf.recipes import load_phases, load_recipe
from mimo.config.schema import Recipe
from mimo.errors import EXIT_CONTINUE
from mimo.model.recipe_checks import check_data, check_recipe, check_room
from mimo.report.experiment_file import Experiment, read_experiment
from mimo.report.experiment_forecast import (
    Comparison,
    compare_forecasts,
    forecasts_table,
    forecasts_verdict,
)
from mimo.report.experiment_results import (
    STRICT_STEPS,
    TOKENS,
    Result,
    bound,
    difference,
    results_of,
    warmup_steps,
    write_csv,
)
from mimo.report.experiment_runs import Interrupted, Outcome, Run, check_layouts, run_here, submit
from mimo.report.page import Part, Section, lines, render, shares, spreads
from mimo.report.runs import Curve, times_by_module
from mimo.report.tables import Table, number, percent, show, write
from mimo.runtime.run_lock import run_lock

_MIB = 2**20
_PHASES = ("encode", "forward", "backward", "bridge_wait", "pipeline_wait", "sync")


def main(
    path: Path,
    overrides: Sequence[str],
    *,
    submitting: bool = False,
    cluster: Path | None = None,
    simulates: bool = False,
) -> int:
    """Return 0 if all layouts ran and follow the reference, or were submitted; else 1.

    Return EXIT_CONTINUE if the call must be repeated: it was asked to stop, or jobs are not done.
    submitting: submit jobs instead. cluster: a file of `cluster:` keys. simulates: show forecasts
    beside the measurements. Raises InputError.
    """
    experiment = read_experiment(path, overrides)
    recipe = load_recipe(experiment.recipe, experiment.shared)
    folder = Path(recipe.train.run_dir) / experiment.name
    runs = [
        Run(folder, layout, repeat, experiment.recipe, layout_overrides)
        for repeat in range(1, experiment.repeats + 1)  # in alternation: A B C A B C
        for layout, layout_overrides in experiment.layouts.items()
    ]
    with run_lock(folder):
        if submitting:
            refused = submit(runs, cluster)
            for outcome in refused:
                print(f"{outcome.run.name}: {outcome.error}", file=sys.stderr)
            print("the same command without --submit collects the results")
            return int(bool(refused))
        check_layouts([run for run in runs if not run.was_submitted], _check_run)
        try:
            outcomes = [*run_here(runs, recipe.train.steps)]
        except Interrupted as interrupted:
            print(interrupted, file=sys.stderr)
            return EXIT_CONTINUE
        return _report(experiment, recipe, outcomes, folder, simulates)


def _check_run(run: Run) -> None:
    """Check a run as `mimo train` does. Raises RecipeError."""
    phased = load_phases(run.path, run.overrides)
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    check_room(phased, layouts, None)
    phased.each(check_data)


def _report(
    experiment: Experiment, recipe: Recipe, outcomes: list[Outcome], folder: Path, simulates: bool
) -> int:
    precision = recipe.train.precision
    results = results_of(experiment, outcomes, precision)
    compared = compare_forecasts(results) if simulates else []
    show(results_table(results, experiment.reference), problems_table(results))
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "results.csv", results)
    write_page(experiment, results, folder, precision, recipe.train.steps, compared)
    print(verdict(results, experiment.reference))
    if compared:
        show(forecasts_table(compared))
        print(forecasts_verdict(compared))
    states = {result.state for result in results}
    if states & {"failed", "differs"}:
        return 1
    return EXIT_CONTINUE if "not done yet" in states else int(states != {"follows"})


def results_table(results: Sequence[Result], reference: str) -> Table:
    """Return the main figures of layouts."""
    base = next(r.figures.get(TOKENS) for r in results if r.name == reference)
    rows = []
    for result in results:
        figures, speeds = result.figures, result.values(TOKENS)
        tokens = figures.get(TOKENS)
        memory = (value for name, value in figures.items() if name.startswith("memory_gib_"))
        rows.append(
            (
                f"{result.name} (reference)" if result.name == reference else result.name,
                result.state,
                number(result.follows.difference if result.follows else None),
                number(tokens),
                f"{number(min(speeds))} to {number(max(speeds))}" if len(speeds) > 1 else "",
                number(tokens / base if tokens and base else None),
                number(figures.get("step_seconds")),
                percent(figures.get("idle_fraction")),
                number(max(memory, default=None)),
            )
        )
    head = ("layout", "loss curve", "largest difference", "tokens/s", "of its runs", "× reference")
    return Table((*head, "step, s", "idle", "memory of a rank, GiB"), rows)


def problems_table(results: Sequence[Result]) -> Table:
    """Return failed runs with their logs, and layouts that do not follow the reference."""
    rows = []
    for result in results:
        if result.follows is not None and result.follows.problem:
            rows.append((result.name, result.follows.problem, ""))
        for outcome in result.outcomes:
            if not outcome.is_done:
                log = str(outcome.run.errors) if outcome.run.errors.exists() else ""
                rows.append((outcome.run.name, outcome.error or outcome.job, log))
    return Table(("layout or run", "problem", "log"), rows, words=True)


def verdict(results: Sequence[Result], reference: str) -> str:
    """Return a sentence about which layouts follow the reference."""
    wrong = [f"{result.name} {result.state}" for result in results if result.state != "follows"]
    share = f"{len(results) - len(wrong)} of {len(results)} layouts"
    sentence = f"{share} follow the losses of {reference}, but for rounding"
    return f"{sentence}; {', '.join(wrong)}" if wrong else sentence


def write_page(
    experiment: Experiment,
    results: Sequence[Result],
    folder: Path,
    precision: str,
    steps: int,
    compared: Sequence[Comparison] = (),
) -> None:
    """Write `index.html` and the pictures as PNG into the experiment's folder."""
    speeds = [
        spreads(title, unit, {result.name: result.values(metric) for result in results})
        for title, unit, metric in (
            ("Tokens per second, from the slowest run to the fastest", "1/s", TOKENS),
            ("A step, from the fastest run to the slowest", "seconds", "step_seconds"),
        )
    ]
    note = (
        f"{verdict(results, experiment.reference)}. The bound is {bound(0, precision):g}, of the "
        f"loss and of all gradient norms, in the first {STRICT_STEPS} steps; then it is of the "
        f"loss alone and grows, until only means over many steps have to be alike. Speeds are "
        f"medians without the first {warmup_steps(steps)} steps."
    )
    tables = [results_table(results, experiment.reference), problems_table(results)]
    sections = [
        Section("Results", speeds, tables, note),
        _losses(results, experiment.reference, precision),
        _times(results),
        _bridges(results),
    ]
    if compared:
        tables = [forecasts_table(compared)]
        sections.append(Section("Forecasts", (), tables, forecasts_verdict(compared)))
    sections = [section for section in sections if section.has_content]
    for section in sections:
        name = section.title.lower().replace(" ", "_")
        for place, picture in enumerate(section.pictures):
            picture.write_png(folder / (f"{name}_{place}.png" if place else f"{name}.png"))
    tiles = {
        "layouts": str(len(results)),
        "runs of each": str(experiment.repeats),
        "steps": str(steps),
        "follow the reference": str(sum(result.state == "follows" for result in results)),
    }
    text = render(f"Experiment {experiment.name}", [Part("", tiles, sections)])
    write(folder / "index.html", text)


def _losses(results: Sequence[Result], reference: str, precision: str) -> Section:
    done = {result.name: [run for run in result.outcomes if run.is_done] for result in results}
    curves = {name: runs[0].curves["loss"] for name, runs in done.items() if runs}
    pictures = [lines("Loss per token", "", curves)] if curves else []
    if reference in curves:
        expected = curves[reference].values
        bounds = [bound(step, precision) or np.nan for step in range(len(expected))]
        differences = {"bound": Curve(np.arange(len(bounds)) + 1, np.array(bounds))}
        for name, curve in curves.items():
            if name != reference and len(curve.values) == len(expected):
                pairs = zip(curve.values.tolist(), expected.tolist(), strict=True)
                values = np.array([difference(ours, theirs) for ours, theirs in pairs])
                # Zeros have no place on a logarithmic axis.
                differences[name] = Curve(curve.steps[values > 0], values[values > 0])
        title = "Difference of the losses from the reference"
        pictures.append(lines(title, "", differences))
    return Section("Losses", pictures)


def _times(results: Sequence[Result]) -> Section:
    rows, seconds = [], dict[str, dict[str, float]]()
    idle, memory = dict[str, list[float]](), dict[str, list[float]]()
    for result in results:
        for module, names in sorted(times_by_module(result.figures).items()):
            place = f"{result.name}: {module}"
            parts = {phase: result.figures[name] for phase, name in names.items()}
            seconds[place] = {phase.replace("_", " "): value for phase, value in parts.items()}
            idle[place] = result.values(f"idle_fraction_{module}")
            memory[place] = result.values(f"memory_gib_{module}")
            rows.append(
                (
                    place,
                    percent(result.figures.get(f"idle_fraction_{module}")),
                    *(number(parts.get(phase, 0.0)) for phase in _PHASES),
                    number(result.figures.get(f"flops_{module}")),
                    number(result.figures.get(f"memory_gib_{module}")),
                )
            )
    phases = (f"{phase.replace('_', ' ')}, s" for phase in _PHASES)
    columns = ("layout: module", "idle", *phases, "FLOPs of a step", "memory, GiB")
    title = "A step by layout, module and part: mean over the module's ranks"
    pictures = [
        shares(title, "seconds", seconds),
        spreads("Idle share of a module's ranks", "", idle),
        spreads("Peak of the memory of a module's ranks", "GiB", memory),
    ]
    return Section("Where the time goes", pictures if rows else [], [Table(columns, rows)])


def _bridges(results: Sequence[Result]) -> Section:
    rows, bars = [], dict[str, list[float]]()
    for result in results:
        for name, sent in result.figures.items():
            if not name.startswith("bridge_bytes_"):
                continue
            edge = name.removeprefix("bridge_bytes_")
            least = result.figures[f"bridge_least_bytes_{edge}"]
            place = f"{result.name}: {edge.replace('_', ' ')}"
            bars[place] = [sent / _MIB]
            bars[f"lower bound: {edge.replace('_', ' ')}"] = [least / _MIB]
            wait = number(result.figures.get(f"bridge_wait_seconds_{edge}"))
            ratio = number(sent / least) if least else "–"
            rows.append((place, number(sent / _MIB), number(least / _MIB), ratio, wait))
    if not rows:
        return Section("Bridges")
    columns = ("layout: edge", "sent in a step, MiB", "lower bound, MiB", "× bound", "wait, s")
    note = (
        "The lower bound has each row once forward, and its gradient once back if the encoder "
        "trains. What stays on a rank is not sent, so layouts that share ranks may be below it."
    )
    pictures = [spreads("Sent over bridges in a step", "MiB", bars)]
    return Section("Bridges", pictures, [Table(columns, rows)], note)
