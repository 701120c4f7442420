"""Key maps: our parameters as rows of theirs, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimo.checkpoint.hf.architectures import ARCHITECTURES
from mimo.checkpoint.hf.conversion import Conversion
from mimo.checkpoint.hf.initial import minimal_recipe
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.families.hf_config import read_config, read_processors
from mimo.families.keymap import Weight, fused_qkv, grouped_qkv, plain, stacked
from tests.mimo.checkpoint.hf import folders

SIZES = st.integers(1, 4)


def check_complete(weights: Sequence[Weight]) -> None:
    """Assert that every source is used by just one weight, and each of its rows once."""
    owners: dict[str, str] = {}
    for weight in weights:
        for source in weight.sources:
            owner = owners.setdefault(source.key, weight.name)
            assert owner == weight.name, f"{source.key} is part of {owner} and of {weight.name}"
            runs = sorted(r.start for r in weight.runs if r.source == source)
            counts = {r.start: r.count for r in weight.runs if r.source == source}
            position = 0
            for start in runs:
                assert start == position, f"rows of {source.key} are missing or used twice"
                position += counts[start]
            assert position == source.num_rows, f"{source.key}: {position} of {source.num_rows}"


@st.composite
def weights(draw: st.DrawFn) -> Weight:
    """One of any kind and size."""
    groups, per_group, head = draw(SIZES), draw(SIZES), draw(SIZES)
    columns = draw(st.sampled_from([(), (1,), (3,)]))
    kind = draw(st.sampled_from(["plain", "conv", "transposed", "stacked", "grouped", "fused"]))
    if kind == "plain":
        return plain("ours", "a", groups, *columns)
    if kind == "conv":
        return plain("ours", "a", groups, 3, per_group, head, head)
    if kind == "transposed":
        return plain("ours", "a", groups, head, transposed=True)
    if kind == "stacked":
        return stacked("ours", ["a", "b", "c"][: draw(st.integers(1, 3))], groups, *columns)
    if kind == "grouped":
        return grouped_qkv("ours", ("q", "k", "v"), groups, per_group, head, *columns)
    return fused_qkv("ours", "qkv", groups, head, *columns)


def numbered(weight: Weight) -> dict[str, torch.Tensor]:
    """Tensors of theirs in which every element differs from all others."""
    found, start = {}, 0
    for source in weight.sources:
        count = torch.Size(source.shape).numel()
        found[source.key] = torch.arange(start, start + count).reshape(source.shape)
        start += count
    return found


@given(weights())
def test_every_row_is_used_once_and_unpacking_undoes_packing(weight: Weight) -> None:
    check_complete([weight])
    theirs = numbered(weight)
    ours = weight.pack(theirs)
    assert len(ours) == weight.num_rows
    assert ours.unique().numel() == ours.numel() == sum(t.numel() for t in theirs.values())
    padded = torch.cat([ours, torch.full_like(ours[:1], -1)])  # a row that pads the vocabulary
    back = weight.unpack(padded)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in theirs.items())


@given(weights(), st.data())
def test_the_runs_of_a_stretch_of_rows_are_those_rows(weight: Weight, data: st.DataObject) -> None:
    theirs = numbered(weight)
    ours = weight.pack(theirs)
    first = data.draw(st.integers(0, len(ours)))
    last = data.draw(st.integers(first, len(ours) + 2))
    parts = [
        run.source.matrix(theirs[run.source.key])[run.start : run.start + run.count]
        for run in weight.rows(first, last)
    ]
    found = torch.cat(parts) if parts else ours[:0]
    assert torch.equal(found, ours[first:last])


def test_groups_of_queries_keys_and_values_lie_as_megatron_wants_them() -> None:
    weight = grouped_qkv("ours", ("q", "k", "v"), num_groups=2, queries_per_group=2, head_size=1)
    theirs = {
        "q": torch.tensor([10, 11, 12, 13]),
        "k": torch.tensor([20, 21]),
        "v": torch.tensor([30, 31]),
    }
    assert weight.pack(theirs).tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    fused = fused_qkv("ours", "qkv", num_heads=2, head_size=1)
    assert fused.pack({"qkv": torch.tensor([10, 11, 20, 21, 30, 31])}).tolist() == [
        *(10, 20, 30),
        *(11, 21, 31),
    ]


@pytest.mark.parametrize("family", folders.FAMILIES)
def test_the_key_map_covers_every_tensor_of_transformers(family: str, tmp_path: Path) -> None:
    folder = folders.make(family, tmp_path / "model")
    maps = ARCHITECTURES[family].weights_of(minimal_recipe(folder))
    every = [weight for own in maps.values() for weight in own]
    check_complete(every)
    written = WeightsFolder(folder).shapes
    conversion = Conversion.of_folder(folder, written)
    sources = {source.key: source for weight in every for source in weight.sources}
    for key, source in sources.items():
        assert conversion.shape(key) == source.shape, key
    assert sorted(disk for key in sources for disk in conversion.sources(key)) == sorted(written)


# What the models of transformers call it.
PROJECTORS = {
    "qwen2_5_vl": ("model.visual.merger.",),
    "qwen3_vl": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    "qwen3_5": ("model.visual.merger.",),
    "gemma3": ("model.multi_modal_projector.",),
}


@pytest.mark.parametrize("family", folders.FAMILIES)
def test_the_projector_is_that_of_the_checkpoint_with_its_norm(family: str, tmp_path: Path) -> None:
    folder = folders.make(family, tmp_path / "model")
    tower: Any = ARCHITECTURES[family].encoder_family()
    settings = tower.settings_from_hf(read_config(folder), read_processors(folder))
    weights = tower.weights_in_hf(tower.Settings(**settings), 128)
    ours = {w.name for w in weights if w.name.startswith(tower.PROJECTOR)}
    theirs = {w.name for w in weights if w.sources[0].key.startswith(PROJECTORS[family])}
    assert ours == theirs
    assert any("norm" in name for name in ours)
    assert len(ours) < len(weights)
