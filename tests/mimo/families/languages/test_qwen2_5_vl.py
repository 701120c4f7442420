"""The whole model, tower and language model, computes what transformers' Qwen2.5-VL computes.

fp32 on a CPU, random weights in every parameter, packed samples against one call per sample. So
the order of rows behind window attention, their places and the positions of the images are those
of transformers, as are the pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data.modalities.processor import Part
from encoders import qwen_vl
from mimo.families.languages import qwen2_5
from tests import lone_module
from tests.conftest import RunRanks
from tests.encoders import test_qwen_vl as full_tower
from tests.encoders import test_qwen_vl_windows as tower
from tests.lone_module import Weights, noise
from tests.mimo import tiny
from tests.mimo.families.languages import test_qwen2_5 as text

TOLERANCE = 1e-5
IMAGE_TOKEN = 99
SETTINGS: dict[str, Any] = tower.SETTINGS | {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 20}
# By sample: its tokens, and the offset, width and height in pixels of each image.
SAMPLES = [
    (40, [(2, 140, 90), (21, 61, 170)]),
    (9, []),
    (14, [(0, 200, 33)]),
    (24, [(3, 28, 28), (5, 83, 141)]),
]
IMAGES = [(w, h) for _, images in SAMPLES for _, w, h in images]


def pictures() -> list[Image.Image]:
    """Noise of the images' sizes."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in IMAGES]


@dataclass(frozen=True)
class Reference:
    """What transformers computed sample by sample. weights, gradients: by module and our names.

    patches (P, C), grids (I, 3) in patches and positions (3, T): of transformers' own processor
    and model.
    """

    ids: list[Tensor]
    patches: Tensor
    grids: Tensor
    positions: Tensor
    logit_gradients: Tensor
    logits: Tensor
    weights: dict[str, Weights]
    gradients: dict[str, Weights]


def to_ours(hf: Weights, padding: float) -> dict[str, Weights]:
    """By module, under our names and in our layout."""
    visual = {n.removeprefix("model.visual."): t for n, t in hf.items() if ".visual." in n}
    language = {n.replace("model.language_model", "model"): t for n, t in hf.items()}
    depth = SETTINGS["num_layers"]
    return {
        "vision": full_tower.to_ours(visual, depth),
        "language": text.to_ours(language, padding),
    }


def build_reference_model() -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config=text.TextModelWithHead(tied=False).model.config.to_dict(),
        vision_config={
            "depth": SETTINGS["num_layers"],
            "hidden_size": SETTINGS["hidden_size"],
            "intermediate_size": SETTINGS["ffn_hidden_size"],
            "num_heads": SETTINGS["num_attention_heads"],
            "out_hidden_size": text.SETTINGS["hidden_size"],
            "window_size": SETTINGS["window_size"],
            "fullatt_block_indexes": list(SETTINGS["full_attention_layers"]),
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    lone_module.randomize(model, seed=0)
    return model


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = build_reference_model()
    processor = Qwen2VLImageProcessorPil(
        min_pixels=SETTINGS["min_pixels"], max_pixels=SETTINGS["max_pixels"]
    )
    found = processor(images=pictures(), return_tensors="pt")
    patches, grids = found["pixel_values"], found["image_grid_thw"]
    of_images = iter(zip(patches.split(grids.prod(1).tolist()), grids, strict=True))
    generator = torch.Generator().manual_seed(1)
    ids, logits, positions = [], [], []
    for length, images in SAMPLES:
        own = torch.randint(0, 90, (length,), generator=generator)
        taken = [next(of_images) for _ in images]
        for (offset, *_), (_, grid) in zip(images, taken, strict=True):
            own[offset : offset + int(grid.prod()) // tower.MERGE**2] = IMAGE_TOKEN
        kinds = (own == IMAGE_TOKEN).int()[None]
        given: dict[str, Any] = {}
        if images:
            given["pixel_values"] = torch.cat([one for one, _ in taken])
            given["image_grid_thw"] = torch.stack([grid for _, grid in taken])
        output = model(input_ids=own[None], mm_token_type_ids=kinds, use_cache=False, **given)
        found_positions, _ = cast("Any", model.model).get_rope_index(
            own[None], mm_token_type_ids=kinds, image_grid_thw=given.get("image_grid_thw")
        )
        ids.append(own)
        logits.append(output.logits[0])
        positions.append(found_positions[:, 0])
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
        weights=to_ours(dict(model.named_parameters()), padding=1e3),
        gradients=to_ours(lone_module.gradients(model), padding=0.0),
    )


def pack(reference: Reference) -> tuple[Any, np.ndarray]:
    """All samples as one lane, and the places (N,) of the rows in it."""
    from data.batch import pack_lane
    from data.text.chat import EncodedSample

    grids = iter((reference.grids // torch.tensor([1, tower.MERGE, tower.MERGE])).tolist())
    samples, row_grids, places, start = [], [], [], 0
    for ids, (length, images) in zip(reference.ids, SAMPLES, strict=True):
        offsets = np.array([offset for offset, *_ in images], np.int64)
        nothing = np.zeros(length, np.float32)
        samples.append(EncodedSample(ids.numpy(), ids.numpy(), nothing, offsets))
        row_grids.append([tuple(next(grids)) for _ in images])
        places += [
            start + o + np.arange(int(np.prod(grid)))
            for o, grid in zip(offsets, row_grids[-1], strict=True)
        ]
        start += length
    lane = pack_lane(samples, row_grids, [0] * len(samples), start, 0)
    return lane, np.concatenate(places)


def run_ours(rank: int, path: Path, reference: Reference) -> dict[str, Any]:
    """Logits (T, tokens) and every gradient by module, all samples packed into one sequence."""
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.generate.one_rank import LocalModel

    recipe = load_recipe(path)
    data = recipe.model_dump()
    data["language"] |= {
        "family": "qwen2_5",
        "model": {**text.SETTINGS, "tie_word_embeddings": False},
    }
    data["encoders"]["vision"] |= {"family": "qwen_vl", "model": SETTINGS}
    local = LocalModel(type(recipe).model_validate(data), text.NUM_TOKENS, freeze=True)
    params: dict[str, Weights] = {}
    for name, module in local.model.modules.items():
        params[name] = dict(module.whole.requires_grad_(True).named_parameters())
        assert params[name].keys() == reference.weights[name].keys()
        with torch.no_grad():
            for key, param in params[name].items():
                param.copy_(reference.weights[name][key])
    lane, places = pack(reference)
    rows = local.encode("vision", reference.patches.numpy(), reference.grids.numpy())
    logits = local.forward(lane, [(rows, places)], with_labels=False)[0]
    logits = logits[:, : text.NUM_TOKENS]
    logits.backward(reference.logit_gradients)
    gradients = {
        name: {key: param.grad for key, param in own.items()} for name, own in params.items()
    }
    return {"logits": logits.detach(), "gradients": gradients}


def test_logits_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, tmp_path: Path, reference: Reference
) -> None:
    (got,) = run_ranks(run_ours, 1, tiny.write_recipe(tmp_path), reference)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(got["logits"], reference.logits, rtol=0, atol=TOLERANCE)
    flat = [
        {f"{module}.{name}": grad for module, own in grads.items() for name, grad in own.items()}
        for grads in (got["gradients"], reference.gradients)
    ]
    error, name = lone_module.worst_error(*flat)
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"


def test_positions_of_packed_samples_are_those_of_transformers(reference: Reference) -> None:
    lane, _ = pack(reference)
    np.testing.assert_array_equal(lane.position_ids, reference.positions.numpy())


def test_pixels_and_grids_are_those_of_transformers(reference: Reference) -> None:
    processor = qwen_vl.Settings(**SETTINGS).processor()
    assert [processor.plan(Part(size)).grid for size in IMAGES] == [
        tuple(g) for g in reference.grids.tolist()
    ]
    patches = np.concatenate([processor.patches(image) for image in pictures()])
    np.testing.assert_array_equal(processor.wire.values(patches), reference.patches.numpy())
    in_rows = reference.grids[:, 1:] // tower.MERGE
    assert (in_rows % 2 == 1).any(dim=0).all(), "no image is odd along both edges"


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
