"""Errors of input and their exit codes; suggestions for misspelled names, and sizes for people."""

import difflib
import errno
from collections.abc import Iterable, Mapping

# Errors of a wrong path, which trying again does not mend.
_OF_THE_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST),
}

EXIT_CONTINUE = 75
"""Exit code of a run that has saved and wants to be resumed: EX_TEMPFAIL of sysexits.h."""


class InputError(ValueError):
    """Bad input of a user. Programs print its message and end with `exit_code`."""

    exit_code = 2


class StartError(InputError):
    """A run cannot start for a reason outside its input, so another start may work."""

    exit_code = 1


def file_system_failed(error: BaseException) -> bool:
    """Whether the error, or its cause, is the failure of a file system or a network.

    Raise StartError then: nothing is known of the file. A wrong path is bad input.
    """
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _OF_THE_PATH
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and file_system_failed(cause)


def kind_of(error: BaseException, otherwise: type[InputError] = InputError) -> type[InputError]:
    """Type to raise because of `error`: StartError if a file system failed."""
    return StartError if file_system_failed(error) else otherwise


class RecipeError(InputError):
    """All errors of a recipe, found before any process group exists.

    `problems`: one line per error, which names the place (file and line, or the override), the key,
    the value and what is needed.
    """

    def __init__(self, *problems: str) -> None:
        # As the exception's args the problems survive pickling.
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        return "\n".join(self.problems)


def shown(value: object) -> str:
    """Format a value for a message, at most 120 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of many digits
        return "a value too long to show"
    return text if len(text) <= 120 else f"{text[:117]}..."


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` most likely misspells, or None when nothing is close."""

    def likeness(choice: str) -> tuple[float, bool]:
        # The first letter is rarely wrong: `dpp` means `dp`, though `pp` is as close.
        ratio = difflib.SequenceMatcher(None, name, choice).ratio()
        return ratio, choice[:1] == name[:1]

    best = max(choices, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= 0.6 else None


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Hint for an unknown `name`: the nearest choice, else all choices."""
    choices = list(choices)
    match = nearest(name, choices)
    if match is not None:
        return f"did you mean '{match}'?"
    return f"choose from {', '.join(choices)}" if choices else "none are known here"


def format_bytes(num_bytes: float) -> str:
    """Format a size for people, such as `1.5 GiB`."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
    name, size = next((unit for unit in units if num_bytes >= unit[1]), units[-1])
    return f"{num_bytes / size:,.1f} {name}"


def format_memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    """Format the result of `mimo.model.modules.MimoModel.memory` for people."""
    parts = [
        f"{owner}: {', '.join(f'{format_bytes(size)} of {kind}' for kind, size in sizes.items())}"
        for owner, sizes in memory.items()
    ]
    return "; ".join(parts)
