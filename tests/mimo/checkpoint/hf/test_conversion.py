"""Tensors on disk and in memory, by transformers' own rules: against transformers itself.

Tiny random models of classes whose tensors are stored as in memory, under other names, or expert by
expert.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.hf.architectures import Architecture
from mimo.checkpoint.hf.conversion import Conversion
from mimo.checkpoint.hf.initial import HFCheckpoint
from mimo.checkpoint.hf.shrink import build
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.errors import RecipeError
from mimo.families.keymap import Weight, plain
from tests.mimo.checkpoint.hf import folders
from tests.mimo.model.tiny_classes import tiny_config

CLASSES = ("qwen3_5_moe", "qwen3_vl_moe", "llava", "gemma3", "internvl")


@pytest.fixture(scope="module", params=CLASSES)
def model_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers wrote."""
    return save(model_type, tmp_path_factory.mktemp("saved") / model_type)


def save(model_type: str, folder: Path) -> Path:
    build(tiny_config(model_type)).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText
    model, report = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    return model


def conversion_of(folder: Path) -> Conversion:
    conversion = Conversion.of_folder(folder, WeightsFolder(folder).shapes)
    assert conversion.problems == {}
    return pickle.loads(pickle.dumps(conversion))  # as rank 0 sends it


def general(model_type: str) -> Architecture:
    return Architecture(model_type, "transformers", "transformers")


def weights_of(model: Any) -> list[Weight]:
    return [plain(name, name, *parameter.shape) for name, parameter in model.named_parameters()]


def test_every_tensor_is_read_as_transformers_loads_it(folder: Path, model_type: str) -> None:
    tensors: dict[str, Tensor] = loaded(folder).state_dict()
    stored, conversion = WeightsFolder(folder), conversion_of(folder)
    for key, tensor in tensors.items():
        assert conversion.shape(key) == tuple(tensor.shape), key
        assert torch.equal(conversion.read(stored, key, slice(None)), tensor), key
    used = {disk for key in tensors for disk in conversion.sources(key)}
    assert used == set(stored.shapes)
    if "moe" not in model_type:
        return
    per_expert = any(".experts.0." in disk for disk in stored.shapes)
    assert per_expert == (model_type == "qwen3_5_moe")


def test_a_part_is_the_slice_of_the_whole(folder: Path, model_type: str) -> None:
    model = loaded(folder)
    checkpoint = HFCheckpoint(folder, general(model_type), {"language": weights_of(model)})
    for key, parameter in model.named_parameters():
        for rows in (slice(1, parameter.shape[0]), slice(0, 1), slice(1, 1)):
            columns = slice(1, 3)
            expected = parameter[rows, columns] if parameter.dim() == 2 else parameter[rows]
            assert torch.equal(checkpoint.part(key, rows, columns), expected), (key, rows)


def test_of_experts_only_the_needed_ones_are_read(tmp_path: Path) -> None:
    folder = save("qwen3_5_moe", tmp_path / "model")
    stored, conversion = WeightsFolder(folder), conversion_of(folder)
    key = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    conversion.read(stored, key, slice(2, 3))
    assert stored.bytes_read == 2 * 96 * 64 * 4


def test_what_is_written_has_the_names_and_bits_of_the_folder(folder: Path) -> None:
    names = [name for name, _ in loaded(folder).named_parameters()]
    stored, conversion = WeightsFolder(folder), conversion_of(folder)
    written = conversion.to_disk(
        {name: conversion.read(stored, name, slice(None)) for name in names}
    )
    original = folders.tensors(folder)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[disk], tensor) for disk, tensor in original.items())


def test_experts_that_were_published_transposed_are_written_transposed(tmp_path: Path) -> None:
    folder = save("qwen3_vl_moe", tmp_path / "model")
    in_memory = {name: x for name, x in loaded(folder).named_parameters() if ".experts." in name}
    folders.rewrite(
        folder,
        lambda tensors: {
            key: x.transpose(1, 2).contiguous() if ".experts." in key else x
            for key, x in tensors.items()
        },
    )
    stored, conversion, original = WeightsFolder(folder), conversion_of(folder), loaded(folder)
    assert len(in_memory) == 4
    for key, parameter in in_memory.items():
        assert torch.equal(original.get_parameter(key), parameter), "transformers reads both"
        assert torch.equal(conversion.read(stored, key, slice(1, 3)), parameter[1:3])
    written = conversion.to_disk(in_memory)
    assert all(torch.equal(x, stored.read(disk)) for disk, x in written.items())


@pytest.mark.parametrize("stored_head", ["head only", "both"])
def test_tied_parameters_may_be_stored_under_either_name(tmp_path: Path, stored_head: str) -> None:
    folder = save("gemma3", tmp_path / "model")
    embedding, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"

    def store_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[head] = tensors[embedding].clone()
        if stored_head != "both":
            del tensors[embedding]
        return tensors

    folders.rewrite(folder, store_head)
    weights = weights_of(loaded(save("gemma3", tmp_path / "same")))
    checkpoint = HFCheckpoint(folder, general("gemma3"), {"language": weights})
    key = "model.language_model.embed_tokens.weight"
    values = checkpoint.part(key, slice(0, 640), slice(0, 64))
    assert torch.equal(values, folders.tensors(folder)[head])
    written = checkpoint.conversion.to_disk({key: values})
    assert set(written) == ({embedding, head} if stored_head == "both" else {head})
    assert len({tensor.data_ptr() for tensor in written.values()}) == len(written)
    if stored_head == "both":
        folders.rewrite(folder, lambda tensors: tensors | {head: tensors[head] + 1})
        with pytest.raises(RecipeError, match=f"{head} is tied to {embedding}, but holds other"):
            HFCheckpoint(folder, general("gemma3"), {"language": weights})


def test_all_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    folder = save("qwen3_5_moe", tmp_path / "model")
    weights = weights_of(loaded(folder))
    layer = "model.language_model.layers.0"

    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.language_model.norm.weight"]
        del tensors[f"{layer}.mlp.experts.2.down_proj.weight"]
        up = f"{layer}.mlp.experts.1.up_proj.weight"
        gate = f"{layer}.mlp.gate.weight"
        return tensors | {up: tensors[up][:-1].clone(), gate: tensors[gate].to(torch.int64)}

    folders.rewrite(folder, damage)
    with pytest.raises(RecipeError) as raised:
        HFCheckpoint(folder, general("qwen3_5_moe"), {"language": weights})
    text = "\n".join(raised.value.problems)
    for part in (
        "model.language_model.norm.weight is missing",
        f"{layer}.mlp.experts.down_proj is [3, 64, 96], the configuration asks for [4, 64, 96]",
        f"{layer}.mlp.experts.gate_up_proj cannot be made of 8 tensors from ",
        "[95, 64], [96, 64]",
        f"{layer}.mlp.gate.weight is int64; only ",
    ):
        assert part in text, (part, text)


def test_tensors_that_transformers_ignores_are_left_to_the_export(tmp_path: Path) -> None:
    folder = save("internvl", tmp_path / "model")
    weights = weights_of(loaded(folder))
    folders.rewrite(folder, lambda tensors: tensors | {"mtp.norm.weight": torch.ones(3)})
    checkpoint = HFCheckpoint(folder, general("internvl"), {"language": weights})
    assert checkpoint.dtype == torch.float32
    assert not any(checkpoint.conversion.sources("mtp.norm.weight"))
