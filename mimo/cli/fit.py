"""`mimo fit`: the layout of a job that got fewer nodes than it asked for; its script calls it."""

from pathlib import Path
from typing import Annotated

import typer

from mimo.cli._shared import OverridesArgument, RecipeArgument
from mimo.config.bounds import MAX_RANKS


def fit(
    recipe: RecipeArgument,
    nodes: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Nodes that there are.")],
    out: Annotated[Path, typer.Option(help="Where the shell variables go.")],
    overrides: OverridesArgument = None,
) -> None:
    """Write shell variables: overrides with which a recipe fits the nodes, and each rank's node."""
    import shlex

    from mimo.slurm.elastic import fit as fitted

    found, placement = fitted(recipe, overrides or [], nodes)
    out.write_text(
        f"MIMO_OVERRIDES=({shlex.join(found)})\n"
        f"MIMO_NODE_OF_RANK=({' '.join(map(str, placement.node_of()))})\n"
    )
