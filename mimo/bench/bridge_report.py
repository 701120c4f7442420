"""Everything that `mimo bench bridge` found, in one object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from mimo.bench.bridge_balance import Balance
from mimo.bench.bridge_planning import StepTime
from mimo.bench.bridge_result import Contest
from mimo.bench.outcome import Bound, median_ratio
from mimo.device import backend


@dataclass(frozen=True)
class Report:
    """What was measured and judged, as written to `--json`."""

    machine: dict[str, Any]
    notes: list[str]
    repeats: int
    against_megatron: list[Contest]
    against_replicated: list[Contest]
    against_messages: list[Contest]
    plan: list[StepTime]
    balance: list[Balance]
    bounds: list[Bound]

    def to_json(self) -> str:
        """As JSON; each contest with its ratios, each bound with whether it holds."""
        found = asdict(self)
        for rival in ("megatron", "replicated", "messages"):
            contests = found[f"against_{rival}"]
            for contest in contests:
                for way in ("forward", "both"):
                    contest[f"{way}_times_faster"] = median_ratio(
                        contest[f"{way}_theirs_ms"], contest[f"{way}_ours_ms"]
                    )
        for bound, entry in zip(self.bounds, found["bounds"], strict=True):
            entry["holds"] = bound.holds
        return json.dumps(found, indent=1) + "\n"


def notes() -> list[str]:
    """What a reader must know to judge the comparison."""
    return [
        "Megatron's bridge hard-codes nccl for its groups; its group calls were mapped to "
        f"{backend()}, the backend of ours.",
        "Bytes are what the language model's ranks receive from anyone, their own module's ranks "
        "included, until each holds its first layer's input.",
        "Megatron's ranks were given complete gradients at no cost. With SP, a gather over the TP "
        "group would come first, so this flatters Megatron's backward.",
        "Megatron's bridge sums the tensors that it receives for its debug log, also when that log "
        "is off; this is part of its time.",
        "Bare messages are those of our bridge by isend and irecv alone, in memory that is there "
        "already: no plan, no autograd, no timeouts. No bridge that moves as much can be faster.",
        "A run lasts from a start common to all ranks until the last rank is done; a ratio is "
        "the median over alternating pairs of runs.",
    ]
