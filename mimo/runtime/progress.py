"""Progress bars of commands, on terminals only."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_of(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; yields a callback (done, total)."""
    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counter_of(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of ``total`` items; yields a callback that counts one more."""
    with progress_of(title) as show:
        done = itertools.count(1)
        yield lambda: show(next(done), total)
