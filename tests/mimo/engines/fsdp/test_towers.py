"""Towers of transformers, fed packed items: rows and gradients against the whole model's own call.

Letters: I items, P patches, C numbers of each, N rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mimo.device import send
from tests.cases import quick
from tests.mimo.engines.fsdp.language_cases import config_of, new_model

GRIDS = {
    "qwen2_5_vl": [(1, 4, 6), (2, 8, 4), (1, 2, 2), (1, 10, 12)],
    "qwen3_vl": [(1, 4, 6), (2, 8, 4), (1, 2, 2), (1, 10, 12)],
    "gemma3": [(1, 4, 4)] * 3,
}


QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 48}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": QWEN | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": QWEN
    | {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36},
    "gemma3": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "image_size": 40,
        "patch_size": 10,
    },
}


def drawn(kind: str) -> tuple[Any, Tensor, Tensor]:
    """A whole model with random weights, values (P, C) of all items in our order, and grids."""
    torch.manual_seed(3)
    config = config_of(kind, TOWERS[kind])
    model = new_model(config, "eager").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    grids = torch.tensor(GRIDS[kind])
    patch = config.vision_config.patch_size
    depth = 3 if kind == "gemma3" else 6
    num_patches = int(grids.prod(1).sum())
    return model, torch.randn(num_patches, depth * patch**2, dtype=torch.float64), grids


def images_of(values: Tensor, side: int, block: int, patch: int) -> Tensor:
    """Patches (P, C), those of a pooled block together -> whole images, patch by patch."""
    images = torch.empty(len(values) // side**2, 3, side * patch, side * patch, dtype=values.dtype)
    at = 0
    for image in images:
        for top in range(0, side, block):
            for left in range(0, side, block):
                for y in range(top, top + block):
                    for x in range(left, left + block):
                        pixels = values[at].view(3, patch, patch)
                        image[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch] = pixels
                        at += 1
    return images


def expected_rows(kind: str, model: Any, values: Tensor, grids: Tensor) -> Tensor:
    if kind == "gemma3":
        pixels = images_of(values, 4, 2, 10)
        return model.model.get_image_features(pixels).pooler_output.flatten(0, 1)
    rows = []
    for item, patches in zip(grids, values.split(grids.prod(1).tolist()), strict=True):
        made = model.model.visual(patches, grid_thw=item[None])
        rows.append(torch.cat((made.pooler_output, *(made.get("deepstack_features") or ())), -1))
    return torch.cat(rows)


def tower_of(
    kind: str, model: Any, mesh: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    from mimo.engines.fsdp.context import FsdpContext
    from mimo.engines.fsdp.sharding import materialise
    from mimo.engines.fsdp.towers import TOWERS

    ctx = FsdpContext(mesh, dtype, **options)
    tower = TOWERS[kind](model.config, ctx, lambda values, counts: (values, counts))
    materialise(tower, torch.device("cpu"))
    whole = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            parameter.copy_(whole[tower.hf_names[name]])
    return tower


def run_both(rank: int, kind: str, with_mesh: bool, recompute: str) -> dict[str, float]:
    """Errors of rows and of every gradient, relative to the largest number of each."""
    from torch.distributed.device_mesh import init_device_mesh

    model, values, grids = drawn(kind)
    mesh = None
    if with_mesh:
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=names)
    tower: Any = tower_of(kind, model, mesh, recompute=recompute)
    items = tower.prepare(grids, partial(send, device=torch.device("cpu")))
    expected = expected_rows(kind, model, values, grids)
    rows, counts = tower(values, items)
    assert counts == tuple(items.sizes)
    assert sum(counts) == len(rows)
    slope = torch.randn_like(expected)
    expected.backward(slope)
    rows.backward(slope)
    whole = dict(model.named_parameters())
    errors = {"rows": error(rows, expected)}
    for name, parameter in tower.named_parameters():
        wanted = whole[tower.hf_names[name]].grad
        assert wanted is not None, name
        assert parameter.grad is not None, name
        errors[name] = error(parameter.grad, wanted)
    return errors


def error(got: Tensor, expected: Tensor) -> float:
    return float(
        (got - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-9)
    )


@pytest.mark.parametrize("kind", quick(GRIDS, "qwen3_vl"))
def test_rows_and_gradients_are_those_of_the_whole_model(kind: str, run_ranks: Any) -> None:
    for with_mesh, recompute in ((False, "none"), (True, "selective"), (True, "full")):
        (errors,) = run_ranks(run_both, 1, kind, with_mesh, recompute)
        # The whole model's rotary frequencies were made in fp32. A key's bias has no gradient.
        wrong = {name: e for name, e in errors.items() if e > 1e-6 and "k_proj.bias" not in name}
        assert not wrong, (with_mesh, recompute, wrong)


def without_items(rank: int, kind: str) -> list[bool]:
    model, _, _ = drawn(kind)
    tower: nn.Module = tower_of(kind, model, None)
    rows, counts = tower(None, torch.zeros(0, 3, dtype=torch.int64))
    assert counts == ()
    assert len(rows) == 0
    rows.sum().backward()
    return [parameter.grad is not None for parameter in tower.parameters()]


# In `tests/mimo/model/test_fsdp_steps.py` lanes of each tower have no items.
@pytest.mark.parametrize("kind", quick(GRIDS, "qwen2_5_vl"))
def test_without_items_every_parameter_gets_a_gradient(kind: str, run_ranks: Any) -> None:
    (has_gradient,) = run_ranks(without_items, 1, kind)
    assert all(has_gradient)


def alone_in_bf16(rank: int, kind: str) -> tuple[set[torch.dtype], float]:
    """The dtypes of the plain module's weights and rows, and the error of rows."""
    model, values, grids = drawn(kind)
    tower = tower_of(kind, model, None, torch.bfloat16)
    with torch.no_grad():
        rows, _ = tower(values.bfloat16(), grids)
        expected = expected_rows(kind, model, values, grids)
    return {rows.dtype, *(p.dtype for p in tower.parameters())}, error(rows.double(), expected)


@pytest.mark.parametrize("kind", quick(GRIDS, "qwen3_vl"))
def test_the_plain_module_of_a_run_in_bf16_computes_in_bf16(kind: str, run_ranks: Any) -> None:
    ((dtypes, off),) = run_ranks(alone_in_bf16, 1, kind)
    assert dtypes == {torch.bfloat16}
    assert off < 0.1
