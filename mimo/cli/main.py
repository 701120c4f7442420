"""The command line.

Exit code 2 and a message for bad input, before any process group exists; 1 for a run that failed.
"""

import typer

from mimo.cli._shared import readable_errors
from mimo.cli.check import check
from mimo.cli.checkpoint import checkpoint_inspect, checkpoint_prune, checkpoint_verify
from mimo.cli.convert import convert_from_hf, convert_to_hf, tiny
from mimo.cli.data import data_doctor, data_index, data_pack
from mimo.cli.experiment import experiment
from mimo.cli.fit import fit
from mimo.cli.generate import evaluate, generate, replay
from mimo.cli.launch import launch, rendezvous
from mimo.cli.preflight import preflight
from mimo.cli.report import compare, report
from mimo.cli.train import prepare, quickstart, train
from mimo.cli.verify import parity, verify
from mimo.cli.watch import logs, status, top
from mimo.runtime.environment import set_variables

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train multimodal models in which every module has its own parallelism.",
)
app.callback()(lambda: set_variables())  # before any command loads torch
for panel, commands in {
    "Prepare": (check, prepare, tiny),
    "Train": (quickstart, train),
    "Inspect": (status, top, logs, report, compare, generate, evaluate),
    "Prove": (verify, parity, replay, experiment),
    "Cluster": (preflight, launch),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(readable_errors(command))
for command in (fit, rendezvous):  # what job scripts call
    app.command(hidden=True)(readable_errors(command))

for panel, group, purpose, commands in (
    ("Prepare", "data", "The samples of a recipe.", (data_index, data_doctor, data_pack)),
    (
        "Inspect",
        "checkpoint",
        "Look at checkpoints, check them, remove old ones.",
        (checkpoint_inspect, checkpoint_verify, checkpoint_prune),
    ),
    ("Prepare", "convert", "Checkpoints in Hugging Face format.", (convert_from_hf, convert_to_hf)),
):
    below = typer.Typer(no_args_is_help=True, help=purpose)
    for command in commands:
        name = command.__name__.removeprefix(f"{group}_").replace("_", "-")
        below.command(name)(readable_errors(command))
    app.add_typer(below, name=group, rich_help_panel=panel)

if __name__ == "__main__":
    app()
