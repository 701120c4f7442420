"""The `mimo` command.

Exit codes: 0 success, 1 the run failed, 2 bad input (with a message, before any process group
exists), 75 the run has saved and wants to be resumed.
"""

import typer

from mimo.cli.cluster import launch, preflight
from mimo.cli.data import (
    checkpoint_inspect,
    checkpoint_prune,
    checkpoint_verify,
    convert_from_hf,
    convert_to_hf,
    data_doctor,
    data_index,
    data_pack,
    tiny,
)
from mimo.cli.inspect import compare, evaluate, generate, logs, report, status
from mimo.cli.options import readable_errors
from mimo.cli.plan import plan
from mimo.cli.train import check, train
from mimo.cli.verify import experiment, parity, replay, verify
from mimo.runtime.ranks import set_variables

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train multimodal models in which every module has its own parallelism.",
)
app.callback()(lambda: set_variables())  # before any command loads torch
for panel, commands in {
    "Prepare": (check, plan, tiny),
    "Train": (train,),
    "Inspect": (status, logs, report, compare, generate, evaluate),
    "Prove": (verify, parity, replay, experiment),
    "Cluster": (preflight, launch),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(readable_errors(command))

for panel, name, purpose, commands in (
    ("Prepare", "data", "Index, inspect and pack samples.", (data_index, data_doctor, data_pack)),
    (
        "Inspect",
        "checkpoint",
        "Inspect, verify and prune checkpoints.",
        (checkpoint_inspect, checkpoint_verify, checkpoint_prune),
    ),
    ("Prepare", "convert", "Convert Hugging Face format.", (convert_from_hf, convert_to_hf)),
):
    group = typer.Typer(no_args_is_help=True, help=purpose)
    for command in commands:
        subcommand = command.__name__.removeprefix(f"{name}_").replace("_", "-")
        group.command(subcommand)(readable_errors(command))
    app.add_typer(group, name=name, rich_help_panel=panel)

if __name__ == "__main__":
    app()
