"""Write a data set of digits: ``python -m examples.digits [digits|drawings|spoken] [FOLDER]``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from examples.digits.drawings import prepare_drawn_digits
from examples.digits.scans import prepare_digits
from examples.digits.speech import prepare_spoken_digits
from mimo.runtime.progress import progress_of


class Kind(StrEnum):
    """Images of handwritten digits to read, to read and to draw, or clips of synthetic speech."""

    DIGITS = "digits"
    DRAWINGS = "drawings"
    SPOKEN = "spoken"


_WRITERS = {
    Kind.DIGITS: (prepare_digits, Path("datasets/digits")),
    Kind.DRAWINGS: (prepare_drawn_digits, Path("datasets/drawn_digits")),
    Kind.SPOKEN: (prepare_spoken_digits, Path("datasets/spoken_digits")),
}


def main(
    kind: Annotated[Kind, typer.Argument(help="Images or clips.")] = Kind.DIGITS,
    folder: Annotated[
        Path | None,
        typer.Argument(help="Default: datasets/digits, datasets/drawn_digits, ..."),
    ] = None,
    num_train: Annotated[int | None, typer.Option(min=1, help="Samples to train on.")] = None,
    num_validation: Annotated[int | None, typer.Option(min=1, help="For validation.")] = None,
    num_test: Annotated[int | None, typer.Option(min=1, help="For `mimo evaluate`.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")] = 0,
) -> None:
    """Write the shards and the tokenizer; does nothing where they are already there."""
    write, default = _WRITERS[kind]
    counts = {"num_train": num_train, "num_validation": num_validation, "num_test": num_test}
    counts = {name: count for name, count in counts.items() if count is not None}
    with progress_of(f"writing {kind}") as progress:
        try:
            written = write(folder or default, seed=seed, progress=progress, **counts)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    print(f"data is ready: {written}")


if __name__ == "__main__":
    typer.run(main)
