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


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_text_goes_on_one_past_the_largest_position_before_it(data: st.DataObject):
    side = st.integers(1, 4).map(lambda rows: rows * MERGE)
    grids = data.draw(st.lists(st.tuples(st.just(1), side, side), max_size=4))
    gaps = [data.draw(st.integers(1, 5)) for _ in range(len(grids) + 1)]
    length, offsets, _ = layout(gaps, grids)
    positions = mrope_position_ids([length], offsets, in_rows(grids))
    is_image = np.zeros(length, dtype=bool)
    for offset, (_, h, w) in zip(offsets, grids, strict=True):
        is_image[offset : offset + h * w // MERGE**2] = True
        assert positions[:, offset : offset + h * w // MERGE**2].min() == positions[0, offset]
    highest = -1
    for token in range(length):
        if not is_image[token]:
            assert (positions[:, token] == highest + 1).all()
        highest = max(highest, positions[:, token].max())


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


@pytest.mark.parametrize(
    ("lengths", "offsets", "grids", "reason"),
    [
        ([6, 10], [4], [(1, 2, 2)], r"item 0 covers the tokens 4\.\.7: need them between 0 .* 5"),
        ([6, 10], [6, 2], [(1, 1, 2)] * 2, r"item 1 covers the tokens 2\.\.3: need .* between 8"),
        ([20], [0, 3], [(1, 2, 2)] * 2, r"item 1 covers the tokens 3\.\.6: need them between 4"),
        ([5], [2], [(1, 2, 2)], r"item 0 covers the tokens 2\.\.5"),
        ([20], [0], [(0, 4, 4)], "need t, h and w of at least 1"),
        ([20], [0], [(1, 0, 4)], "need t, h and w of at least 1"),
        ([20], [0], [(1, 4, 0)], "need t, h and w of at least 1"),
        ([20], [0], [], "1 item offsets but 0 grids"),
    ],
)
def test_items_that_overlap_stick_out_or_have_no_rows_are_refused(
    lengths: list[int], offsets: list[int], grids: list[tuple[int, int, int]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        mrope_position_ids(lengths, offsets, grids)
