"""`mimo bench`: measure what the parts promise."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.cli._shared import JsonOption

_PictureOption = Annotated[Path, typer.Option(help="Where the PNG goes.")]


def bench_bridge(
    rows: Annotated[int, typer.Option(min=1, max=2**24, help="Rows of the larger size.")] = 8192,
    hidden: Annotated[int, typer.Option(min=1, max=2**20, help="Values of a row.")] = 1024,
    repeats: Annotated[
        int, typer.Option(min=1, max=10_000, help="Rounds in which all take turns.")
    ] = 15,
    rival: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Megatron's bridge_communicator.py, if not the installed one."
        ),
    ] = None,
    json: JsonOption = None,
    picture: _PictureOption = Path("runs/bench_bridge.png"),
) -> int | None:
    """Compare the bridge with Megatron's; exit code 1 and a line for each bound that is missed."""
    from mimo.bench.bridge import main as run

    return run(rows, hidden, repeats, json, picture, rival=rival)


def bench_train(
    samples: Annotated[int, typer.Option(min=8, max=4096, help="Samples of a step.")] = 32,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Timed steps of each contestant.")
    ] = 4,
    threads: Annotated[
        int | None, typer.Option(min=1, max=2**12, help="Of each side; default: all cores.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round of a tiny model; its speed is not judged.")
    ] = False,
    json: JsonOption = None,
    picture: _PictureOption = Path("runs/bench_train.png"),
) -> int | None:
    """Compare whole training steps with transformers on the same samples and cores."""
    from mimo.bench.train import main as run

    return run(samples, rounds, threads, quick, json, picture)


def bench_data(
    samples: Annotated[
        int, typer.Option(min=1, max=2**20, help="Samples of a pass, at least.")
    ] = 32,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Timed passes of each loader.")] = 3,
    workers: Annotated[
        int | None, typer.Option(min=1, max=2**12, help="Of each loader; default: all cores.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round of tiny images; the speed is not judged.")
    ] = False,
    json: JsonOption = None,
    picture: _PictureOption = Path("runs/bench_data.png"),
) -> int | None:
    """Compare the input path with webdataset and Megatron-Energon on the same photos."""
    from mimo.bench.data import main as run

    return run(samples, rounds, workers, quick, json, picture)


def bench_engines(
    samples: Annotated[int, typer.Option(min=16, max=4096, help="Samples of a step.")] = 32,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Timed steps of each contestant.")
    ] = 4,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round of a tiny model, whose speed says nothing.")
    ] = False,
    json: JsonOption = None,
    picture: _PictureOption = Path("runs/bench_engines.png"),
) -> int | None:
    """Compare both engines and transformers under FSDP2 on two ranks: speed and memory."""
    from mimo.bench.engines import main as run

    return run(samples, rounds, quick, json, picture)


def bench_checkpoint(
    millions: Annotated[
        int, typer.Option(min=1, max=100_000, help="Parameters of the model, in millions.")
    ] = 100,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Timed saves of each contestant.")
    ] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round of a tiny model, whose speed says nothing.")
    ] = False,
    json: JsonOption = None,
    picture: _PictureOption = Path("runs/bench_checkpoint.png"),
) -> int | None:
    """Compare saving with torch.save and PyTorch's distributed checkpoints: waits and memory."""
    from mimo.bench.checkpoint import main as run

    return run(millions, rounds, quick, json, picture)
