"""`mimo prepare`: example data and the index."""

from mimo.commands._shared import OverridesArgument, RecipeArgument, readable_errors


@readable_errors
def prepare(recipe: RecipeArgument, overrides: OverridesArgument = None) -> int | None:
    """Write the example data and the index that a recipe needs."""
    from mimo.step.prepare import main as run

    return run(recipe, overrides or [])
