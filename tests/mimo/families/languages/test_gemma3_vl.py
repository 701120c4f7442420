"""The whole model, tower and language model, computes what transformers' Gemma-3 computes.

fp32 on a CPU, random weights in every parameter, packed samples against one call per sample. So
the order of pooled rows, plain positions and attention inside an image are those of transformers.
Images have more tokens than the sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForConditionalGeneration

from tests import lone_module
from tests.conftest import RunRanks
from tests.encoders import test_gemma3 as tower
from tests.lone_module import Weights, noise
from tests.mimo import tiny
from tests.mimo.families.languages import test_gemma3 as text

TOLERANCE = 1e-5
IMAGE_TOKEN = 99
ROWS = tower.ROWS
# By sample: its tokens, and the first token of each image.
SAMPLES = [(31, [2, 14]), (9, []), (14, [0]), (12, [3])]
NUM_IMAGES = sum(len(images) for _, images in SAMPLES)
GRIDS = torch.tensor([[1, tower.SIDE, tower.SIDE]] * NUM_IMAGES)


@dataclass(frozen=True)
class Reference:
    """What transformers computed sample by sample. weights, gradients: by module and our names."""

    ids: list[Tensor]
    patches: Tensor
    logit_gradients: Tensor
    logits: Tensor
    weights: dict[str, Weights]
    gradients: dict[str, Weights]


def to_ours(hf: Weights, padding: float) -> dict[str, Weights]:
    """By module, under our names and in our layout."""
    visual = {n.removeprefix("model."): t for n, t in hf.items()}
    language = {n.replace("model.language_model", "model"): t for n, t in hf.items()}
    return {"vision": tower.to_ours(visual), "language": text.to_ours(language, padding)}


def compute_reference() -> Reference:
    config = Gemma3Config(
        text_config=text.text_config().to_dict(),
        vision_config=tower.vision_config().to_dict(),
        mm_tokens_per_image=ROWS,
        image_token_index=IMAGE_TOKEN,
    )
    model = Gemma3ForConditionalGeneration(config)
    text.randomize(model, seed=0)
    patches = noise(1, NUM_IMAGES * tower.SIDE**2, tower.PATCH_NUMBERS)
    pixels = iter(tower.to_pixels(patches))
    generator = torch.Generator().manual_seed(1)
    ids, logits = [], []
    for length, images in SAMPLES:
        own = torch.randint(0, 90, (length,), generator=generator)
        for offset in images:
            own[offset : offset + ROWS] = IMAGE_TOKEN
        given: dict[str, Any] = {}
        if images:
            given["pixel_values"] = torch.stack([next(pixels) for _ in images])
        kinds = (own == IMAGE_TOKEN).long()[None]
        output = model(input_ids=own[None], token_type_ids=kinds, use_cache=False, **given)
        ids.append(own)
        logits.append(output.logits[0])
    joined = torch.cat(logits)
    logit_gradients = noise(2, *joined.shape)
    joined.backward(logit_gradients)
    return Reference(
        ids=ids,
        patches=patches,
        logit_gradients=logit_gradients,
        logits=joined.detach(),
        weights=to_ours(dict(model.named_parameters()), padding=1e3),
        gradients=to_ours(lone_module.gradients(model), padding=0.0),
    )


def run_ours(rank: int, path: Path, reference: Reference) -> dict[str, Any]:
    """Logits (T, tokens) and every gradient by module, all samples packed into one sequence."""
    from data.batch import pack_lane
    from data.text.chat import EncodedSample
    from mimo.checkpoint.hf.recipes import load_recipe
    from mimo.generate.one_rank import LocalModel

    recipe = load_recipe(path)
    data = recipe.model_dump()
    data["language"] |= {"family": "gemma3", "model": text.SETTINGS}
    data["encoders"]["vision"] |= {"family": "gemma3", "model": tower.SETTINGS}
    local = LocalModel(type(recipe).model_validate(data), text.NUM_TOKENS, freeze=True)
    params: dict[str, Weights] = {}
    for name, module in local.model.modules.items():
        params[name] = dict(module.whole.requires_grad_(True).named_parameters())
        assert params[name].keys() == reference.weights[name].keys()
        with torch.no_grad():
            for key, param in params[name].items():
                param.copy_(reference.weights[name][key])
    samples, row_grids, places, start = [], [], [], 0
    side = tower.SIDE // tower.MERGE
    for ids, (length, images) in zip(reference.ids, SAMPLES, strict=True):
        offsets = np.array(images, np.int64)
        nothing = np.zeros(length, np.float32)
        samples.append(EncodedSample(ids.numpy(), ids.numpy(), nothing, offsets))
        row_grids.append([(1, side, side)] * len(images))
        places += [start + offset + np.arange(ROWS) for offset in images]
        start += length
    lane = pack_lane(samples, row_grids, [0] * len(samples), start, 0)
    rows = local.encode("vision", reference.patches.numpy(), GRIDS.numpy())
    logits = local.forward(lane, [(rows, np.concatenate(places))], with_labels=False)[0]
    logits = logits[:, : text.NUM_TOKENS]
    logits.backward(reference.logit_gradients)
    gradients = {
        name: {key: param.grad for key, param in own.items()} for name, own in params.items()
    }
    return {"logits": logits.detach(), "gradients": gradients}


def test_logits_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert text.SETTINGS["sliding_window"] < ROWS, "the window must cut inside an image"
    reference = compute_reference()
    (got,) = run_ranks(run_ours, 1, tiny.write_recipe(tmp_path), reference)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(got["logits"], reference.logits, rtol=0, atol=TOLERANCE)
    flat = [
        {f"{module}.{name}": grad for module, own in grads.items() for name, grad in own.items()}
        for grads in (got["gradients"], reference.gradients)
    ]
    error, name = lone_module.worst_error(*flat)
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"
