"""Environment variables of ranks that we choose where the user has not; needs no torch.

Some are read when a library is loaded: they are set before anything imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """A variable and our value.

    instead: variables by which a user says the same; ours is left unset beside them.
    """

    name: str
    value: str
    instead: tuple[str, ...] = ()

    @property
    def is_users(self) -> bool:
        """Whether the environment already says something else."""
        given = os.environ.get(self.name, self.value)
        return given != self.value or any(name in os.environ for name in self.instead)

    def __str__(self) -> str:
        """As it is in force: ours, or the user's."""
        if not self.is_users:
            return f"{self.name}={self.value}"
        names = (self.name, *self.instead)
        return ", ".join(f"{n}={os.environ[n]} (yours)" for n in names if n in os.environ)


VARIABLES = (
    # Threads that wait for each other sleep after microseconds instead of spinning for
    # milliseconds: on a busy machine a spinning thread holds the core that the other one needs.
    Variable("GOMP_SPINCOUNT", "1000", ("OMP_WAIT_POLICY",)),
    Variable("KMP_BLOCKTIME", "1", ("OMP_WAIT_POLICY",)),
    # Packed batches differ in size; segments that grow can be reused for any of them.
    Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_ALLOC_CONF",)),
    # Looking for GPUs initialises none.
    Variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
)
"""Of every process, whatever its rank."""


def set_variables(variables: Iterable[Variable] = VARIABLES) -> None:
    """Set what the user has not, in this process and those that it starts."""
    for variable in variables:
        if not variable.is_users:
            os.environ[variable.name] = variable.value
