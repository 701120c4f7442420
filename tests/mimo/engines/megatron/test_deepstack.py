"""Feature levels enter the language model as in transformers' Qwen3-VL text model.

fp32 on a CPU, random weights in every parameter, packed segments against one call per segment.
Logits differ by at most 1e-5 (they are of order one), gradients, those of the levels' rows among
them, by 1e-5 of their largest element.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import Weights, noise
from tests.mimo.families.languages.references import (
    IMAGES,
    LENGTHS,
    NUM_TOKENS,
    SETTINGS,
    TextModelWithHead,
    image_positions,
    to_ours,
)

TOLERANCE = 1e-5
NUM_LEVELS = 2  # of three layers


@dataclass(frozen=True)
class Reference:
    """The results of transformers, segment by segment, under our names.

    levels, level_gradients: (levels, n, H). places: (n,) of their rows in the packed sequence.
    """

    weights: Weights
    ids: Tensor
    levels: Tensor
    places: Tensor
    logit_gradients: Tensor
    logits: Tensor
    gradients: Weights
    level_gradients: Tensor


def image_places() -> list[Tensor]:
    """By segment, where its images' rows stand in it."""
    return [
        torch.cat([torch.arange(o, o + int(np.prod(g))) for o, g in images] or [torch.arange(0)])
        for images in IMAGES
    ]


@functools.cache
def compute_reference() -> Reference:
    model = TextModelWithHead("qwen3", tied=True)
    lone_module.randomize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, NUM_TOKENS, (sum(LENGTHS),), generator=generator)
    places = image_places()
    counts = [len(own) for own in places]
    levels = noise(3, NUM_LEVELS, sum(counts), SETTINGS["qwen3"]["hidden_size"]).requires_grad_()
    logits = []
    segments = zip(
        ids.split(LENGTHS),
        image_positions().split(LENGTHS, dim=1),
        places,
        levels.split(counts, dim=1),
        strict=True,
    )
    for part, positions, own, rows in segments:
        mask = torch.zeros(1, len(part), dtype=torch.bool)
        mask[0, own] = True
        levels_of_part = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(rows)}
        logits.append(model(part, positions, **levels_of_part))
    joined = torch.cat(logits)
    logit_gradients = noise(2, *joined.shape)
    joined.backward(logit_gradients)
    assert levels.grad is not None
    starts = np.cumsum([0, *LENGTHS])[:-1].tolist()
    return Reference(
        weights=to_ours("qwen3", dict(model.named_parameters()), padding=1e3),
        ids=ids,
        levels=levels.detach(),
        places=torch.cat([own + start for own, start in zip(places, starts, strict=True)]),
        logit_gradients=logit_gradients,
        logits=joined.detach(),
        gradients=to_ours("qwen3", lone_module.gradients(model), padding=0.0),
        level_gradients=levels.grad,
    )


def run(
    run_ranks: RunRanks, tp: int, reference: Reference, sp: bool = False, recompute: str = "none"
) -> list[dict]:
    return run_ranks(
        lone_module.run_language,
        tp,
        {**SETTINGS["qwen3"], "tie_word_embeddings": True},
        NUM_TOKENS,
        reference.weights,
        reference.ids,
        image_positions(),
        LENGTHS,
        reference.logit_gradients,
        tp,
        sp,
        "qwen3",
        recompute,
        (reference.levels, reference.places),
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_logits_and_gradients_of_weights_and_levels_equal_those_of_transformers(
    run_ranks: RunRanks, recompute: str
) -> None:
    reference = compute_reference()
    (got,) = run(run_ranks, 1, reference, False, recompute)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(
        got["logits"][:, :NUM_TOKENS], reference.logits, rtol=0, atol=TOLERANCE
    )
    error, name = lone_module.worst_error(
        got["gradients"] | {"levels": got["row_gradients"]},
        reference.gradients | {"levels": reference.level_gradients},
    )
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
def test_each_tensor_parallel_rank_gets_the_whole_gradient_of_the_rows_that_it_adds(
    run_ranks: RunRanks, sp: bool, recompute: str
) -> None:
    reference = compute_reference()
    results = run(run_ranks, 2, reference, sp, recompute)
    logits = torch.cat([result["logits"] for result in results], dim=1)[:, :NUM_TOKENS]
    torch.testing.assert_close(logits, reference.logits, rtol=0, atol=TOLERANCE)
    numbers = [result["rows"].tolist() for result in results]
    everything = list(range(len(reference.places)))
    assert numbers[0] + numbers[1] == everything if sp else numbers == [everything] * 2
    assert all(own for own in numbers), "both ranks add rows"
    for result in results:
        error, _ = lone_module.worst_error(
            {"levels": result["row_gradients"]},
            {"levels": reference.level_gradients[:, result["rows"]]},
        )
        assert error <= TOLERANCE
