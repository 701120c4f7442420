"""The tables of `mimo bench bridge`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mimo.bench.bridge_balance import Balance
from mimo.bench.bridge_planning import StepTime
from mimo.bench.bridge_report import Report
from mimo.bench.bridge_result import Contest
from mimo.bench.outcome import Bound, median_ratio


def print_tables(report: Report, console: Console) -> None:
    """Print all parts, the notes, and every bound."""
    found = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    console.print(f"{found}; {report.repeats} pairs of runs", highlight=False, soft_wrap=True)
    console.print(_times("ours against Megatron's bridge", "Megatron", report.against_megatron))
    console.print(_traffic("Megatron", report.against_megatron))
    console.print(_times("sharded against replicated", "replicated", report.against_replicated))
    console.print(_traffic("replicated", report.against_replicated))
    console.print(_times("ours against its bare messages", "bare", report.against_messages))
    console.print(_plans(report.plan))
    console.print(_balances(report.balance))
    for note in report.notes:
        console.print(f"- {note}", highlight=False, soft_wrap=True)
    console.print(bounds_table(report.bounds))


def table_of(title: str, *columns: str) -> Table:
    """An empty table; its first column is words, the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _times(title: str, rival: str, contests: Sequence[Contest]) -> Table:
    table = table_of(
        f"{title}: median ms and ratio",
        "encoder → language",
        "rows",
        "forward",
        rival,
        "×",
        "fwd + bwd",
        rival,
        "×",
    )
    for contest in contests:
        cells = [contest.case, f"{contest.rows} × {contest.hidden}"]
        for ours, theirs in (
            (contest.forward_ours_ms, contest.forward_theirs_ms),
            (contest.both_ours_ms, contest.both_theirs_ms),
        ):
            cells += [f"{statistics.median(times):.1f}" for times in (ours, theirs)]
            cells.append(f"{median_ratio(theirs, ours):.1f}")
        table.add_row(*cells)
    return table


def _traffic(rival: str, contests: Sequence[Contest]) -> Table:
    table = table_of(
        "MB received by each language rank, and back by each encoder rank",
        "encoder → language",
        "rows",
        "",
        "lower bound",
        "ours",
        rival,
        "ours / bound",
        f"{rival} / ours",
    )
    for contest in contests:
        for what, traffic in (
            ("rows", contest.rows_received),
            ("gradients", contest.gradients_received),
        ):
            first = what == "rows"
            sums = [sum(part) for part in (traffic.bound, traffic.ours, traffic.theirs)]
            table.add_row(
                contest.case if first else "",
                f"{contest.rows} × {contest.hidden}" if first else "",
                what,
                *[_per_rank(part) for part in (traffic.bound, traffic.ours, traffic.theirs)],
                f"{sums[1] / sums[0]:.3f}",
                f"{sums[2] / sums[1]:.2f}",
            )
    return table


def _per_rank(num_bytes: Sequence[int]) -> str:
    """For example `8.4 8.3 8.4 8.4`, or `4 × 33.6` when all are alike."""
    texts = [f"{one / 1e6:.3g}" for one in num_bytes]
    if len(set(texts)) == 1:
        return texts[0] if len(texts) == 1 else f"{len(texts)} × {texts[0]}"
    return " ".join(texts)


def _plans(plans: Sequence[StepTime]) -> Table:
    table = table_of(
        "time of a core to plan a step of 32 microbatches, from the index: median ms",
        "language ranks",
        "samples",
        "items",
        "a sequence has",
        "a receiver",
        "a sender",
        "of these",
    )
    for plan in plans:
        slower = max(plan.receiver, plan.sender, key=lambda parts: sum(parts.values()))
        table.add_row(
            str(plan.num_ranks),
            str(plan.samples),
            str(plan.items),
            "as many as fit" if plan.packed else "one sample",
            *[f"{sum(parts.values()):.1f}" for parts in (plan.receiver, plan.sender)],
            ", ".join(f"{part} {ms:.1f}" for part, ms in slower.items()),
        )
    return table


def _balances(balances: Sequence[Balance]) -> Table:
    table = table_of(
        "imbalance of encoder lanes, max / mean: median (worst) over draws",
        "items",
        "lanes",
        "lower bound",
        "items, largest first",
        "samples, largest first",
        "samples in turn",
        "items / bound",
    )
    for balance in balances:
        table.add_row(
            str(balance.num_items),
            str(balance.lanes),
            *[
                f"{statistics.median(values):.3f} ({max(values):.3f})"
                for values in (balance.bound, balance.items, balance.samples, balance.in_turn)
            ],
            f"worst {balance.worst:.3f}",
        )
    return table


def bounds_table(bounds: Sequence[Bound]) -> Table:
    """Every bound, kept or not."""
    table = table_of("what must hold", "bound", "measured", "limit", "")
    for bound in bounds:
        table.add_row(
            bound.name,
            f"{bound.value:.4g}",
            f"{'≤' if bound.at_most else '≥'} {bound.limit:g}",
            "holds" if bound.holds else "[bold red]missed[/]",
        )
    return table
