"""Environment variables of ranks that we choose where the user has not; needs no torch.

Some are read when a library is loaded: they are set before anything imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """A variable, our value, and the reason in words.

    instead: variables by which a user says the same; ours is left unset beside them.
    """

    name: str
    value: str
    reason: str
    instead: tuple[str, ...] = ()

    @property
    def is_users(self) -> bool:
        """Whether the environment already says something else."""
        given = [os.environ.get(name) for name in (self.name, *self.instead)]
        return any(value is not None for value in given[1:]) or given[0] not in (None, self.value)

    def __str__(self) -> str:
        """As it is in force: ours, or the user's."""
        if not self.is_users:
            return f"{self.name}={self.value}"
        names = (self.name, *self.instead)
        return ", ".join(f"{n}={os.environ[n]} (yours)" for n in names if n in os.environ)


_THREADS_WAIT = (
    "threads of one process that wait for each other sleep soon, not after milliseconds: beside "
    "other load they would wait for one that cannot run because they do"
)

VARIABLES = (
    # GNU OpenMP's count of spins: some tens of microseconds instead of milliseconds.
    Variable("GOMP_SPINCOUNT", "1000", _THREADS_WAIT, ("OMP_WAIT_POLICY",)),
    Variable("KMP_BLOCKTIME", "1", _THREADS_WAIT, ("OMP_WAIT_POLICY",)),
    Variable(
        "CUDA_MODULE_LOADING",
        "EAGER",
        "loading a kernel at its first use may wait for the device, where another one waits for it",
    ),
    Variable(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True",
        "packed batches differ in size: memory of another size can be used again",
        ("PYTORCH_ALLOC_CONF",),
    ),
    Variable(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1", "looking for a GPU initialises none, before ranks do"
    ),
)
"""Of every process, whatever its rank."""


def set_variables(variables: Iterable[Variable] = VARIABLES) -> None:
    """Set what the user has not, in this process and those that it starts."""
    for variable in variables:
        if not variable.is_users:
            os.environ[variable.name] = variable.value
