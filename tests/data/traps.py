"""Images that kill, hang or fail whoever decodes them. Imports no more than a worker does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.modalities.images import ImageProcessor


@dataclass(frozen=True)
class Trap(ImageProcessor):
    """An image processor with a trap in the image that is ``victim``.

    do: "exit", "kill", "hang", "raise" or "report". times: how often the trap works, counted in the
    folder ``log``, where "report" writes what it sees of its process.
    """

    victim: bytes = b""
    do: str = "report"
    times: int = 1
    log: str = ""

    def decode(self, data: bytes) -> Any:
        log = Path(self.log)
        if data == self.victim and len(list(log.glob("sprung-*"))) < self.times:
            (log / f"sprung-{os.getpid()}").touch()
            if self.do == "exit":
                os._exit(7)
            if self.do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.do == "hang":
                time.sleep(600)
            if self.do == "raise":
                raise KeyError("a mistake in the processor")
            seen = {"modules": sorted(sys.modules), "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}
            (log / "report").write_text(json.dumps(seen))
        return super().decode(data)
