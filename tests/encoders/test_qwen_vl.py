"""Windows of Qwen2.5-VL's tower are those of transformers; contradicting settings are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_window_index

from data.modalities.processor import Part
from encoders import qwen_vl
from encoders._patches import WindowOrder, patch_places
from tests.encoders.towers import QWEN2_5_VL_WINDOWS

SETTINGS: dict[str, Any] = QWEN2_5_VL_WINDOWS.settings


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4
    ),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_windows_and_their_order_are_those_of_transformers(
    frames_in_rows: list[tuple[int, int, int]], merge: int, side: int
) -> None:
    grids = torch.tensor([(t, h * merge, w * merge) for t, h, w in frames_in_rows])
    frames = [h * w for t, h, w in grids.tolist() for _ in range(t)]
    order = WindowOrder.of(patch_places(grids, merge), frames, merge, side)
    rows, bounds = get_vision_window_index(grids, merge, side * merge * 14, 14)
    assert order.rows.tolist() == rows.tolist()
    assert list(order.lengths) == bounds.diff().tolist()


@pytest.mark.parametrize("full", [(), (0,), (2, 5), tuple(range(6))])
@pytest.mark.parametrize(("stages", "tp"), [(1, 1), (2, 2), (3, 1)])
def test_scaling_down_keeps_both_kinds_of_layers_in_every_stage(
    full: tuple[int, ...], stages: int, tp: int
) -> None:
    settings = qwen_vl.Settings(**SETTINGS | {"num_layers": 6, "full_attention_layers": full})
    small = settings.scaled_down(stages, tp)
    assert qwen_vl.Settings(**small.model_dump()) == small
    kinds = small.layer_kinds()
    size = len(kinds) // stages
    for stage in range(stages):
        assert set(kinds[stage * size : (stage + 1) * size]) == set(settings.layer_kinds())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": 42}, r"window_size 42 must be a multiple of .* which is 28"),
        ({"window_size": None}, r"full_attention_layers \[1, 2\] need window_size"),
        ({"full_attention_layers": (4,)}, r"full_attention_layers \[4\] .* which is 3"),
        ({"full_attention_layers": (2, 1)}, r"full_attention_layers \[2, 1\] must be ascending"),
    ],
)
def test_windows_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qwen_vl.Settings.model_validate(SETTINGS | change)


def test_fewer_layers_with_full_attention_make_large_images_cheaper_beside_small_ones() -> None:
    def large_to_small(**change: Any) -> float:
        processor = qwen_vl.Settings.model_validate(SETTINGS | change).processor()
        return processor.plan(Part((1400, 560))).cost / processor.plan(Part((280, 112))).cost

    num_patches = 25  # times as many in the large image
    one_layer, two_layers = (large_to_small(full_attention_layers=n) for n in ((1,), (1, 2)))
    full = large_to_small(window_size=None, full_attention_layers=())
    assert num_patches < one_layer < two_layers < full < num_patches**2
