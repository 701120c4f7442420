"""How long a job takes from its start to the end of its first step, by phase, and on which rank.

Of a job of srun the start is when the script called it, MIMO_BEGAN in seconds since 1970, so that
time in the launcher and in imports counts; of other jobs it is when the process began.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch.distributed as dist

STARTUP = "startup.json"
PHASES = (
    *("start and imports", "meeting", "checks", "world", "groups", "model", "data"),
    *("checkpoint", "first step"),
)


class Startup:
    """Of this process, which is one rank. Phases end in the order of `PHASES`, some never."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def begin(self, at: float) -> None:
        """Measure from now on. at: seconds since 1970 when the job began."""
        self._since = at

    def ends(self, phase: str) -> None:
        """The time since another phase ended belongs to this one."""
        if self._since is not None:
            now = time.time()
            self._seconds[phase] += now - self._since
            self._since = now

    def tell(self, run_dir: Path, say: Callable[[str], None] | None) -> None:
        """Once, after the first step: every rank of the world calls it, and one has a ``say``."""
        if self._since is None:
            return
        # Late: it imports the engine, and a rank measures from before its device is chosen.
        from mimo.train.batches import sum_over_world

        self.ends("first step")
        self._since = None
        table = np.zeros((dist.get_world_size(), len(PHASES)))
        table[dist.get_rank()] = [*self._seconds.values()]
        table = np.array(sum_over_world(table.ravel().tolist())).reshape(table.shape)
        if say is None:
            return
        found = {
            phase: {"seconds": own.max(), "rank": int(own.argmax()), "mean": own.mean()}
            for phase, own in zip(PHASES, table.T, strict=True)
            if own.any()
        }
        total = table.sum(axis=1).max()
        parts = [f"{name} {one['seconds']:.1f} (rank {one['rank']})" for name, one in found.items()]
        say(f"startup {total:.1f} s: {', '.join(parts)}")
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        told = {"time": at, "ranks": len(table), "seconds": total, "phases": found}
        partial = run_dir / f".{STARTUP}"
        partial.write_text(json.dumps(told, indent=1) + "\n")
        os.replace(partial, run_dir / STARTUP)


def began_at() -> float:
    """When the job of this rank began, which torchrun or srun started, in seconds since 1970."""
    given = os.environ.get("MIMO_BEGAN", "")
    if given.replace(".", "", 1).isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return float(given)
    return psutil.Process().create_time()


STARTING = Startup()
