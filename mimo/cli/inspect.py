"""`mimo status`, `logs`, `report`, `compare`, `generate` and `evaluate`: look at runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from mimo.cli.options import EmaOption, GuidanceOption, RunArgument, RunFolder, StepsOption


def status(run: RunFolder) -> int | None:
    """Show a run's job, step, speed, idle shares, checkpoint and last incident."""
    from mimo.report.status import status

    return status(run)


def logs(
    run: RunFolder,
    rank: Annotated[
        int | None, Option(min=0, help="All of this rank; default: the end of each output.")
    ] = None,
    follow: Annotated[bool, Option("--follow", help="Follow until the run ends.")] = False,
    first_error: Annotated[
        bool, Option("--first-error", help="Only the error that caused the others.")
    ] = False,
) -> int | None:
    """Print the logs of ranks, or the first failure among them."""
    from mimo.report import logs

    if first_error and (follow or rank is not None):
        raise typer.BadParameter("--first-error reads all ranks once; remove --rank and --follow")
    return logs.first_error(run) if first_error else logs.logs(run, rank, follow)


def report(
    run: RunFolder,
    page: Annotated[
        Path | None, Option(help="The page to write; default: report.html in the folder.")
    ] = None,
) -> int | None:
    """Write an HTML page about a run, whether finished, failed or running."""
    from mimo.report.run import report

    return report(run, page)


def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN RUN ...", help="Run folders.")],
    page: Annotated[Path, Option(help="The page to write.")] = Path("runs/compare.html"),
) -> int | None:
    """Compare runs: a table, the differences of recipes and data, and a page of curves."""
    from mimo.report.run import compare

    return compare(runs, page)


def generate(
    run: RunArgument,
    prompt: Annotated[str, Option(help="The question.")],
    image: Annotated[list[Path] | None, Option(help="An image; repeatable.")] = None,
    frame: Annotated[
        list[Path] | None, Option(help="A frame of a video, in order; all of one size.")
    ] = None,
    fps: Annotated[float, Option(min=0.001, help="Frames of the video per second.")] = 2.0,
    item: Annotated[
        list[str] | None,
        Option(metavar="MODALITY=FILE", help="A file of any modality; repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer in tokens.")] = 64,
    steps: StepsOption = 20,
    guidance: GuidanceOption = 1.0,
    seed: Annotated[int, Option(min=0, help="Seed of the noise of images.")] = 0,
    size: Annotated[
        str | None, Option(metavar="WxH", help="Size of drawn images in pixels.")
    ] = None,
    output: Annotated[Path, Option(help="Folder of drawn images.")] = Path("."),
    ema: EmaOption = False,
) -> int | None:
    """Answer a question about images, a video or other items with a trained checkpoint.

    A model with a generator also answers with images, which are saved as PNG files.

    Runs in one process, for checks: no KV cache. To serve a model, export it with
    `mimo convert to-hf`. Images, the video and other items stand before the question.
    """
    from mimo.generate.answer import ItemFiles
    from mimo.generate.answer import main as answer
    from mimo.generate.drawing import Drawing, parse_size

    items = [ItemFiles("--image", "image", [path]) for path in image or []]
    if frame:
        items.append(ItemFiles("--frame", "video", frame, {"frames": len(frame), "fps": fps}))
    items += [ItemFiles.parse("--item", text) for text in item or []]
    how = Drawing(steps, guidance, seed, parse_size(size) if size else None)
    return answer(run, items, prompt, max_new_tokens, ema, how, output)


def evaluate(
    run: RunArgument,
    split: Annotated[
        Literal["validation", "test"], Option(help="Which held-out samples.")
    ] = "test",
    max_new_tokens: Annotated[
        int | None,
        Option(min=1, help="Longest answer in tokens; default: the longest expected one."),
    ] = None,
    ema: EmaOption = False,
    metric: Annotated[
        list[str] | None,
        Option(
            help="exact, per_word, contains, anls or relaxed_number, in place of data.metrics; "
            "repeatable."
        ),
    ] = None,
    steps: StepsOption = 20,
    guidance: GuidanceOption = 1.0,
) -> int | None:
    """Answer the held-out samples of a run's recipe and score the answers.

    Writes all answers to held_out_<split>.jsonl in the run's folder. No KV cache.
    """
    from mimo.generate.drawing import Drawing
    from mimo.generate.evaluate import main

    return main(run, split, max_new_tokens, ema, metric or (), Drawing(steps, guidance))
