"""All host work of a tower's forward is done when its items are prepared."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mimo.device
from data.modalities.processor import Part
from mimo.families.wire import WirePatches
from tests import lone_module
from tests.conftest import RunRanks
from tests.mimo.families.test_contracts import ENCODERS, settings_of

OUTPUT_SIZE = 20
WINDOWS = {"window_size": 28, "full_attention_layers": (1,), "num_layers": 2}


def run_prepared(
    rank: int, name: str, given: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[int], list[str]]:
    """Rows and gradients of two items by values and grids, and of the same as sent and prepared,
    the number of copies, and what ``forward`` asked of the host in the second run.
    """
    family = importlib.import_module(f"encoders.{name}")
    settings = settings_of(family).model_copy(update=given).scaled_down(1, 1)
    tower = family.build(settings, lone_module._context(1, False), OUTPUT_SIZE, lone_module.SEED)
    processor, rng = settings.processor(), np.random.default_rng(0)
    parts, planned = [], []
    for _ in range(2):
        decoded = processor.decode(processor.random_file(rng))
        part = Part(processor.size_of(decoded))
        planned.append(processor.plan(part).grid)
        parts.append(processor.item_patches([decoded], part, 0))
    form, grids = processor.wire, torch.tensor(planned)
    values = torch.from_numpy(form.values(np.concatenate(parts)))
    sent = WirePatches.of([(form, torch.from_numpy(own)) for own in parts], torch.cat, torch.clone)
    tower.set_input_tensor([None])

    def forward_backward(patches: Any, items: Any) -> list[Tensor]:
        tower.zero_grad()
        rows = tower(patches, items).values
        rows.square().sum().backward()
        return [rows.detach(), *(param.grad.clone() for param in tower.parameters())]

    by_grids = forward_backward(values, grids)
    copies: list[int] = []
    prepared = tower.prepare(grids, lambda host: (copies.append(host.numel()), host.clone())[1])
    asked: list[str] = []
    _note_calls(asked, tower)
    return by_grids, forward_backward(sent, prepared), copies, asked


def _note_calls(asked: list[str], tower: Any) -> None:
    """Write down each call that plans or packs on the host, or copies to the device."""

    def noted(called: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return called(*args, **kwargs)

        return call

    from mimo.ops.attention_plan import LayerForm

    owners: list[tuple[Any, str]] = [(LayerForm, "plan"), (tower, "pack"), (tower, "prepare")]
    owners += [
        (module, name)
        for module in [*sys.modules.values()]
        for name in ("send", "send_together")
        if vars(module).get(name) is getattr(mimo.device, name) and module is not mimo.device
    ]
    owners += [(torch, name) for name in ("tensor", "arange", "from_numpy")]
    for owner, name in owners:
        setattr(owner, name, noted(getattr(owner, name), f"{name} of {owner}"))


@pytest.mark.parametrize(
    ("name", "given"),
    [*((name, {}) for name in ENCODERS), ("qwen_vl", WINDOWS)],
)
def test_a_forward_of_prepared_items_only_gives_the_device_work(
    run_ranks: RunRanks, name: str, given: dict[str, Any]
) -> None:
    ((by_grids, prepared, copies, asked),) = run_ranks(run_prepared, 1, name, given)
    assert asked == []
    assert len(copies) == 1
    assert copies[0] > 0
    for got, expected in zip(prepared, by_grids, strict=True):
        assert torch.equal(got, expected)
