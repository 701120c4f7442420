"""`mimo preflight`: whether nodes are fit for a recipe."""

from mimo.cli._shared import (
    ClusterOption,
    NumRanksOption,
    OverridesArgument,
    RecipeArgument,
)


def preflight(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    num_ranks: NumRanksOption = None,
    cluster: ClusterOption = None,
) -> int | None:
    """Check devices, versions, folders and network of this machine, or as a rank of its nodes."""
    from mimo.slurm.preflight import main as run

    return run(recipe, overrides or [], num_ranks, cluster)
