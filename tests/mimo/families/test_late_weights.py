"""Weights may arrive after the update that made them: every family waits for them in time.

With `train.overlap_param_gather` the forward of each submodule first waits for the parameters that
it owns itself. A family that reads a parameter in the forward of another one would compute on
the old weights.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import RunRanks
from tests.lone_module import SEED, _context
from tests.mimo.families.test_contracts import ENCODERS, LANGUAGES, draw_items, settings_of

H = 32
DECODERS = [n for n, family in LANGUAGES.items() if "megatron" in family.Settings.engines]


def late(model: nn.Module) -> None:
    """Take all parameters away; a submodule gets its own back when its forward begins."""

    def arrive(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.copy_(whole[param])

    whole = {param: param.detach().clone() for param in model.parameters()}
    for module in model.modules():
        module.register_forward_pre_hook(arrive)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))


def run_tower(rank: int, name: str) -> tuple[Tensor, Tensor]:
    """Rows of an item before and after all parameters were away."""
    family = importlib.import_module(f"encoders.{name}")
    settings = settings_of(family).scaled_down(1, 1)
    tower = family.build(settings, _context(1, False), H, SEED)
    patches, grids = map(torch.from_numpy, draw_items(settings, 1))
    tower.set_input_tensor([None])
    before = tower(patches, grids).values.detach()
    late(tower)
    return before, tower(patches, grids).values.detach()


def run_language(rank: int, name: str) -> tuple[Tensor, Tensor]:
    """Losses of tokens before and after all parameters were away."""
    from mimo.engines.megatron import PackedSegments

    family = importlib.import_module(f"mimo.families.languages.{name}")
    settings = settings_of(family).scaled_down(1, 1)
    model = family.build(settings, _context(1, False), 16, 8, SEED)
    ids = torch.arange(8)[None]
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(8).expand(3, 1, 8),
        "labels": ids,
        "packed_seq_params": PackedSegments.from_lengths([8], ids.device),
    }
    before = model(**inputs).detach()
    late(model)
    return before, model(**inputs).detach()


@pytest.mark.parametrize("name", ENCODERS)
def test_a_tower_reads_parameters_in_their_owners_forward(run_ranks: RunRanks, name: str) -> None:
    ((before, after),) = run_ranks(run_tower, 1, name)
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", DECODERS)
def test_a_language_model_reads_parameters_likewise(run_ranks: RunRanks, name: str) -> None:
    ((before, after),) = run_ranks(run_language, 1, name)
    assert torch.equal(before, after)
