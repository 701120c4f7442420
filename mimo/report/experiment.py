"""`mimo experiment FILE`: run what is not done yet, compare the layouts, and write the results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mimo.checkpoint.hf.recipes import load_phases, load_recipe
from mimo.config.schema import Recipe
from mimo.errors import EXIT_CONTINUE
from mimo.model.recipe_checks import check_data, check_recipe, check_room
from mimo.report.experiment_file import (
    STRICT_STEPS,
    Experiment,
    bound,
    difference,
    read_experiment,
)
from mimo.report.experiment_results import TOKENS, Result, results_of, warmup_steps, write_csv
from mimo.report.experiment_runs import (
    Interrupted,
    Outcome,
    Record,
    Run,
    check_layouts,
    collect,
    run_here,
    submit,
    was_submitted,
)
from mimo.report.page import (
    Part,
    Section,
    Table,
    lines,
    number,
    percent,
    render,
    shares,
    show,
    spreads,
    write,
)
from mimo.report.run import differences
from mimo.report.runs import TIMES, Curve, read_runs
from mimo.runtime.run_lock import run_lock


def main(
    path: Path,
    overrides: Sequence[str],
    *,
    submitting: bool = False,
    cluster: Path | None = None,
) -> int:
    """Return 0 if all layouts ran and follow the reference, or were submitted; else 1.

    Return EXIT_CONTINUE if the same call must be repeated later: it was asked to stop, or jobs are
    not done. submitting: submit jobs instead of training here. cluster: a file of `cluster:` keys.
    Raises InputError for a wrong file, and for layouts that cannot run, before the first run.
    """
    experiment = read_experiment(path, overrides)
    recipe = load_recipe(experiment.recipe, experiment.shared)
    folder = Path(recipe.train.run_dir) / experiment.name
    runs = [Run(folder, *one) for one in experiment.rounds]
    with run_lock(folder):
        if submitting:
            for one in (refused := submit(runs, experiment.recipe, cluster)):
                print(f"{one.run.name}: {one.error}", file=sys.stderr)
            print("the same command without --submit collects the results")
            return int(bool(refused))
        here = [run for run in runs if not was_submitted(run)]
        check_layouts(here, experiment.recipe, partial(_check_here, experiment.recipe))
        known = partial(collect, path=experiment.recipe)
        try:
            outcomes = [*run_here(runs, recipe.train.steps, known)]
        except Interrupted as interrupted:
            print(interrupted, file=sys.stderr)
            return EXIT_CONTINUE
        return _report(experiment, recipe, outcomes, folder)


def _check_here(path: Path, run: Run) -> None:
    """Check a run as `mimo train` does, except for its folder. path: of the recipe.

    Raises RecipeError with all problems.
    """
    phased = load_phases(path, run.overrides)
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    check_room(phased, layouts, None)
    phased.each(check_data)


def _report(
    experiment: Experiment, recipe: Recipe, outcomes: Sequence[Outcome], folder: Path
) -> int:
    precision = recipe.train.precision
    results = results_of(experiment, outcomes, precision)
    show(results_table(results, experiment.reference), problems_table(results))
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "results.csv", results)
    write_page(experiment, results, folder, precision, recipe.train.steps)
    print(verdict(results, experiment.reference))
    states = {one.state for one in results}
    if states & {"failed", "differs"}:
        return 1
    return EXIT_CONTINUE if "not done yet" in states else int(states != {"follows"})


_MIB = 2**20


def results_table(results: Sequence[Result], reference: str) -> Table:
    """Return the main figures of layouts."""
    base = next((one.figures.get(TOKENS) for one in results if one.name == reference), None)
    rows = []
    for one in results:
        tokens, runs, spread = one.figures.get(TOKENS), one.values(TOKENS), ""
        if len(runs) > 1:
            spread = f"{number(min(runs))} to {number(max(runs))}"
        rows.append(
            (
                f"{one.name} (reference)" if one.name == reference else one.name,
                one.state,
                number(None if one.follows is None else one.follows.difference),
                number(tokens),
                spread,
                number(tokens / base if tokens and base else None),
                number(one.figures.get("step_seconds")),
                percent(one.figures.get("idle_fraction")),
                number(_most(one.figures, "memory_gib_")),
            )
        )
    head = ("layout", "loss curve", "largest difference", "tokens/s", "of its runs", "× reference")
    return Table((*head, "step, s", "idle", "memory of a rank, GiB"), rows)


def _most(figures: Mapping[str, float], prefix: str) -> float | None:
    return max((value for name, value in figures.items() if name.startswith(prefix)), default=None)


def _modules(results: Sequence[Result]) -> Iterator[tuple[Result, str, dict[str, float]]]:
    """Yield each module of each layout with the seconds of its parts of a step."""
    for one in results:
        parts = dict[str, dict[str, float]]()
        for name, value in one.figures.items():
            if (found := TIMES.fullmatch(name)) and not found["max"]:
                parts.setdefault(found["module"], {})[found["phase"]] = value
        for module in sorted(parts):
            yield one, module, parts[module]


def _times(results: Sequence[Result]) -> Section:
    rows, bars = [], dict[str, dict[str, float]]()
    idle, memory = dict[str, list[float]](), dict[str, list[float]]()
    for one, module, parts in _modules(results):
        place = f"{one.name}: {module}"
        bars[place] = {name.replace("_", " "): s for name, s in parts.items()}
        idle[place] = one.values(f"idle_fraction_{module}")
        memory[place] = one.values(f"memory_gib_{module}")
        computes = ("encode", "forward", "backward", "bridge_wait", "pipeline_wait", "sync")
        rows.append(
            (
                place,
                percent(one.figures.get(f"idle_fraction_{module}")),
                *(number(parts.get(phase, 0.0)) for phase in computes),
                number(one.figures.get(f"flops_{module}")),
                number(one.figures.get(f"memory_gib_{module}")),
            )
        )
    columns = ("layout: module", "idle", "encode, s", "forward, s", "backward, s")
    waits = ("wait at bridges, s", "wait in the pipeline, s", "wait for all ranks, s")
    table = Table((*columns, *waits, "FLOPs of a step", "memory, GiB"), rows)
    title = "A step by layout, module and part: mean over the module's ranks"
    if not rows:
        return Section("Where the time goes")
    pictures = [
        shares(title, "seconds", bars),
        spreads("Idle share of a module's ranks", "", idle),
        spreads("Peak of the memory of a module's ranks", "GiB", memory),
    ]
    return Section("Where the time goes", pictures, [table])


def _bridges(results: Sequence[Result]) -> Section:
    rows, bars = [], dict[str, list[float]]()
    for one in results:
        for name, sent in one.figures.items():
            if not name.startswith("bridge_bytes_"):
                continue
            edge = name.removeprefix("bridge_bytes_")
            least = one.figures[f"bridge_least_bytes_{edge}"]
            place = f"{one.name}: {edge.replace('_', ' ')}"
            bars[place] = [sent / _MIB]
            bars[f"lower bound: {edge.replace('_', ' ')}"] = [least / _MIB]
            rows.append(
                (
                    place,
                    number(sent / _MIB),
                    number(least / _MIB),
                    number(sent / least) if least else "–",
                    number(one.figures.get(f"bridge_wait_seconds_{edge}")),
                )
            )
    columns = ("layout: edge", "sent in a step, MiB", "lower bound, MiB", "× bound", "wait, s")
    note = (
        "The lower bound has each row once forward, and its gradient once back if the encoder "
        "trains. What stays on a rank is not sent, so layouts that share ranks may be below it."
    )
    pictures = [spreads("Sent over bridges in a step", "MiB", bars)] if rows else []
    return Section("Bridges", pictures, [Table(columns, rows)], note if rows else "")


def _losses(results: Sequence[Result], reference: str, precision: str) -> Section:
    curves = {one.name: _curve(one.first.records) for one in results if one.first}
    pictures = [lines("Loss per token", "", curves)] if curves else []
    if reference in curves:
        theirs = curves[reference].values
        apart = {"bound": _allowed(len(theirs), precision)}
        for name, own in curves.items():
            if name != reference and len(own.values) == len(theirs):
                pairs = zip(own.values, theirs, strict=True)
                values = np.array([difference(float(a), float(b)) for a, b in pairs])
                # Zeros have no place on a logarithmic axis.
                apart[name] = Curve(own.steps[values > 0], values[values > 0])
        pictures.append(lines("Difference of the losses from the reference", "", apart))
    return Section("Losses", pictures)


def _curve(records: Sequence[Record]) -> Curve:
    losses = [np.nan if one["loss"] is None else one["loss"] for one in records]
    return Curve(np.array([one["step"] + 1 for one in records]), np.array(losses))


def _allowed(steps: int, precision: str) -> Curve:
    allowed = [bound(step, precision) for step in range(steps)]
    values = np.array([np.nan if one is None else one for one in allowed])
    return Curve(np.arange(steps) + 1, values)


def problems_table(results: Sequence[Result]) -> Table:
    """Return failed runs with their logs, and layouts that do not follow the reference."""
    rows = []
    for one in results:
        if one.follows is not None and one.follows.problem:
            rows.append((one.name, one.follows.problem, ""))
        for outcome in one.outcomes:
            if not outcome.is_done:
                log = str(outcome.run.errors) if outcome.run.errors.exists() else ""
                rows.append((outcome.run.name, outcome.error or outcome.job, log))
    return Table(("layout or run", "problem", "log"), rows, words=True)


def verdict(results: Sequence[Result], reference: str) -> str:
    """Return a sentence about which layouts follow the reference."""
    wrong = [f"{one.name} {one.state}" for one in results if one.state != "follows"]
    right = len(results) - len(wrong)
    told = f"{right} of {len(results)} layouts follow the losses of {reference}, but for rounding"
    return f"{told}; {', '.join(wrong)}" if wrong else told


def write_page(
    experiment: Experiment, results: Sequence[Result], folder: Path, precision: str, steps: int
) -> None:
    """Write `index.html` and the pictures as PNG into the experiment's folder."""
    tokens = {one.name: one.values(TOKENS) for one in results}
    seconds = {one.name: one.values("step_seconds") for one in results}
    runs = [one.first.run.run_dir for one in results if one.first]
    lost = problems_table(results)
    speed = Section(
        "Results",
        [
            spreads("Tokens per second, from the slowest run to the fastest", "1/s", tokens),
            spreads("A step, from the fastest run to the slowest", "seconds", seconds),
        ],
        [results_table(results, experiment.reference), lost],
        note=f"{verdict(results, experiment.reference)}. The bound is {bound(0, precision):g}, of "
        f"the loss and of all gradient norms, in the first {STRICT_STEPS} steps; then it is of the "
        f"loss alone and grows, until only means over many steps have to be alike. Speeds are "
        f"medians without the first {warmup_steps(steps)} steps.",
    )
    sections = [speed, _losses(results, experiment.reference, precision), _times(results)]
    sections.append(_bridges(results))
    read = [found for run in runs for found in read_runs(run)]
    sections.append(Section("Differences of the recipes", tables=[differences(read)]))
    shown = [one for one in sections if one.has_content]
    for section in shown:
        for at, picture in enumerate(section.pictures):
            name = section.title.lower().replace(" ", "_")
            picture.write_png(folder / (f"{name}_{at}.png" if at else f"{name}.png"))
    tiles = {
        "layouts": str(len(results)),
        "runs of each": str(experiment.repeats),
        "steps": str(steps),
        "follow the reference": str(sum(one.state == "follows" for one in results)),
    }
    text = render(f"Experiment {experiment.name}", [Part("", tiles, shown)])
    write(folder / "index.html", text)
