"""What the towers share assumes no images: a tower of sounds is the same function on any grid.

Its stem is a convolution over time that halves the frames and looks at neighbours, so that it needs
whole items, also where a rank has a part of their tokens. Pairs of tokens make a row.

fp32 on a CPU, weights drawn alike in every layout. Rows and gradients of the layouts differ by at
most 1e-5 of their largest element.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mimo.device
from data.modalities.processor import Part
from encoders._tower import PackedItems, Tower, build_tower, gelu_stack
from mimo.engines import megatron as engine
from mimo.families.contracts import EncoderSettings
from mimo.families.registry import encoder_families
from mimo.families.wire import WirePatches
from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import TowerOptions, noise
from tests.mimo.families.test_contracts import settings_of
from tests.tower_reference import TOLERANCE

NUM_MELS = 6
OUTPUT_SIZE = 20
FRAMES_PER_ROW = 4
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 2,
    "init_std": 0.3,
}
# An odd number of rows; with two ranks the first one's part ends inside of the third item.
ROWS = (3, 1, 5, 2)
GRIDS = torch.tensor([[rows * FRAMES_PER_ROW, 1, 1] for rows in ROWS])


@dataclass(frozen=True, kw_only=True)
class Sounds(PackedItems):
    """frames: of each sound, blank ones included."""

    frames: list[int]


class SoundTower(Tower[Sounds]):
    """Frames (P, C) of sounds."""

    def __init__(
        self, settings: EncoderSettings, config: Any, ctx: engine.ModuleContext, output_size: int
    ) -> None:
        super().__init__(config, ctx, tokens_per_row=2)
        size = settings.hidden_size
        self.stem, self.projector = None, None
        if ctx.is_first_stage:
            self.stem = nn.Conv1d(NUM_MELS, size, 3, stride=2, padding=1, dtype=ctx.dtype)
            self.part.sum_gradients(self.stem)
        self.blocks = engine.build_stack(config, ctx)
        if ctx.is_last_stage:
            self.projector = nn.Linear(size, output_size, dtype=ctx.dtype)
            self.part.sum_gradients(self.projector)

    def blank_grid(self, num_rows: int) -> tuple[int, int, int]:
        return (num_rows * FRAMES_PER_ROW, 1, 1)

    def num_tokens(self, grids: Tensor) -> list[int]:
        return (grids[:, 0] // 2).tolist()

    def pack(self, grids: Tensor) -> Sounds:
        segments = engine.PackedSegments.from_lengths(self.num_tokens(grids), grids.device)
        return Sounds(segments=segments, frames=grids[:, 0].tolist())

    def embed(self, patches: Tensor, packed: Sounds) -> Tensor:
        assert self.stem is not None
        padded = nn.functional.pad(patches, (0, 0, 0, sum(packed.frames) - len(patches)))
        tokens = torch.cat([self.stem(item.T).T for item in padded.split(packed.frames)])
        return self.part.take(nn.functional.gelu(tokens), len(tokens))

    def project(self, hidden: list[Tensor], packed: Sounds) -> Tensor:
        assert self.projector is not None
        return self.projector(hidden[0].reshape(-1, 2, hidden[0].shape[-1]).mean(1))


class Settings(EncoderSettings):
    """What the tower reads; what a recipe needs besides is of no use here."""

    def scaled_down(self, chunks: int, tp: int) -> NoReturn:
        raise AssertionError

    def processor(self, media: str = "image") -> NoReturn:
        raise AssertionError

    def products(self, output_size: int) -> NoReturn:
        raise AssertionError

    def counts(self, grids: Any) -> NoReturn:
        raise AssertionError


build = partial(build_tower, SoundTower, gelu_stack)


def run(run_ranks: RunRanks, grids: Tensor, rows: Tensor, **options: Any) -> list[dict[str, Any]]:
    return run_ranks(
        lone_module.run_tower,
        options.get("tp", 1) * options.get("pp", 1),
        SETTINGS,
        OUTPUT_SIZE,
        None,
        [(noise(1, int(grids.prod(1).sum()), NUM_MELS), grids)],
        rows,
        TowerOptions(family=__name__, **options),
    )


@pytest.mark.parametrize(
    "options",
    [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"tp": 2, "sp": True, "pp": 2}],
    ids=["tp2", "sp", "pp2", "sp pp2"],
)
def test_a_tower_whose_stem_needs_whole_items_is_the_same_on_one_rank_and_on_others(
    run_ranks: RunRanks, options: dict[str, Any]
) -> None:
    row_gradients = noise(2, sum(ROWS), OUTPUT_SIZE)
    (one,) = run(run_ranks, GRIDS, row_gradients)
    assert one["rows_per_item"] == [ROWS]
    assert len(one["rows"][0]) == sum(ROWS)
    results = run(run_ranks, GRIDS, row_gradients, **options)
    last_stage = results[-options["tp"] :] if "tp" in options else results[-1:]
    assert all(result["rows_per_item"] == [ROWS] for result in last_stage)
    found = [result["rows"][0] for result in last_stage]
    if options.get("sp"):
        found = [torch.cat(found)[: sum(ROWS)]]
    for rows in found:
        torch.testing.assert_close(rows, one["rows"][0], rtol=0, atol=TOLERANCE)
    expected = lone_module.join_gradients([one]) | {"frames": one["patch_gradients"]}
    got = lone_module.join_gradients(results) | {"frames": results[0]["patch_gradients"]}
    error, name = lone_module.worst_error(got, expected)
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"


@pytest.mark.parametrize("options", [{}, {"tp": 2, "sp": True}], ids=["one rank", "sp"])
def test_no_items_give_no_rows_and_a_zero_gradient_to_every_parameter(
    run_ranks: RunRanks, options: dict[str, Any]
) -> None:
    none = torch.zeros(0, 3, dtype=torch.int64)
    for got in run(run_ranks, none, torch.zeros(0, OUTPUT_SIZE), **options):
        assert got["rows_per_item"] == [()]
        assert got["rows"][0].shape == (0, OUTPUT_SIZE)
        assert all((gradient == 0).all() for gradient in got["gradients"].values())


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
    [*((name, {}) for name in encoder_families()), ("qwen_vl", WINDOWS)],
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
