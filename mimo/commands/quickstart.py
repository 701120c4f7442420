"""`mimo quickstart`: the small example from its data to its score."""

from mimo.commands._shared import OverridesArgument, readable_errors


@readable_errors
def quickstart(overrides: OverridesArgument = None) -> int | None:
    """Prepare, train and evaluate the small example that runs without a GPU."""
    from mimo.generate.quickstart import main as run

    return run(overrides or [])
