"""What a preflight has found out: a table for people, and one for programs in the run folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from mimo.slurm.links import Link
from mimo.slurm.verdict import Facts, Finding, by_scope, in_words, to_exclude

PREFLIGHT = "launch/preflight.json"
"""In the run folder."""


@dataclass
class Table:
    """nodes: that of each rank; empty of one that did not come. clocks: seconds ahead, by node."""

    nodes: list[str]
    findings: list[Finding] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1 if the job had better not begin on these nodes."""
        return int(any(not one.is_note for one in self.findings))

    def lines(self) -> Iterator[str]:
        """For people."""
        present = [*dict.fromkeys(filter(None, self.nodes))]
        shown = f"{', '.join(present[:4])}{', ...' * (len(present) > 4)}"
        plural = "s" * (len(present) != 1)
        yield f"preflight: {len(self.nodes)} ranks, {len(present)} node{plural}: {shown}"
        for name in dict.fromkeys(name for one in self.facts for name in one.free):
            size, node = min((one.free[name], one.node) for one in self.facts if name in one.free)
            yield f"  {name}: {size / 2**30:.1f} GiB free at least ({node})"
        for scope, own in by_scope(self.links, self.nodes).items():
            for kind in dict.fromkeys(one.pair.kind for one in own):
                of_kind = _told([one for one in own if one.pair.kind == kind])
                yield f"  {kind}, {scope}: {of_kind}"
        yield from in_words(self.findings, present)
        yield f"preflight: {'do not begin' if self.exit_code else 'ok'}"

    def write(self, run_dir: Path) -> None:
        """For programs. Raises OSError."""
        table = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ok": not self.exit_code,
            "exclude": to_exclude(self.findings, filter(None, self.nodes)),
            **asdict(self),
        }
        path = run_dir / PREFLIGHT
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}")
        partial.write_text(json.dumps(table, indent=1) + "\n")
        os.replace(partial, path)


def _told(links: Sequence[Link]) -> str:
    slowest = min(links, key=lambda one: one.bytes_per_second)
    speed = median(one.bytes_per_second for one in links) / 1e9
    latencies = [one.latency_seconds * 1e6 for one in links]
    return (
        f"{len(links)} pairs, {speed:.2f} GB/s, at least {slowest.bytes_per_second / 1e9:.2f} "
        f"(ranks {slowest.pair.a} and {slowest.pair.b}), {median(latencies):.0f} us, at most "
        f"{max(latencies):.0f}"
    )
