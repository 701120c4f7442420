"""The whole model, tower and language model, computes what transformers' Qwen3-VL computes.

fp32 on a CPU, random weights in every parameter, packed samples against one call per sample. So
the order of the levels, their places and the positions of the images are those of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from tests import lone_module
from tests.conftest import RunRanks
from tests.encoders import test_qwen3_vl as tower
from tests.lone_module import Weights, noise
from tests.mimo import tiny
from tests.mimo.families.languages import test_qwen3 as text

TOLERANCE = 1e-5
IMAGE_TOKEN = 99
# By sample: its tokens, and the offset and grid in patches of each image.
SAMPLES = [
    (23, [(2, (1, 4, 6)), (12, (1, 6, 6))]),
    (9, []),
    (14, [(0, (1, 2, 8))]),
]
GRIDS = torch.tensor([grid for _, images in SAMPLES for _, grid in images])


def num_rows(grid: tuple[int, int, int]) -> int:
    return int(np.prod(grid)) // tower.MERGE**2


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
    visual = {n.removeprefix("model.visual."): t for n, t in hf.items() if ".visual." in n}
    language = {n.replace("model.language_model", "model"): t for n, t in hf.items()}
    return {"vision": tower.to_ours(visual), "language": text.to_ours(language, padding)}


def compute_reference() -> Reference:
    config = Qwen3VLConfig(
        text_config=text.TextModelWithHead(tied=True).model.config.to_dict(),
        vision_config={
            "depth": tower.SETTINGS["num_layers"],
            "hidden_size": tower.SETTINGS["hidden_size"],
            "intermediate_size": tower.SETTINGS["ffn_hidden_size"],
            "num_heads": tower.SETTINGS["num_attention_heads"],
            "out_hidden_size": text.SETTINGS["hidden_size"],
            "num_position_embeddings": tower.SETTINGS["num_grid_per_side"] ** 2,
            "deepstack_visual_indexes": list(tower.SETTINGS["deepstack_visual_indexes"]),
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    lone_module.randomize(model, seed=0)
    patches = noise(1, int(GRIDS.prod(1).sum()), tower.PATCH_NUMBERS)
    split = iter(patches.split(GRIDS.prod(1).tolist()))
    generator = torch.Generator().manual_seed(1)
    ids, logits = [], []
    for length, images in SAMPLES:
        own = torch.randint(0, 90, (length,), generator=generator)
        for offset, grid in images:
            own[offset : offset + num_rows(grid)] = IMAGE_TOKEN
        given: dict[str, Any] = {}
        if images:
            given["pixel_values"] = torch.cat([next(split) for _ in images])
            given["image_grid_thw"] = torch.tensor([grid for _, grid in images])
        kinds = (own == IMAGE_TOKEN).int()[None]
        output = model(input_ids=own[None], mm_token_type_ids=kinds, use_cache=False, **given)
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
    data["language"]["model"] = {**text.SETTINGS, "tie_word_embeddings": True}
    data["encoders"]["vision"] |= {"family": "qwen3_vl", "model": tower.SETTINGS}
    local = LocalModel(type(recipe).model_validate(data), text.NUM_TOKENS, freeze=True)
    params: dict[str, Weights] = {}
    for name, module in local.model.modules.items():
        params[name] = dict(module.whole.requires_grad_(True).named_parameters())
        assert params[name].keys() == reference.weights[name].keys()
        with torch.no_grad():
            for key, param in params[name].items():
                param.copy_(reference.weights[name][key])
    samples, row_grids, places, start = [], [], [], 0
    for ids, (length, images) in zip(reference.ids, SAMPLES, strict=True):
        offsets = np.array([offset for offset, _ in images], np.int64)
        nothing = np.zeros(length, np.float32)
        samples.append(EncodedSample(ids.numpy(), ids.numpy(), nothing, offsets))
        row_grids.append([(t, h // tower.MERGE, w // tower.MERGE) for _, (t, h, w) in images])
        places += [start + o + np.arange(num_rows(grid)) for o, grid in images]
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
