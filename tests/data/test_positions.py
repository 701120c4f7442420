from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from data.batch import mrope_position_ids

MERGE = 2


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    text = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "spatial_merge_size": MERGE}
    if request.param == "qwen2_5":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        config = Qwen2_5_VLConfig(
            text_config=text | {"rope_scaling": rope}, vision_config=vision | {"window_size": 56}
        )
        return Qwen2_5_VLModel(config)
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return Qwen3VLModel(
        Qwen3VLConfig(
            text_config=text | {"head_dim": 16, "rope_scaling": rope},
            vision_config=vision | {"deepstack_visual_indexes": [0]},
        )
    )


def layout(
    gaps: list[int], grids: list[tuple[int, int, int]]
) -> tuple[int, list[int], torch.Tensor]:
    """Text of gaps[k] tokens before each image and after the last: length, offsets, token types."""
    types: list[int] = []
    offsets: list[int] = []
    for gap, (t, h, w) in zip(gaps, grids, strict=False):
        types += [0] * gap
        offsets.append(len(types))
        types += [1] * (t * h * w // MERGE**2)
    types += [0] * gaps[-1]
    return len(types), offsets, torch.tensor([types], dtype=torch.int32)


def in_rows(grids: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(t, h // MERGE, w // MERGE) for t, h, w in grids]


# Images of one sample are always apart: the template writes <|vision_end|><|vision_start|>.
CASES = [
    ([5], []),
    ([3, 4], [(1, 4, 6)]),
    ([0, 2, 1], [(1, 8, 2), (1, 2, 2)]),
    ([7, 1, 1, 9], [(1, 2, 10), (1, 10, 2), (1, 6, 6)]),
    ([2, 0], [(1, 2, 2)]),
]


@pytest.mark.parametrize(("gaps", "grids"), CASES)
def test_positions_equal_those_of_transformers(
    model: torch.nn.Module, gaps: list[int], grids: list[tuple[int, int, int]]
):
    length, offsets, types = layout(gaps, grids)
    grid_tensor = torch.tensor(grids) if grids else None
    expected, delta = model.get_rope_index(  # pyright: ignore[reportCallIssue]
        input_ids=torch.zeros(1, length, dtype=torch.long),
        mm_token_type_ids=types,
        image_grid_thw=grid_tensor,
    )
    positions = mrope_position_ids([length], offsets, in_rows(grids))
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert positions.max() + 1 == length + int(delta)


ITEMS = st.tuples(st.integers(0, 3), *[st.integers(1, 4)] * 3, st.sampled_from([0.5, 1.0, 2.3]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(ITEMS, max_size=3), st.integers(0, 4)), min_size=1, max_size=4))
def test_sequences_have_the_positions_that_each_has_alone(sequences: list) -> None:
    lengths, offsets, grids, steps, alone, start = [], [], [], [], [np.zeros((3, 0))], 0
    for items, rest in sequences:
        own, at = [], 0
        for gap, t, h, w, _ in items:
            own.append(at + gap)
            at += gap + t * h * w
        own_grids, own_steps = [item[1:4] for item in items], [item[4] for item in items]
        lengths.append(at + rest)
        alone.append(mrope_position_ids([at + rest], own, own_grids, own_steps))
        offsets += [start + offset for offset in own]
        grids, steps, start = grids + own_grids, steps + own_steps, start + at + rest
    together = mrope_position_ids(lengths, offsets, grids, steps)
    np.testing.assert_array_equal(together, np.concatenate(alone, axis=1))
