"""The audio tower computes what transformers' Whisper encoder computes of clips of their length.

Whisper fills every clip up to one length; here its number of positions is each clip's own. fp32 on
a CPU, random weights in every parameter. Rows differ by at most 1e-5 (they are of order one),
gradients by 1e-5 of their largest element.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.whisper.configuration_whisper import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from transformers.models.whisper.modeling_whisper import sinusoids as their_sinusoids

from data.modalities.audio import AudioClips
from encoders import whisper
from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import TowerOptions, Weights, noise
from tests.tower_reference import TOLERANCE, TowerReference

SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_mel_bins": 10,
    "tokens_per_row": 3,
}
OUTPUT_SIZE = 40
ROWS = [4, 1, 7, 3, 2]
GRIDS = torch.tensor([[6 * rows, 1, 1] for rows in ROWS])


class EncoderWithProjector(nn.Module):
    """transformers' encoder, of which three positions at a time go through an MLP."""

    def __init__(self) -> None:
        super().__init__()
        size = SETTINGS["hidden_size"]
        config = WhisperConfig(
            num_mel_bins=SETTINGS["num_mel_bins"],
            d_model=size,
            encoder_layers=SETTINGS["num_layers"],
            encoder_attention_heads=SETTINGS["num_attention_heads"],
            encoder_ffn_dim=SETTINGS["ffn_hidden_size"],
        )
        self.encoder = WhisperEncoder(config)
        del self.encoder.embed_positions
        self.fc1, self.fc2 = nn.Linear(3 * size, 3 * size), nn.Linear(3 * size, OUTPUT_SIZE)

    def forward(self, frames: Tensor) -> Tensor:
        """frames (P, C) of all clips -> rows (N, H)."""
        rows = []
        for clip in frames.split(GRIDS[:, 0].tolist()):
            length = len(clip) // 2
            self.encoder.config.max_source_positions = length
            positions = their_sinusoids(length, SETTINGS["hidden_size"])
            self.encoder.embed_positions = nn.Embedding.from_pretrained(positions)
            hidden = self.encoder(clip.T[None]).last_hidden_state
            stacked = hidden.reshape(length // 3, -1)
            rows.append(self.fc2(nn.functional.gelu(self.fc1(stacked))))
        del self.encoder.embed_positions
        return torch.cat(rows)


def to_ours(hf: Weights) -> Weights:
    """Weights or gradients of transformers' modules under our names and in our layout."""
    ours: Weights = {}
    for kind in ("weight", "bias"):
        for fc in ("fc1", "fc2"):
            ours[f"projector.linear_{fc}.{kind}"] = hf[f"{fc}.{kind}"]
        for conv in ("conv1", "conv2"):
            ours[f"{conv}.{kind}"] = hf[f"encoder.{conv}.{kind}"]
        ours[f"blocks.final_layernorm.{kind}"] = hf[f"encoder.layer_norm.{kind}"]
        for n in range(SETTINGS["num_layers"]):
            there, here = f"encoder.layers.{n}", f"blocks.layers.{n}"
            ours[f"{here}.input_layernorm.{kind}"] = hf[f"{there}.self_attn_layer_norm.{kind}"]
            ours[f"{here}.pre_mlp_layernorm.{kind}"] = hf[f"{there}.final_layer_norm.{kind}"]
            for fc in ("fc1", "fc2"):
                ours[f"{here}.mlp.linear_{fc}.{kind}"] = hf[f"{there}.{fc}.{kind}"]
            attention, theirs = f"{here}.self_attention", f"{there}.self_attn"
            q, v = (hf[f"{theirs}.{which}_proj.{kind}"] for which in "qv")
            k = hf.get(f"{theirs}.k_proj.{kind}", torch.zeros_like(q))  # it has no bias
            ours[f"{attention}.linear_qkv.{kind}"] = lone_module.interleave_qkv(
                [q, k, v], SETTINGS["num_attention_heads"]
            )
            ours[f"{attention}.linear_proj.{kind}"] = hf[f"{theirs}.out_proj.{kind}"]
    return {name: tensor.detach().contiguous() for name, tensor in ours.items()}


@pytest.fixture(scope="module")
def reference() -> TowerReference:
    model = EncoderWithProjector()
    lone_module.randomize(model, seed=0)
    frames = noise(1, int(GRIDS[:, 0].sum()), SETTINGS["num_mel_bins"])
    return TowerReference.of(model, model, frames, to_ours)


def run(
    run_ranks: RunRanks, reference: TowerReference, ranks: int, backward: bool, **options: Any
) -> list[dict[str, Any]]:
    return run_ranks(
        lone_module.run_tower,
        ranks,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [(reference.patches, GRIDS)],
        reference.row_gradients if backward else None,
        TowerOptions(family="whisper", **options),
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (1, {"recompute": "full"}), (2, {"tp": 2}), (2, {"pp": 2})],
    ids=["one rank", "recompute", "tp2", "pp2"],
)
def test_rows_and_every_gradient_equal_those_of_transformers(
    run_ranks: RunRanks, reference: TowerReference, ranks: int, options: dict[str, Any]
) -> None:
    results = run(run_ranks, reference, ranks, True, **options)
    last_stage = results[-options.get("tp", 1) :]
    reference.check_rows([result["rows"][0] for result in last_stage])
    reference.check_gradients(results)


def test_sequence_parallel_ranks_have_their_part_of_rows_and_gradients(
    run_ranks: RunRanks, reference: TowerReference
) -> None:
    """The parts end inside a clip: convolutions need frames from beyond them."""
    assert sum(ROWS) % 2, "a blank row is needed"
    results = run(run_ranks, reference, 2, True, tp=2, sp=True)
    rows = torch.cat([result["rows"][0] for result in results])
    assert len(rows) == sum(ROWS) + 1
    torch.testing.assert_close(rows[:-1], reference.rows, rtol=0, atol=TOLERANCE)
    reference.check_gradients(results)


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {"tp": 2, "sp": True})])
def test_no_clips_give_no_rows_and_a_zero_gradient_to_every_parameter(
    run_ranks: RunRanks, reference: TowerReference, ranks: int, options: dict[str, Any]
) -> None:
    none = (torch.zeros(0, SETTINGS["num_mel_bins"]), torch.zeros(0, 3, dtype=torch.int64))
    results = run_ranks(
        lone_module.run_tower,
        ranks,
        SETTINGS,
        OUTPUT_SIZE,
        reference.weights,
        [none],
        torch.zeros(0, OUTPUT_SIZE),
        TowerOptions(family="whisper", **options),
    )
    assert all(result["rows"][0].shape == (0, OUTPUT_SIZE) for result in results)
    gradients = lone_module.join_gradients(results)
    assert gradients.keys() == reference.weights.keys()
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_settings_say_how_clips_become_rows_and_refuse_what_cannot_be() -> None:
    clips = whisper.Settings.model_validate({**SETTINGS, "max_seconds": 4.0}).processor()
    assert clips == AudioClips(num_mel_bins=10, tokens_per_row=3, max_seconds=4.0, tower_width=32)
    for key, value, problem in (
        ("hidden_size", 30, "must be even and a multiple of num_attention_heads"),
        ("max_seconds", 1000.0, "less than or equal to 300"),
    ):
        with pytest.raises(ValueError, match=problem):
            whisper.Settings.model_validate(SETTINGS | {key: value})
