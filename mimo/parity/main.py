"""`mimo parity`: does a layout compute what transformers computes from the same checkpoint?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mimo.launch.processes import RanksFailed, RanksHung
from mimo.launch.ranks import warm_up_on_cpu
from mimo.parity.compare import TOLERANCE
from mimo.parity.report import print_table, verdict, write_json
from mimo.parity.runner import PRELOAD, ParityRunner
from mimo.verify.compare import IncomparableError
from mimo.verify.main import check_writable

_LOG_WIDTH = 110  # characters


def main(
    checkpoint: Path, overrides: Sequence[str], tolerance: float | None, json: Path | None
) -> int:
    """Print a table of errors; 0 if both sides are equal, else 1.

    tolerance: None for the default in fp32. Raises InputError for bad input, before any rank
    starts.
    """
    check_writable(json)
    with tempfile.TemporaryDirectory(prefix="mimo-parity-") as folder:
        runner = ParityRunner(checkpoint, Path(folder))
        _, layout = runner.prepare(overrides)
        warm_up_on_cpu(PRELOAD)
        try:
            found = runner.run(overrides, TOLERANCE if tolerance is None else tolerance)
        except (RanksFailed, RanksHung, IncomparableError) as error:
            print(error, file=sys.stderr)
            return 1
    # A log file has no width.
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    title = f"{checkpoint}, transformers against {layout.world_size} ranks (fp32)"
    print_table(console, found, title)
    if json is not None:
        write_json(json, found, checkpoint, list(overrides))
    print(verdict(found))
    return 0 if found.passed else 1
