"""A checkpoint computes for images and videos what transformers computes with it.

fp32 on a CPU: the samples of a shard packed into one sequence, against one call per sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import RunRanks
from tests.mimo.checkpoint.hf.folders import make
from tests.mimo.model.test_videos import write_samples

TOLERANCE = 1e-5
# Frames of each video and images (0) of each sample, in order of mention.
SAMPLES = ((0, 5, 0), (), (2, 7), (0,))

RECIPE = """
name: videos
init_from: {folder}
encoders:
  vision: {{}}
data:
  sources: [{{path: "{directory}/train-*.tar"}}]
  sequence_length: 1024
train: {{steps: 1, global_batch_size: 4, micro_batch_size: 4}}
"""


def run_both(rank: int, path: Path, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Logits (L, V) of each sample: ours, and those of transformers."""
    from transformers import AutoModelForImageTextToText

    from data.batch import pack_lane
    from mimo.checkpoint.hf.initial import initial_weights
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.families.registry import encoder_settings
    from mimo.generate.one_rank import LocalModel
    from mimo.model.dataset import open_tokenizer
    from tests.mimo import tiny

    recipe = load_recipe(path)
    settings: Any = encoder_settings(recipe, "vision")
    frames = settings.temporal_patch_size
    chat = open_tokenizer(recipe)
    dataset = tiny.open_sources(recipe)
    (index,), (reader,) = dataset.indexes, dataset.readers
    samples = [reader.sample(number) for number in range(len(index))]
    items = [index.items_of_sample(number) for number in range(len(index))]
    lengths = [len(sample.input_ids) for sample in samples]
    lane = pack_lane(
        samples,
        [[reader.plan(item).row_grid for item in own] for own in items],
        [0] * len(samples),
        sum(lengths),
        chat.pad_token_id,
        time_steps=[[reader.plan(item).time_step for item in own] for own in items],
    )
    local = LocalModel(recipe, chat.vocab_size, initial_weights(recipe))
    patches = [
        reader.media(item).wire.values(reader.patches(item)) for item in range(index.num_items)
    ]
    grids = np.array([reader.plan(item).grid for item in range(index.num_items)], np.int64)
    places = np.flatnonzero(np.isin(lane.input_ids, list(chat.placeholder_ids.values())))
    with torch.no_grad():
        rows = local.encode("vision", np.concatenate(patches), grids)
        logits = local.forward(lane, {"vision": (rows, places)}, with_labels=False)[0]
    ours = logits[:, : local.model.num_tokens].split(lengths)

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for number, sample in enumerate(samples):
        given = given_to_transformers(reader, items[number], patches, frames)
        kinds = np.zeros(len(sample.input_ids), np.int32)
        kinds[sample.input_ids == chat.placeholder_ids["image"]] = 1
        kinds[sample.input_ids == chat.placeholder_ids["video"]] = 2
        with torch.no_grad():
            theirs = model(
                input_ids=torch.from_numpy(sample.input_ids)[None],
                mm_token_type_ids=torch.from_numpy(kinds)[None],
                use_cache=False,
                **given,
            ).logits[0]
        found.append((ours[number], theirs))
    return found


def given_to_transformers(
    reader: Any, items: range, patches: list[np.ndarray], frames: int
) -> dict[str, Any]:
    """A sample's pixels and grids; the items of one video are one grid. frames: of a patch."""
    index = reader.index
    values: dict[str, list[np.ndarray]] = {"image": [], "video": []}
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    seconds = []
    for item in items:
        media = index.media[int(index.column("item_media", item))]
        values[media].append(patches[item])
        if index.column("item_number", item) > 0:
            grids[media][-1][0] += 1
            continue
        grids[media].append(list(reader.plan(item).grid))
        if media == "video":
            seconds.append(frames / index.part(item).fps)
    given: dict[str, Any] = {}
    for media, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[media]:
            given[key] = torch.from_numpy(np.concatenate(values[media]))
            given[f"{media}_grid_thw"] = torch.tensor(grids[media])
    return given | ({"second_per_grid_ts": torch.tensor(seconds)} if seconds else {})


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logits_over_images_and_videos_equal_those_of_transformers(
    run_ranks: RunRanks, tmp_path: Path, family: str
) -> None:
    folder = make(family, tmp_path / "checkpoint")
    write_samples(tmp_path, SAMPLES)
    path = tmp_path / "videos.yaml"
    path.write_text(RECIPE.format(folder=folder, directory=tmp_path))
    (found,) = run_ranks(run_both, 1, path, folder)
    assert len(found) == len(SAMPLES)
    for ours, theirs in found:
        assert theirs.std() > 0.1, "an absolute tolerance needs logits of order one"
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
