"""What a rank reads of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from data.loader import LoadedStep, StepLoader
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.dataset import Dataset
from mimo.model.decoding import decoding_of, gather_items
from mimo.model.step_plan import StepPlan
from mimo.parallel.grids import Coords, Layout
from tests.mimo import tiny


def load(path: Path, rank: int) -> tuple[LoadedStep, StepPlan, Dataset, Layout]:
    """The first step as ``rank`` loads it: rank 0 encodes, rank 1 is the language model."""
    planner, dataset = tiny.planner_of(path), tiny.open_sources(load_recipe(path))
    layout = planner.layout
    decoding = decoding_of(dataset.readers, layout, rank)
    loader = StepLoader(planner, dataset.readers, decoding, 0, 1)
    loaded = loader.next()
    loader.close()
    return loaded, planner.finish(loaded.microbatches), dataset, layout


def test_language_rank_decodes_no_item_and_encoder_rank_tokenizes_no_sample(path: Path) -> None:
    encoder, language = (load(path, rank)[0] for rank in (0, 1))
    assert [len(m) for m in encoder.patches] == [6, 0, 8]
    assert not any(encoder.encoded)
    assert [len(m) for m in language.encoded] == [4, 4, 4]
    assert not any(language.patches)


def test_patches_wait_as_the_bytes_that_are_sent_also_where_there_are_none(path: Path) -> None:
    loaded, plan, dataset, _ = load(path, 0)
    form, reader = dataset.readers[0].processors["image"].wire, dataset.readers[0]
    gathered = gather_items(loaded, plan, dataset.readers, "vision", Coords(0, 0, 0, 0), form)
    assert [len(own.grids) for own in gathered] == [6, 0, 8]
    for m, own in enumerate(gathered):
        assert own.patches is not None
        numbers = plan.microbatches[m].samples.item.tolist()
        expected = [np.zeros((0, 3 * 14**2)), *(reader.patches(item) for item in numbers)]
        for (found, patches), bytes_of_item in zip(own.patches, expected, strict=True):
            assert found == form
            assert patches.dtype is torch.uint8
            np.testing.assert_array_equal(patches.numpy(), bytes_of_item)
