"""Segments and positions reach every tensor-parallel rank of every pipeline stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.batch import GlobalMicrobatch
from mimo.checkpoint.hf.recipes import load_recipe
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_parity import TOLERANCE


def run_and_record(rank: int, path: Path, overrides: list[str]) -> dict:
    """Train as usual; what the language model's forward was given on this rank, call by call."""
    from mimo.engines.megatron.language import LanguageModel

    calls = []
    original = LanguageModel.forward

    def forward(self, *args, **given):
        segments = given["packed_seq_params"]
        calls.append(
            {
                "cu_seqlens": segments.cu_seqlens_q.tolist(),
                "cu_seqlens_padded": segments.cu_seqlens_q_padded.tolist(),
                "max_seqlen": segments.max_seqlen_q,
                "position_ids": given["position_ids"].numpy().copy(),
            }
        )
        return original(self, *args, **given)

    LanguageModel.forward = forward
    try:
        return tiny.run_layout_steps(rank, path, overrides) | {"calls": calls}
    finally:
        LanguageModel.forward = original


def planned_samples(path: Path, overrides: list[str]) -> list[GlobalMicrobatch]:
    """The microbatches of all steps, as the data index has them."""
    planner = tiny.planner_of(path, *overrides)
    return [m.samples for step in range(tiny.NUM_STEPS) for m in planner.microbatches(step)]


def read_lengths(path: Path) -> list[int]:
    """Tokens of the samples of all steps, in order, as each is read and encoded."""
    dataset = tiny.open_sources(load_recipe(path))
    places = dataset.order.at(np.arange(12 * tiny.NUM_STEPS))
    return [
        len(dataset.readers[source].sample(sample).input_ids)
        for source, sample in zip(*(place.tolist() for place in places), strict=True)
    ]


@pytest.mark.parametrize("grid", quick(["{cp: 2}", "{cp: 2, tp: 2, sp: true}"], "{cp: 2}"))
def test_metrics_count_each_real_token_of_a_packed_step_once_and_no_padding(
    run_ranks: RunRanks, tmp_path: Path, grid: str
) -> None:
    tiny.write_samples(tmp_path)
    path, overrides = tiny.write_recipe(tmp_path), [f"language.grid={grid}"]
    lengths = read_lengths(path)
    padded = [m.segment_length.sum() for m in planned_samples(path, overrides)]
    assert sum(padded) > sum(lengths), "nothing is padded here"
    for result in run_ranks(tiny.run_layout_steps, 1 + 2 * (1 + ("tp" in grid)), path, overrides):
        counted = [metrics["tokens"] for metrics in result["metrics"]]
        assert counted == [sum(lengths[:12]), sum(lengths[12:])]


LAYOUTS = {
    "pp3 with tp2": (7, 3, ["language.grid={tp: 2, pp: 3}", "language.model.num_layers=3"]),
    "pp3 with tp2 and sp": (
        7,
        3,
        ["language.grid={tp: 2, sp: true, pp: 3}", "language.model.num_layers=3"],
    ),
    "pp3 with cp2": (7, 3, ["language.grid={cp: 2, pp: 3}", "language.model.num_layers=3"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_and_rank_has_them_and_the_loss_is_that_of_one_rank(
    run_ranks: RunRanks, tmp_path: Path, layout: str
) -> None:
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    ranks, stages, overrides = LAYOUTS[layout]
    results = run_ranks(run_and_record, ranks, path, overrides)
    language = [result["calls"] for result in results[1:]]
    first = language[0]
    assert len(language) == 2 * stages
    assert len(first) == tiny.NUM_STEPS * 3  # microbatches
    cp = 2 if "cp2" in layout else 1
    for number, calls in enumerate(language):
        for call, expected, alike in zip(calls, first, language[number % cp], strict=True):
            np.testing.assert_array_equal(call["position_ids"], alike["position_ids"])
            for name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
                assert call[name] == expected[name]
    for call, samples in zip(first, planned_samples(path, overrides), strict=True):
        padded, real = call["cu_seqlens_padded"], call["cu_seqlens"]
        assert len(real) == len(padded) > 4  # four samples, and what fills the sequence up
        assert np.diff(real)[:4].tolist() == samples.length.tolist()
        assert np.diff(padded)[:4].tolist() == samples.segment_length.tolist()
        tokens = cp * call["position_ids"].shape[-1]
        assert padded[-1] == tokens >= real[-1]
        assert call["max_seqlen"] == max(np.diff(padded))
    (reference,) = run_ranks(tiny.run_reference_steps, 1, path, overrides)
    for result in results:
        for metrics, expected in zip(result["metrics"], reference["steps"], strict=True):
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
