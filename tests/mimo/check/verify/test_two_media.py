"""Images and audio clips in the same samples: any placement takes the steps of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.check.verify.cells import recipe_cells
from mimo.check.verify.scale import scale_recipe
from mimo.check.verify.verifier import Verifier
from mimo.checkpoint.hf.recipes import load_recipe
from tests.conftest import RunRanks

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart.yaml"
AUDIO = (
    "encoders.audio={family: whisper, media: audio, placeholder: '<|audio_pad|>', model: "
    "{num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2, "
    "num_mel_bins: 40, tokens_per_row: 2}}"
)
LAYOUTS = {
    "disjoint": [
        "encoders.audio.grid={tp: 2, sp: true, dp: 1}",
        "language.grid={tp: 1, dp: 2}",
    ],
    "colocated": [
        "encoders.vision.placement=colocated",
        "encoders.vision.grid={tp: 1}",
        "encoders.audio.placement=colocated",
        "encoders.audio.grid={tp: 2}",
        "language.grid={tp: 2, pp: 2, dp: 1}",
    ],
    "mixed": [
        "encoders.audio.placement=colocated",
        "encoders.audio.grid={tp: 2, sp: true}",
        "encoders.vision.grid.dp=2",
        "language.grid={tp: 2, sp: true, cp: 2, dp: 1}",
    ],
    "audio pp2": [
        "encoders.audio.grid={pp: 2, dp: 2}",
        "language.grid={tp: 1, dp: 1}",
        "encoders.vision.placement=colocated",
        "encoders.vision.grid={tp: 1}",
    ],
}


@pytest.fixture(scope="module")
def verifier(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """Shares the one-rank runs; `run_ranks` has started the fork server."""
    return Verifier(tmp_path_factory.mktemp("verify"), "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_and_clips_take_the_steps_of_one_rank(verifier: Verifier, layout: str) -> None:
    recipe = load_recipe(RECIPE, [AUDIO, *LAYOUTS[layout]])
    (cell,) = recipe_cells(recipe, None, 8, full=True).cells
    result = verifier.run(cell)
    assert result.comparison is not None, result.failure
    assert result.passed, str(result.comparison.first)
    media = [
        one.media
        for one in scale_recipe(recipe, cell.layout, verifier.folder, "fp32").workload.items
    ]
    assert sorted(media) == ["audio", "image"]
