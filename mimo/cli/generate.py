"""`mimo generate`, `mimo evaluate` and `mimo replay`: what a trained model answers and computes."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.cli._shared import EmaOption, JsonOption, RunArgument, number


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option(help="The question.")],
    image: Annotated[
        list[Path] | None, typer.Option(help="An image; may be given several times.")
    ] = None,
    frame: Annotated[
        list[Path] | None, typer.Option(help="A frame of a video, in order; all of one size.")
    ] = None,
    fps: Annotated[
        float,
        typer.Option(min=0.001, max=1e6, callback=number, help="Frames of the video per second."),
    ] = 2.0,
    item: Annotated[
        list[str] | None,
        typer.Option(metavar="MEDIA=FILE", help="A file of any media; may be given several times."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=2**20, help="Most tokens of the answer.")
    ] = 64,
    ema: EmaOption = False,
) -> int | None:
    """Answer a question about images, a video or other items with a trained checkpoint.

    It runs in one process. Items stand before the question: images, the video, others.
    Made for checks: each new token costs a forward over the whole sequence, as nothing is cached.
    To serve a model, export it with `mimo convert to-hf`.
    """
    from mimo.generate.answer import GivenItem
    from mimo.generate.answer import main as answer

    items = [GivenItem("--image", "image", [path]) for path in image or []]
    if frame:
        items.append(GivenItem("--frame", "video", frame, {"frames": len(frame), "fps": fps}))
    items += [GivenItem.parse("--item", text) for text in item or []]
    return answer(run, items, prompt, max_new_tokens, ema)


def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**20,
            help="Most tokens of an answer; default: those of the longest expected one.",
        ),
    ] = None,
    ema: EmaOption = False,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="exact, per_word, contains, anls or relaxed_number, in place of data.metrics; "
            "may be given several times."
        ),
    ] = None,
) -> int | None:
    """Answer the held-out samples of a run's recipe and compare with the expected answers.

    All answers go to held_out_<split>.jsonl in the run's folder.
    Like `mimo generate`, it computes the whole sequence anew for each new token.
    """
    from mimo.generate.evaluate import main as compare

    return compare(run, split, max_new_tokens, ema, metric or ())


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder, or that of one phase.")],
    step: Annotated[int, typer.Option(min=0, help="The step, as metrics.jsonl numbers it.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="With whose weights; default: the nearest before the step."),
    ] = None,
    json: JsonOption = None,
) -> int | None:
    """Run one step of a run again, alone on one rank, with statistics of every layer.

    The batch is the one that the step had. Activations and gradients that are not finite stand out.
    """
    from mimo.check.replay import main as run_again

    return run_again(run, step, checkpoint, json)
