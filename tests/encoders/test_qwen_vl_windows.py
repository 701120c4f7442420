"""The tower with window attention computes what transformers' Qwen2.5-VL tower computes.

fp32 on a CPU, random weights in every parameter. Rows differ by at most 1e-5 (they are of order
one), gradients by 1e-5 of their largest element.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.vision_utils import get_vision_window_index

from data.modalities.processor import Part
from encoders import qwen_vl
from encoders._patches import WindowOrder, frame_lengths, patch_places
from tests import lone_module
from tests.conftest import RunRanks
from tests.encoders.test_qwen_vl import MERGE, OUTPUT_SIZE, PATCH_NUMBERS, patches_of, to_ours
from tests.encoders.test_qwen_vl import SETTINGS as FULL_SETTINGS
from tests.lone_module import TowerOptions
from tests.tower_reference import TowerReference

# Two layers of each kind, one of each in every half; windows of 2 × 2 rows.
SETTINGS: dict[str, Any] = FULL_SETTINGS | {
    "num_layers": 4,
    "window_size": 56,
    "full_attention_layers": (1, 2),
}
# Cut at both edges, at one, smaller than a window, several frames, even, and one size twice.
GRIDS = torch.tensor(
    [[1, 6, 10], [1, 2, 10], [1, 14, 2], [1, 2, 2], [2, 6, 6], [1, 8, 4], [1, 6, 10]]
)


@pytest.fixture(scope="module")
def reference() -> TowerReference:
    config = Qwen2_5_VLVisionConfig(
        depth=SETTINGS["num_layers"],
        hidden_size=SETTINGS["hidden_size"],
        intermediate_size=SETTINGS["ffn_hidden_size"],
        num_heads=SETTINGS["num_attention_heads"],
        patch_size=SETTINGS["patch_size"],
        spatial_merge_size=MERGE,
        out_hidden_size=OUTPUT_SIZE,
        window_size=SETTINGS["window_size"],
        fullatt_block_indexes=list(SETTINGS["full_attention_layers"]),
    )
    model = Qwen2_5_VisionTransformerPretrainedModel(config)
    lone_module.randomize(model, seed=0)

    def forward(patches: Tensor) -> Tensor:
        return model(patches, grid_thw=GRIDS).pooler_output

    to_our_depth = partial(to_ours, num_layers=SETTINGS["num_layers"])
    return TowerReference.of(model, forward, patches_of(GRIDS), to_our_depth)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (1, {"recompute": "full"}),
        (1, {"recompute": "selective"}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
        (4, {"tp": 2, "pp": 2, "recompute": "full"}),
    ],
    ids=["one rank", "recompute", "selective", "tp2", "pp2", "tp2 pp2 recompute"],
)
def test_rows_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, reference: TowerReference, ranks: int, options: dict[str, Any]
) -> None:
    results = run_ranks(
        lone_module.run_tower,
        ranks,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [(reference.patches, GRIDS)],
        reference.row_gradients,
        TowerOptions(**options),
    )
    last_stage = results[-options.get("tp", 1) :]
    assert all(len(result["rows"]) == 1 for result in last_stage)
    reference.check_rows([result["rows"][0] for result in last_stage])
    reference.check_gradients(results)


@pytest.mark.parametrize(
    ("tp", "options"),
    [(2, {}), (4, {}), (4, {"recompute": "full"})],
    ids=["tp2", "tp4", "tp4 recompute"],
)
def test_sequence_parallel_ranks_each_give_their_part_of_the_rows_and_all_gradients(
    run_ranks: RunRanks, reference: TowerReference, tp: int, options: dict[str, Any]
) -> None:
    num_rows = len(reference.rows)
    part = -(-num_rows // tp)
    assert num_rows % tp, "the last part must be padded"
    none = (torch.zeros(0, PATCH_NUMBERS), torch.zeros(0, 3, dtype=torch.int64))
    results = run_ranks(
        lone_module.run_tower,
        tp,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [none, (reference.patches, GRIDS)],
        reference.row_gradients,
        TowerOptions(tp=tp, sp=True, **options),
    )
    assert all(result["rows"][0].shape == (0, OUTPUT_SIZE) for result in results)
    assert all(result["rows"][1].shape == (part, OUTPUT_SIZE) for result in results)
    rows_per_item = tuple((GRIDS.prod(1) // MERGE**2).tolist())
    assert all(result["rows_per_item"] == [(), rows_per_item] for result in results)
    rows = torch.cat([result["rows"][1] for result in results])[:num_rows]
    reference.check_rows([rows])
    reference.check_gradients(results)


def test_no_images_give_no_rows_and_a_zero_gradient_to_every_parameter(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    none = (torch.zeros(0, PATCH_NUMBERS), torch.zeros(0, 3, dtype=torch.int64))
    (got,) = run_ranks(
        lone_module.run_tower,
        1,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [none],
        torch.zeros(0, OUTPUT_SIZE),
    )
    assert got["rows"][0].shape == (0, OUTPUT_SIZE)
    assert got["gradients"].keys() == reference.weights.keys()
    assert all((gradient == 0).all() for gradient in got["gradients"].values())


def test_a_layer_of_the_other_kind_gives_other_rows(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    for layers in ((1,), (0, 2), (1, 2, 3)):
        (got,) = run_ranks(
            lone_module.run_tower,
            1,
            SETTINGS | {"full_attention_layers": layers},
            OUTPUT_SIZE,
            reference.weights,
            [(reference.patches, GRIDS)],
        )
        assert (got["rows"][0] - reference.rows).abs().max() > 0.01


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
    order = WindowOrder.of(patch_places(grids, merge), frame_lengths(grids), merge, side)
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
    one, two = (large_to_small(full_attention_layers=layers) for layers in ((1,), (1, 2)))
    full = large_to_small(window_size=None, full_attention_layers=())
    assert num_patches < one < two < full < num_patches**2
