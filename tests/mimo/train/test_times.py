"""Where a step's time goes, over the ranks of every module, from the sum of all ranks' tables."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mimo.parallel.grids import GridSpec, Layout
from mimo.spans import RANK
from mimo.train import metrics as figures
from mimo.train.metrics import StepTimes
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import metrics, run

# Vision on rank 0, the language model on ranks 1 and 2.
SECONDS = (
    {
        ("vision", "encode", ""): 2.0,
        ("vision", "bridge_wait", "vision_backward"): 5.0,
        (RANK, "sync", ""): 3.0,
    },
    {("language", "forward", ""): 4.0, (RANK, "data", ""): 1.0, (RANK, "sync", ""): 5.0},
    {
        ("language", "forward", ""): 6.0,
        ("language", "bridge_wait", "vision_forward"): 2.0,
        ("language", "pipeline_wait", ""): 2.0,
    },
)
# Vision's rows go to both ranks of the language model.
BYTES = (
    {("sent", "vision_forward"): 80, ("least", "vision_forward"): 40},
    {("sent", "vision_backward"): 10},
    {("sent", "vision_backward"): 30},
)


def test_mean_largest_and_idle_share_of_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    language = GridSpec("language", tp=2, rank_offset=1)
    layout = Layout(language, {"vision": GridSpec("vision")}, world_size=3)
    tables = []
    for rank, seconds in enumerate(SECONDS):
        monkeypatch.setattr(figures.SPANS, "take", lambda seconds=seconds: seconds)
        monkeypatch.setattr(figures, "peak_memory", lambda rank=rank: (rank + 1) * 2**30)
        tables.append(StepTimes(layout, rank).of_this_rank(BYTES[rank]))
    found = StepTimes(layout, 0).figures(np.sum(tables, axis=0))
    assert found == pytest.approx(
        {
            "idle_fraction": 18 / 30,
            "idle_fraction_vision": 8 / 10,
            "idle_fraction_language": 10 / 20,
            "memory_gib_vision": 1,
            "memory_gib_language": 3,
            "bridge_wait_seconds_vision_forward": 2,
            "bridge_wait_seconds_vision_backward": 5,
            "bridge_bytes_vision_forward": 80,
            "bridge_least_bytes_vision_forward": 40,
            "bridge_bytes_vision_backward": 40,
            "bridge_least_bytes_vision_backward": 0,
            **with_max("vision_encode", 2, 2),
            **with_max("vision_bridge_wait", 5, 5),
            **with_max("vision_sync", 3, 3),
            **with_max("language_forward", 5, 6),
            **with_max("language_data", 0.5, 1),
            **with_max("language_sync", 2.5, 5),
            **with_max("language_bridge_wait", 1, 2),
            **with_max("language_pipeline_wait", 1, 2),
        }
    )
    assert StepTimes(layout, 0).figures(np.zeros(0)) == {}


@pytest.mark.parametrize(
    ("layout", "copies", "backward"),
    [
        (["language.grid.tp=2"], 2, True),  # to one rank, and from there to the other
        pytest.param(
            ["language.grid.tp=2", "bridge.delivery=replicated"], 2, True, marks=pytest.mark.slow
        ),
        pytest.param(
            ["language.grid.tp=2", "language.grid.sp=true"], 1, True, marks=pytest.mark.slow
        ),
        (["language.grid.dp=2", "encoders.vision.freeze=true"], 1, False),
    ],
)
def test_bytes_over_a_bridge_are_those_that_are_sent(
    run_ranks: RunRanks, tmp_path: Path, layout: list[str], copies: int, backward: bool
) -> None:
    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    run(run_ranks, recipe, *layout, "train.micro_batch_size=2", "train.steps=1")
    (line,) = metrics(recipe)
    least = line["bridge_least_bytes_vision_forward"]
    assert least == rows_in(tmp_path / "train-00000.tar") * 32 * 4
    assert line["bridge_bytes_vision_forward"] == copies * least
    back = line["bridge_least_bytes_vision_backward"], line["bridge_bytes_vision_backward"]
    # Each rank of a lane has the whole gradient, and returns its share.
    assert back == ((least, least) if backward else (0, 0))


def rows_in(shard: Path) -> int:
    """Of all images: one for each 28 · 28 pixels."""
    with tarfile.open(shard) as tar:
        files = [tar.extractfile(one) for one in tar if one.name.endswith(".png")]
        sizes = [Image.open(file).size for file in files if file is not None]
    return sum(width * height for width, height in sizes) // 28**2


def with_max(name: str, mean: float, largest: float) -> dict[str, float]:
    return {f"seconds_{name}": mean, f"seconds_{name}_max": largest}
