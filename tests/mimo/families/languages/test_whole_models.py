"""Whole models, tower and language model, compute what those of transformers compute.

fp32 on a CPU, random weights in every parameter, packed samples against one call per sample. So
the order of an image's embeddings, levels, windows, attention inside an image, their places and
the positions of the images are those of transformers. For Qwen2.5-VL so are the pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForConditionalGeneration
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from data.modalities.processor import Part
from encoders import qwen_vl
from mimo.families.languages import qwen2_5
from tests import lone_module
from tests.cases import quick
from tests.conftest import RunRanks
from tests.encoders import towers
from tests.encoders.towers import MERGE, Tower
from tests.lone_module import Weights, noise
from tests.mimo import tiny
from tests.mimo.families.languages import references as text
from tests.mimo.families.languages.references import SETTINGS, TOLERANCE, text_config

IMAGE_TOKEN = 99
_SPECIAL_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 98,
    "vision_start_token_id": 97,
    "vision_end_token_id": 96,
}
PIXELS: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 20}
# Width and height in pixels of Qwen2.5-VL's images, in the order of its samples.
PICTURE_SIZES = [(140, 90), (61, 170), (200, 33), (28, 28), (83, 141)]


@dataclass(frozen=True)
class Case:
    """A model and its samples.

    samples: by sample its tokens, and the offset of each image. images: patches (P, C) and grids
    (I, 3) in patches. inputs: patches and grids of a sample's images -> arguments of transformers.
    """

    language: str
    tower: Tower
    tied: bool
    samples: list[tuple[int, list[int]]]
    build: Callable[[], nn.Module]
    images: Callable[[], tuple[Tensor, Tensor]]
    inputs: Callable[[list[Tensor], Tensor], dict[str, Tensor]]
    kinds: str = "mm_token_type_ids"

    @property
    def has_axes(self) -> bool:
        return self.language != "gemma3"


def pictures() -> list[Image.Image]:
    """Noise of the images' sizes."""
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in PICTURE_SIZES
    ]


@functools.cache
def processed_pictures() -> tuple[Tensor, Tensor]:
    processor = Qwen2VLImageProcessorPil(**PIXELS)
    output = processor(images=pictures(), return_tensors="pt")
    return output["pixel_values"], output["image_grid_thw"]


def drawn(tower: Tower, grids: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    patches = noise(1, sum(int(np.prod(grid)) for grid in grids), tower.patch_numbers)
    return patches, torch.tensor(grids)


def qwen_inputs(patches: list[Tensor], grids: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}


def gemma3_inputs(patches: list[Tensor], grids: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": towers.gemma3_pixels(torch.cat(patches))}


def qwen_settings(family: str, tied: bool, vision: Any) -> dict[str, Any]:
    """The arguments of a whole model's configuration, with that of its tower."""
    return _SPECIAL_TOKENS | {
        "text_config": text_config(family).to_dict(),
        "vision_config": vision.to_dict() | {"out_hidden_size": SETTINGS[family]["hidden_size"]},
        "tie_word_embeddings": tied,
    }


def build_qwen2_5_vl() -> nn.Module:
    vision = towers.qwen2_5_vl_vision_config(towers.QWEN2_5_VL_WINDOWS.settings)
    config = Qwen2_5_VLConfig(**qwen_settings("qwen2_5", False, vision))
    return Qwen2_5_VLForConditionalGeneration(config)


def build_qwen3_vl() -> nn.Module:
    vision = towers.qwen3_vl_vision_config(towers.QWEN3_VL.settings)
    config = Qwen3VLConfig(**qwen_settings("qwen3", True, vision))
    return Qwen3VLForConditionalGeneration(config)


def build_gemma3() -> nn.Module:
    settings = towers.GEMMA3.settings
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text_config("gemma3").to_dict(),
            vision_config=towers.siglip_config(settings).to_dict(),
            mm_tokens_per_image=settings["mm_tokens_per_image"],
            image_token_index=IMAGE_TOKEN,
        )
    )


CASES = {
    "qwen2.5-vl": Case(
        "qwen2_5",
        towers.QWEN2_5_VL_WINDOWS,
        False,
        [(40, [2, 21]), (9, []), (14, [0]), (24, [3, 5])],
        build_qwen2_5_vl,
        processed_pictures,
        qwen_inputs,
    ),
    "qwen3-vl": Case(
        "qwen3",
        towers.QWEN3_VL,
        True,
        [(23, [2, 12]), (9, []), (14, [0])],
        build_qwen3_vl,
        lambda: drawn(towers.QWEN3_VL, [(1, 4, 6), (1, 6, 6), (1, 2, 8)]),
        qwen_inputs,
    ),
    "gemma3": Case(
        "gemma3",
        towers.GEMMA3,
        True,
        [(31, [2, 14]), (9, []), (14, [0]), (12, [3])],
        build_gemma3,
        lambda: drawn(towers.GEMMA3, [(1, 6, 6)] * 4),
        gemma3_inputs,
        kinds="token_type_ids",
    ),
}


@dataclass(frozen=True)
class Reference:
    """What transformers computed sample by sample. weights, gradients: by module and our names.

    patches (P, C), grids (I, 3) in patches, positions (3, T): of transformers' own model.
    """

    ids: list[Tensor]
    patches: Tensor
    grids: Tensor
    positions: Tensor
    logit_gradients: Tensor
    logits: Tensor
    weights: dict[str, Weights]
    gradients: dict[str, Weights]


def to_ours(case: Case, hf: Weights, padding: float) -> dict[str, Weights]:
    """By module, under our names and in our layout."""
    visual = {n.removeprefix(case.tower.prefix): t for n, t in hf.items()}
    language = {n.replace("model.language_model", "model"): t for n, t in hf.items()}
    return {
        "vision": case.tower.to_ours(visual, SETTINGS[case.language]["hidden_size"]),
        "language": text.to_ours(case.language, language, padding),
    }


@functools.cache
def compute_reference(name: str) -> Reference:
    case = CASES[name]
    model = case.build()
    towers.randomize(model, seed=0)
    patches, grids = case.images()
    images = iter(zip(patches.split(grids.prod(1).tolist()), grids, strict=True))
    generator = torch.Generator().manual_seed(1)
    ids, logits, positions = [], [], []
    for length, offsets in case.samples:
        tokens = torch.randint(0, 90, (length,), generator=generator)
        of_sample = [next(images) for _ in offsets]
        for offset, (_, grid) in zip(offsets, of_sample, strict=True):
            tokens[offset : offset + int(grid.prod()) // MERGE**2] = IMAGE_TOKEN
        kinds = (tokens == IMAGE_TOKEN).int()[None]
        inputs: dict[str, Tensor] = {}
        if of_sample:
            parts, grids_of_sample = zip(*of_sample, strict=True)
            inputs = case.inputs(list(parts), torch.stack(grids_of_sample))
        output = model(input_ids=tokens[None], use_cache=False, **{case.kinds: kinds}, **inputs)
        places = torch.arange(length).expand(3, -1)
        if case.has_axes:
            places = cast("Any", model.model).get_rope_index(
                tokens[None], mm_token_type_ids=kinds, image_grid_thw=inputs.get("image_grid_thw")
            )[0][:, 0]
        ids.append(tokens)
        logits.append(output.logits[0])
        positions.append(places)
    joined = torch.cat(logits)
    logit_gradients = noise(2, *joined.shape)
    joined.backward(logit_gradients)
    return Reference(
        ids=ids,
        patches=patches,
        grids=grids,
        positions=torch.cat(positions, dim=1),
        logit_gradients=logit_gradients,
        logits=joined.detach(),
        weights=to_ours(case, dict(model.named_parameters()), padding=1e3),
        gradients=to_ours(case, lone_module.gradients(model), padding=0.0),
    )


def pack(case: Case, reference: Reference) -> tuple[Any, np.ndarray]:
    """All samples as one lane, and the places (N,) of the embeddings in it."""
    from data.batch import pack_lane
    from data.text.chat import EncodedSample

    grids = iter((reference.grids // torch.tensor([1, MERGE, MERGE])).tolist())
    samples, grids_of_samples, places, start = [], [], [], 0
    for ids, (length, offsets) in zip(reference.ids, case.samples, strict=True):
        no_loss = np.zeros(length, np.float32)
        grids_of_samples.append([tuple(next(grids)) for _ in offsets])
        rows = np.array([np.prod(grid) for grid in grids_of_samples[-1]], int)
        sample = EncodedSample(ids.numpy(), ids.numpy(), no_loss, np.array(offsets, int), rows)
        samples.append(sample)
        places += [
            start + offset + np.arange(int(np.prod(grid)))
            for offset, grid in zip(offsets, grids_of_samples[-1], strict=True)
        ]
        start += length
    lane = pack_lane(samples, grids_of_samples, [0] * len(samples), start, 0)
    return lane, np.concatenate(places)


def run_ours(rank: int, path: Path, name: str, reference: Reference) -> dict[str, Any]:
    """Logits (T, tokens) and every gradient by module, all samples packed into one sequence."""
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.generate.one_rank import LocalModel

    case, recipe = CASES[name], load_recipe(path)
    data = recipe.model_dump()
    tied = {"tie_word_embeddings": case.tied} if case.has_axes else {}
    data["language"] |= {"family": case.language, "model": SETTINGS[case.language] | tied}
    pixels = PIXELS if case.language == "qwen2_5" else {}
    vision = {"family": case.tower.family, "model": case.tower.settings | pixels}
    data["encoders"]["vision"] |= vision
    local = LocalModel(type(recipe).model_validate(data), text.NUM_TOKENS)
    params: dict[str, Weights] = {}
    for module_name, module in local.model.modules.items():
        weights = reference.weights[module_name]
        params[module_name] = dict(module.whole.requires_grad_(True).named_parameters())
        assert params[module_name].keys() == weights.keys()
        with torch.no_grad():
            for key, param in params[module_name].items():
                param.copy_(weights[key])
    lane, places = pack(case, reference)
    embeddings = local.encode("vision", reference.patches.numpy(), reference.grids.numpy())
    logits = local.forward(lane, {"vision": (embeddings, places)}, with_labels=False)[0]
    logits = logits[:, : text.NUM_TOKENS]
    logits.backward(reference.logit_gradients)
    gradients = {
        module_name: {key: param.grad for key, param in of_module.items()}
        for module_name, of_module in params.items()
    }
    return {"logits": logits.detach(), "gradients": gradients}


def flat(gradients: dict[str, Weights]) -> Weights:
    return {f"{m}.{name}": g for m, of_module in gradients.items() for name, g in of_module.items()}


# `tests/mimo/check/test_parity.py` has quick ones of the others.
@pytest.mark.parametrize("name", quick(CASES, "qwen2.5-vl"))
def test_logits_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    reference = compute_reference(name)
    (result,) = run_ranks(run_ours, 1, tiny.write_recipe(tmp_path), name, reference)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(result["logits"], reference.logits, rtol=0, atol=TOLERANCE)
    error, worst = lone_module.worst_error(flat(result["gradients"]), flat(reference.gradients))
    assert error <= TOLERANCE, f"gradient of {worst}: error {error:.2e}"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_axes])
def test_positions_of_packed_samples_are_those_of_transformers(name: str) -> None:
    reference = compute_reference(name)
    lane, _ = pack(CASES[name], reference)
    np.testing.assert_array_equal(lane.position_ids, reference.positions.numpy())


def test_the_window_of_gemma3_cuts_inside_an_image() -> None:
    assert SETTINGS["gemma3"]["sliding_window"] < towers.GEMMA3.rows_per_image[0]


def test_pixels_and_grids_of_qwen2_5_vl_are_those_of_transformers() -> None:
    patches, grids = processed_pictures()
    processor = qwen_vl.Settings(**towers.QWEN2_5_VL.settings, **PIXELS).processor()
    assert [processor.plan(Part(size)).grid for size in PICTURE_SIZES] == [
        tuple(grid) for grid in grids.tolist()
    ]
    ours = np.concatenate([processor.patches(image) for image in pictures()])
    np.testing.assert_array_equal(processor.wire.values(ours), patches.numpy())
    assert (grids[:, 1:] // MERGE % 2 == 1).any(dim=0).all(), "no image is odd along both edges"


# Qwen2.5-VL's language models: layers, hidden, intermediate, heads, groups, tied embeddings; and
# the intermediate size of the tower, which is otherwise the same in all.
PUBLISHED = {
    "3B": (36, 2048, 11008, 16, 2, True, 3420),
    "7B": (28, 3584, 18944, 28, 4, False, 3420),
    "32B": (64, 5120, 27648, 40, 8, False, 3456),
    "72B": (80, 8192, 29568, 64, 8, False, 3456),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_settings_that_two_and_four_ranks_divide(name: str) -> None:
    layers, hidden, ffn, heads, groups, tied, tower_ffn = PUBLISHED[name]
    language = qwen2_5.Settings(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_size=128,
        mrope_section=(16, 24, 24),
        tie_word_embeddings=tied,
    )
    vision = qwen_vl.Settings(
        num_layers=32,
        hidden_size=1280,
        ffn_hidden_size=tower_ffn,
        num_attention_heads=16,
        window_size=112,
        full_attention_layers=(7, 15, 23, 31),
    )
    for tp in (2, 4):
        assert not list(language.grid_problems(tp, 4))
        assert not list(vision.grid_problems(tp, 4))
