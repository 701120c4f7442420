"""The page of `mimo data doctor`: figures and samples of each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from data.modalities.image_files import thumbnail_url
from mimo.report.page import (
    Chart,
    Part,
    Piece,
    Sample,
    Section,
    Table,
    number,
    percent,
    render,
)

_PICTURE_SIDE, _SHOWN_CHARACTERS = 240, 4000  # of one sample


def render_reports(
    reports: Sequence[tuple[str, tuple[dict[str, Any], list[dict[str, Any]]]]],
) -> str:
    """Return the page about phases. reports: of each its title, and what `examine` returns."""
    title = f"Data of {reports[0][1][0]['recipe']}"
    several = len(reports) > 1
    return render(title, [_part(name if several else "", *report) for name, report in reports])


def _part(title: str, figures: dict[str, Any], samples: list[dict[str, Any]]) -> Part:
    plan, bad = figures["packing"], figures["bad"]
    tiles = {name: number(figures[name]) for name in ("samples", "items", "shards")} | {
        "tokens per sample": f"{figures['tokens_per_sample']:,.0f}",
        "of tokens count in the loss": percent(figures["loss_token_fraction"]),
        "tokens per microbatch of a lane": f"{plan['tokens_per_microbatch']['mean']:,.0f}",
        "of a microbatch is real tokens": percent(plan["full"]),
        "samples per step": f"{plan['samples_per_step']:,.0f}",
        "encoder imbalance": f"{plan['encoder_imbalance']:.2f}",
        "bad samples": number(bad["in_index"] + bad["unreadable"]),
    }
    if plan["of_budget"] is not None:
        tiles["of the token budget is used"] = percent(plan["of_budget"])
    warnings = Section("Warnings", note="; ".join(figures["warnings"]))
    mix = [
        (row["holds"], *(percent(row[name]) for name in ("samples", "tokens", "rows")))
        for row in figures["modality_mix"]
    ]
    lanes = [
        (name, f"{load['mean']:.2f}", f"{load['worst']:.2f}")
        for name, load in plan["imbalance"].items()
    ]
    charts = figures["histograms"] | {
        "tokens of a lane's microbatch": plan["tokens_per_microbatch"]
    }
    largest = [
        (row["key"], number(row["tokens"]), number(row["rows"]), row["shard"])
        for row in figures["largest"]
    ]
    sections = [
        *([warnings] if figures["warnings"] else []),
        Section(
            "What samples hold",
            tables=[Table(("", "samples", "tokens", "embeddings"), mix)],
            note=f"Figures are of {number(figures['looked_at'])} samples in random places, mixed "
            f"as training mixes them."
            if figures["looked_at"] < figures["samples"]
            else "",
        ),
        Section(
            "Lanes",
            tables=[Table(("", "mean", "worst"), lanes)],
            note=f"Most loaded lane over the mean of the lanes that wait for each other, in "
            f"{plan['steps']} planned steps: at 1.10 all take a tenth longer than they need.",
        ),
        Section("How large", charts=[_chart(name, counts) for name, counts in charts.items()]),
        Section(
            "The largest samples",
            tables=[Table(("key", "tokens", "embeddings", "shard"), largest)],
        ),
        Section(
            "Bad samples",
            tables=[
                Table(
                    ("key", "why", "shard"),
                    [(row["key"], row["reason"], row["shard"]) for row in bad["named"]],
                    words=True,
                )
            ],
            note=f"The index leaves out {bad['in_index']}. Of {bad['read']} others, read in random "
            f"places, {bad['unreadable']} cannot be used.",
        ),
        Section(
            "Samples as the model sees them",
            note="Green is what the model learns to write, orange are special tokens, and the loss "
            "leaves out what is grey.",
            samples=[_sample(sample) for sample in samples],
        ),
    ]
    return Part(title, tiles, sections)


def _chart(title: str, counts: dict[str, Any]) -> Chart:
    edges, most = [*map(number, counts["edges"])], max(counts["counts"])
    bars = [
        (max(100 * count / most, 1.4 if count else 0), f"{first} to {last}: {number(count)}")
        for count, (first, last) in zip(counts["counts"], pairwise(edges), strict=True)
    ]
    least, most, median = (number(counts[name]) for name in ("least", "most", "median"))
    below = number(counts["percentile_99"])
    return Chart(title, bars, f"{least} to {most}, median {median}, 99 % below {below}")


def _sample(sample: dict[str, Any]) -> Sample:
    note = f"{sample['shard']} · {sample['tokens']} tokens, {sample['loss_tokens']} learned"
    images = [thumbnail_url(picture, _PICTURE_SIDE) for picture in sample["pictures"]]
    return Sample(sample["key"], note, images, [*_cut(sample["pieces"], _SHOWN_CHARACTERS)])


def _cut(pieces: Sequence[Piece], num_characters: int) -> Iterator[Piece]:
    """Yield the first pieces, up to about so many characters."""
    for piece in pieces:
        if num_characters <= 0:
            return
        is_short = len(piece.text) <= num_characters
        yield piece if is_short else replace(piece, text=piece.text[:num_characters] + " …")
        num_characters -= len(piece.text)
