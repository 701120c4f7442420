"""Adapters take the same steps in any layout as on one rank, and what they adapt stays as it was.

The rates are so large that `lora_b`, which begins at 0, is far from it in the second step: only
then does `lora_a` get a gradient. Each module's adapters have another rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoders.qwen_vl import PROJECTOR
from mimo.families.keymap import is_adapter
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_parity import COLOCATED, INTERLEAVED, TWO_LANES, check

LANGUAGE = ["language.lora={rank: 3, alpha: 6}", "language.learning_rate=0.5"]
ENCODER = ["encoders.vision.lora={rank: 2, alpha: 6}", "encoders.vision.learning_rate=5.0"]
FROZEN_ENCODER = ["encoders.vision.freeze=true"]
BOTH = [*LANGUAGE, *ENCODER]

LAYOUTS = {
    "2 lanes to 2, overlapped": [
        *BOTH,
        "encoders.vision.grid.dp=2",
        *TWO_LANES,
        "train.overlap_grad_reduce=true",
    ],
    "language tp2 with sp, two query groups on four ranks": [
        *BOTH,
        "language.grid={tp: 4, sp: true}",
        "language.model.num_query_groups=2",
    ],
    "cp2": [*BOTH, "language.grid.cp=2"],
    "interleaved pp2 vpp2 with tp2 and sp": [
        *BOTH,
        *INTERLEAVED,
        "language.grid={tp: 2, sp: true, pp: 2, vpp: 2}",
    ],
    "encoder pp2 tp2 with sp, recomputed": [
        *BOTH,
        "encoders.vision.grid={tp: 2, sp: true, pp: 2, dp: 1}",
        "encoders.vision.recompute=full",
    ],
    "recomputed in part": [*BOTH, "language.recompute=selective", "language.grid.cp=2"],
    "cp2 tp2 pp2 with sp, colocated, recomputed": [
        *BOTH,
        *COLOCATED,
        "encoders.vision.grid={tp: 2}",
        "language.grid={cp: 2, tp: 2, sp: true, pp: 2}",
        "language.recompute=full",
    ],
    "2 lanes tp2 to tp2 pp2 with sp, unpacked": [
        *BOTH,
        "encoders.vision.grid={tp: 2, dp: 2}",
        "language.grid={tp: 2, pp: 2, sp: true}",
        "data.packing=false",
    ],
    # Nothing in front of the language model's adapters learns.
    "frozen encoder, pp2, recomputed": [
        *LANGUAGE,
        *FROZEN_ENCODER,
        "language.grid.pp=2",
        "language.recompute=full",
    ],
    "frozen encoder, tp2 with sp, untied": [
        *LANGUAGE,
        *FROZEN_ENCODER,
        "language.grid={tp: 2, sp: true}",
        "language.model.tie_word_embeddings=false",
    ],
    # Nothing behind the encoder's adapters learns.
    "frozen language": [*ENCODER, "language.freeze=true", "language.grid.pp=2"],
    # The other module learns all its weights.
    "whole encoder": [*LANGUAGE, "language.grid={tp: 2, sp: true}"],
    "whole language": [*ENCODER, "encoders.vision.freeze=tower", "language.grid.pp=2"],
    "some linears, tp2": [
        *BOTH,
        "language.lora.targets=[qkv, fc2]",
        "encoders.vision.lora.targets=[proj, fc1]",
        "language.grid={tp: 2, sp: true}",
        "encoders.vision.grid.dp=3",
    ],
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "cp2", "encoder pp2 tp2 with sp, recomputed"))
def test_steps_equal_those_of_one_rank(run_ranks: RunRanks, recipe: Path, layout: str) -> None:
    check(run_ranks, recipe, LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["{tp: 2, sp: true, pp: 2}", "{tp: 2, cp: 2}"])
def test_fp64_steps_equal_one_rank_to_ten_digits(
    run_ranks: RunRanks, recipe: Path, grid: str
) -> None:
    overrides = [*BOTH, f"language.grid={grid}", "train.precision=fp64"]
    check(run_ranks, recipe, overrides, 1e-10)


def test_in_the_second_step_both_matrices_of_every_adapter_have_gradients_that_count(
    run_ranks: RunRanks, recipe: Path
) -> None:
    (reference,) = run_ranks(tiny.run_reference_steps, 1, recipe, BOTH)
    largest = {
        name: float(np.abs(found["gradient"]).max())
        for name, found in reference["parameters"].items()
        if is_adapter(name)
    }
    # Two modules of two layers with four linears each.
    assert len(largest) == 2 * 2 * 4 * 2
    norm = reference["steps"][-1]["grad_norm"]
    for name, gradient in largest.items():
        assert gradient > 1e-5 * norm, name  # ten times the floor of the comparison
        if name.endswith("lora_a"):
            partner = largest[name.replace("lora_a", "lora_b")]
            assert gradient > 1e-2 * partner, name


def drawn_weights(rank: int, path: Path) -> dict[str, np.ndarray]:
    """The weights of the recipe's model, by name in the whole model, before any step."""
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.generate.one_rank import LocalModel
    from mimo.model.dataset import open_tokenizer

    recipe = load_recipe(path)
    local = LocalModel(recipe, open_tokenizer(recipe).vocab_size)
    return {
        f"{module}.{name}": param.detach().numpy()
        for module, part in local.model.modules.items()
        for name, param in part.whole.named_parameters()
    }


@pytest.mark.slow
def test_only_adapters_and_the_projector_learn(run_ranks: RunRanks, recipe: Path) -> None:
    (drawn,) = run_ranks(drawn_weights, 1, recipe)
    overrides = [*BOTH, "train.optimizer=adam", "train.weight_decay=0.1"]
    grids = ["language.grid={tp: 2, pp: 2}", "encoders.vision.grid={tp: 2, sp: true, dp: 1}"]
    results: list[Any] = run_ranks(tiny.run_layout_steps, 6, recipe, [*overrides, *grids])
    after = tiny.assemble(results, "weight")
    assert after.keys() >= drawn.keys()
    for name, weight in after.items():
        if is_adapter(name):
            assert weight is not None
            assert weight.any()
        elif name.removeprefix("vision.").startswith(PROJECTOR):
            assert (weight != drawn[name]).any(), name
        else:
            np.testing.assert_array_equal(weight, drawn[name], name)
