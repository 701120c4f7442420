"""The language model computes what transformers' Qwen2.5-VL text model with a head computes.

fp32 on a CPU, random weights in every parameter, packed segments against one call per segment.
Logits differ by at most 1e-5 (they are of order one), gradients by 1e-5 of their largest element.
The embedding has padded rows throughout: 100 tokens in 128 rows.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import Weights, noise
from tests.mimo.families.languages.test_qwen3 import (
    LENGTHS,
    NUM_ROWS,
    NUM_TOKENS,
    POSITIONS,
    TOLERANCE,
    Reference,
)

SETTINGS = {
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 72,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_size": 16,
    "rotary_base": 10_000.0,
    "mrope_section": (2, 3, 3),
    "norm_eps": 1e-6,
}


class TextModelWithHead(nn.Module):
    """transformers' text model and the linear head that its conditional generation adds."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        config = Qwen2_5_VLTextConfig(
            vocab_size=NUM_TOKENS,
            hidden_size=SETTINGS["hidden_size"],
            intermediate_size=SETTINGS["ffn_hidden_size"],
            num_hidden_layers=SETTINGS["num_layers"],
            num_attention_heads=SETTINGS["num_attention_heads"],
            num_key_value_heads=SETTINGS["num_query_groups"],
            rms_norm_eps=SETTINGS["norm_eps"],
            rope_parameters={
                "rope_type": "default",
                "rope_theta": SETTINGS["rotary_base"],
                "mrope_section": list(SETTINGS["mrope_section"]),
            },
        )
        self.model = Qwen2_5_VLTextModel(config)
        self.lm_head = nn.Linear(SETTINGS["hidden_size"], NUM_TOKENS, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids (L,), positions (3, L) of one segment -> logits (L, NUM_TOKENS)."""
        output = self.model(input_ids=ids[None], position_ids=positions[:, None], use_cache=False)
        return self.lm_head(output.last_hidden_state)[0]


def to_ours(hf: Weights, padding: float) -> Weights:
    """Weights or gradients under our names and in our layout; padded rows hold ``padding``."""

    def padded(rows: Tensor) -> Tensor:
        return nn.functional.pad(rows, (0, 0, 0, NUM_ROWS - NUM_TOKENS), value=padding)

    ours = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        ours["output_layer.weight"] = padded(hf["lm_head.weight"])
    for n in range(SETTINGS["num_layers"]):
        there, here = f"model.layers.{n}", f"decoder.layers.{n}"
        for kind in ("weight", "bias"):
            ours[f"{here}.self_attention.linear_qkv.{kind}"] = lone_module.interleave_qkv(
                [hf[f"{there}.self_attn.{which}_proj.{kind}"] for which in "qkv"],
                SETTINGS["num_query_groups"],
            )
        gate_up = [hf[f"{there}.mlp.{which}_proj.weight"] for which in ("gate", "up")]
        ours |= {
            f"{here}.input_layernorm.weight": hf[f"{there}.input_layernorm.weight"],
            f"{here}.self_attention.linear_proj.weight": hf[f"{there}.self_attn.o_proj.weight"],
            f"{here}.pre_mlp_layernorm.weight": hf[f"{there}.post_attention_layernorm.weight"],
            f"{here}.mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{here}.mlp.linear_fc2.weight": hf[f"{there}.mlp.down_proj.weight"],
        }
    return {name: tensor.detach().contiguous() for name, tensor in ours.items()}


@functools.cache
def compute_reference(tied: bool, kind: str) -> Reference:
    """``kind``: a key of POSITIONS."""
    positions = POSITIONS[kind]()
    model = TextModelWithHead(tied)
    lone_module.randomize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, NUM_TOKENS, (sum(LENGTHS),), generator=generator)
    segments = zip(ids.split(LENGTHS), positions.split(LENGTHS, dim=1), strict=True)
    logits = torch.cat([model(part, place) for part, place in segments])
    logit_gradients = noise(2, *logits.shape)
    logits.backward(logit_gradients)
    return Reference(
        # A padded row that entered a result would show.
        weights=to_ours(dict(model.named_parameters()), padding=1e3),
        ids=ids,
        positions=positions,
        logit_gradients=logit_gradients,
        logits=logits.detach(),
        gradients=to_ours(lone_module.gradients(model), padding=0.0),
    )


@pytest.mark.parametrize(
    ("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["one rank", "tp2", "tp2 sp"]
)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_and_every_gradient_equal_those_of_transformers_per_segment(
    run_ranks: RunRanks, tied: bool, positions: str, tp: int, sp: bool
) -> None:
    reference = compute_reference(tied, positions)
    results = run_ranks(
        lone_module.run_language,
        tp,
        SETTINGS | {"tie_word_embeddings": tied},
        NUM_TOKENS,
        reference.weights,
        reference.ids,
        reference.positions,
        LENGTHS,
        reference.logit_gradients,
        tp,
        sp,
        "qwen2_5",
    )
    logits = torch.cat([result["logits"] for result in results], dim=1)
    assert logits.shape == (sum(LENGTHS), NUM_ROWS)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(logits[:, :NUM_TOKENS], reference.logits, rtol=0, atol=TOLERANCE)
    # Padded rows of embedding and head are expected to be exactly zero in the reference.
    gradients = lone_module.join_gradients(results)
    error, name = lone_module.worst_error(gradients, reference.gradients)
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"


def test_blocks_of_rotary_channels_are_another_function_than_interleaved_ones() -> None:
    from mimo.engines.megatron import MRope, contiguous_axes, interleaved_axes

    blocks, interleaved = (
        MRope(axes(SETTINGS["mrope_section"]), 10_000.0)
        for axes in (contiguous_axes, interleaved_axes)
    )
    images, text = (POSITIONS[kind]()[:, None] for kind in ("images", "text"))
    torch.testing.assert_close(blocks(text), interleaved(text))
    assert (blocks(images) - interleaved(images)).abs().max() > 0.1
    time, height, width = images[:, 0].float()
    expected = torch.stack([time] * 2 + [height] * 3 + [width] * 3, dim=1) * blocks.inv_freq
    torch.testing.assert_close(blocks(images)[:, 0, 0, :8], expected)
