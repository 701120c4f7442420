"""Whole runs with feature levels: checkpoints, validation, generation, plans that differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mimo.runtime.processes import RanksFailed
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_levels_parity import COLOCATED, DISJOINT, INTERLEAVED, LAYERS
from tests.mimo.runs import ADAM, metrics, run


@pytest.mark.slow
def test_a_checkpoint_of_an_interleaved_layout_resumes_elsewhere(
    run_ranks: RunRanks, path: Path
) -> None:
    settings = [LAYERS, *ADAM, "train.steps=4", "train.save_every=2"]
    run(run_ranks, path, *DISJOINT, *settings, *INTERLEAVED)
    whole = metrics(path)
    checkpoint = path.parent / "runs" / "tiny" / "checkpoints" / "step_2"
    others = [
        [*DISJOINT, "encoders.vision.grid.pp=2", "language.grid={tp: 2, sp: true}"],
        [*COLOCATED, "language.grid.pp=2"],
    ]
    for number, other in enumerate(others):
        name = f"other{number}"
        run(run_ranks, path, *other, *settings, f"name={name}", resume_from=checkpoint)
        for got, expected in zip(metrics(path, name), whole[2:], strict=True):
            assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    quick_values(
        {"disjoint": [*DISJOINT, *INTERLEAVED], "colocated": [*COLOCATED, *INTERLEAVED]}, "disjoint"
    ),
)
def test_validation_sends_levels_alone(run_ranks: RunRanks, path: Path, layout: list[str]) -> None:
    shard = f"data.validation=[{{path: '{path.parent}/train-*.tar'}}]"
    every = ["train.validate_every=1", "train.validation_batches=1", "train.learning_rate=1e-12"]
    run(run_ranks, path, LAYERS, *layout, "train.steps=1", shard, *every)
    step, validation = metrics(path)
    # The same samples with (nearly) the same weights.
    assert validation["validation_loss"] == pytest.approx(step["loss"], rel=1e-5)


@pytest.mark.slow
def test_answers_depend_on_the_levels_of_an_image(run_ranks: RunRanks, path: Path) -> None:
    run(run_ranks, path, LAYERS, *DISJOINT, "language.grid.pp=2", "train.steps=1")
    (differs,) = run_ranks(_logits_with_and_without_levels, 1, path.parent / "runs" / "tiny")
    assert differs


def _logits_with_and_without_levels(rank: int, folder: Path) -> bool:
    import torch

    from mimo.generate.answer import Generator, Request

    generator = Generator(folder)
    pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": "read the digits"}]
    request = Request([{"role": "user", "content": content}], [Image.fromarray(pixels)])
    seen: list[torch.Tensor] = []
    forward = generator.model.forward
    generator.model.forward = lambda *a, **k: seen.append(forward(*a, **k)) or seen[-1]  # type: ignore[method-assign]
    (answer,) = generator.answer([request], max_new_tokens=3)
    assert isinstance(answer, str)
    merger = generator.model.model.modules["vision"].whole.get_submodule("level_mergers.2.mlp")
    with torch.no_grad():
        for parameter in merger.parameters():
            parameter.zero_()
    first = len(seen)
    generator.answer([request], max_new_tokens=1)
    return bool((seen[first] != seen[0]).any())


def test_a_stage_that_only_receives_levels_checks_plans(run_ranks: RunRanks, path: Path) -> None:
    expected = r"bridge vision \(levels 3\), microbatch 0: ranks \[0\] and ranks \[2\] planned"
    with pytest.raises(RanksFailed, match=expected):
        run_ranks(_run_with_another_plan_on_the_last_stage, 3, path)


def _run_with_another_plan_on_the_last_stage(rank: int, path: Path) -> None:
    from mimo.model import decoding
    from mimo.model.step_plan import StepPlanner
    from mimo.parallel.connections import Host

    # Ranks with other plans would wait for each other's texts.
    decoding.find_host = lambda: Host((rank,), "alone", 0, 1)
    if rank == 2:
        plan = StepPlanner.microbatches
        StepPlanner.microbatches = lambda self, step: plan(self, step)[::-1]  # type: ignore[method-assign]
    tiny.run_layout_steps(rank, path, [LAYERS, *DISJOINT, "language.grid.pp=2"])
