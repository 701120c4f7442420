"""The one error that a wrong recipe leads to, and the search for what was meant."""

import difflib
import errno
from collections.abc import Iterable

# What an OSError says of a path that is wrong, and so will be tomorrow.
_OF_THE_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST),
}

EXIT_CONTINUE = 75
"""Exit code of a run that has saved and wants to be started again with ``--resume``.

It is EX_TEMPFAIL of sysexits.h: a failure that another try may mend.
"""


class InputError(ValueError):
    """Bad input of a person. Programs that meet it print its message and end with `exit_code`."""

    exit_code = 2


class StartError(InputError):
    """What keeps a run from starting is outside its input, so another start may work."""

    exit_code = 1


def file_system_failed(error: BaseException) -> bool:
    """Whether the error, or what caused it, says that a file system or a network did not answer.

    Then a StartError is due: nothing is known of the file. A path that is wrong is bad input.
    """
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _OF_THE_PATH
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and file_system_failed(cause)


def kind_of(error: BaseException, otherwise: type[InputError] = InputError) -> type[InputError]:
    """What to raise because of ``error``: StartError where a file system failed."""
    return StartError if file_system_failed(error) else otherwise


class RecipeError(InputError):
    """Everything that is wrong with a recipe, found before any process group exists.

    `problems` holds one line per error, each naming the place (file and line, or the override),
    the key, what was given and what is needed.
    """

    def __init__(self, *problems: str) -> None:
        # The problems are the exception's args, so that pickling it between processes keeps them.
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """The lines, in the order in which they were found."""
        return self.args

    def __str__(self) -> str:
        return "\n".join(self.problems)


def shown(value: object) -> str:
    """A value of a recipe in a message: as Python writes it, but not pages of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to write integers of many digits
        return "a value too long to show"
    return text if len(text) <= 120 else f"{text[:117]}..."


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` is most likely a misspelling of, or None when nothing is close."""

    def likeness(choice: str) -> tuple[float, bool]:
        # People rarely get the beginning wrong: `dpp` means `dp`, though `pp` is as close.
        ratio = difflib.SequenceMatcher(None, name, choice).ratio()
        return ratio, choice[:1] == name[:1]

    best = max(choices, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= 0.6 else None


def suggestion(name: str, choices: Iterable[str]) -> str:
    """The end of a sentence about an unknown `name`: the nearest choice, else all of them."""
    choices = list(choices)
    match = nearest(name, choices)
    if match is not None:
        return f"did you mean '{match}'?"
    return f"choose from {', '.join(choices)}" if choices else "none are known here"
