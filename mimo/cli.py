"""The command line.

Exit code 2 and a message for bad input, before any process group exists; 1 for a run that failed.
"""

import typer

from mimo.commands.bench import bench_bridge, bench_data, bench_train
from mimo.commands.check import check
from mimo.commands.convert import convert_from_hf, convert_to_hf
from mimo.commands.data import data_doctor, data_pack, index
from mimo.commands.evaluate import evaluate
from mimo.commands.generate import generate
from mimo.commands.parity import parity
from mimo.commands.prepare import prepare
from mimo.commands.quickstart import quickstart
from mimo.commands.tiny import tiny
from mimo.commands.train import train
from mimo.commands.verify import verify
from mimo.launch.environment import set_variables

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train multimodal models in which every module has its own parallelism.",
)
app.callback()(lambda: set_variables())  # before any command loads torch
for command in (check, prepare, train, verify, generate, evaluate, parity, tiny, quickstart):
    app.command()(command)

data = typer.Typer(no_args_is_help=True, help="The samples of a recipe.")
data.command("index")(index)
data.command("doctor")(data_doctor)
data.command("pack")(data_pack)
app.add_typer(data, name="data")

bench = typer.Typer(no_args_is_help=True, help="Measure what the parts promise.")
bench.command("bridge")(bench_bridge)
bench.command("train")(bench_train)
bench.command("data")(bench_data)
app.add_typer(bench, name="bench")


convert = typer.Typer(no_args_is_help=True, help="Checkpoints in Hugging Face format.")
convert.command("from-hf")(convert_from_hf)
convert.command("to-hf")(convert_to_hf)
app.add_typer(convert, name="convert")


def main() -> None:
    """Entry point for `python -m mimo.cli`."""
    app()


if __name__ == "__main__":
    main()
