"""The language model computes what transformers' Qwen3-VL text model with a head computes.

fp32 on a CPU, random weights in every parameter, packed segments against one call per segment.
Logits differ by at most 1e-5 (they are of order one), gradients by 1e-5 of their largest element.
The embedding has padded rows throughout: 100 tokens in 128 rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from data.batch import mrope_position_ids
from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import Weights, noise

TOLERANCE = 1e-5

SETTINGS = {
    "num_layers": 3,
    "hidden_size": 48,
    "ffn_hidden_size": 72,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_size": 16,
    "rotary_base": 10_000.0,
    "mrope_section": (4, 2, 2),
}
NUM_TOKENS = 100
NUM_ROWS = 128
# Segments of unequal, equal and the smallest length; the sum is even for two ranks.
LENGTHS = [23, 9, 1, 23, 14]
# (offset, grid in rows) of the images in each segment.
IMAGES = [[(2, (1, 2, 3)), (12, (1, 3, 3))], [(0, (1, 1, 4))], [], [(5, (1, 4, 2))], []]


def text_positions() -> Tensor:
    """(3, T) int64: each segment counts from 0 on all three axes."""
    return torch.cat([torch.arange(n) for n in LENGTHS]).expand(3, -1).contiguous()


def image_positions() -> Tensor:
    """(3, T) int64: with blocks in which height and width positions count up on their own."""
    parts = [
        mrope_position_ids([n], [o for o, _ in images], [g for _, g in images])
        for n, images in zip(LENGTHS, IMAGES, strict=True)
    ]
    return torch.cat([torch.from_numpy(part) for part in parts], dim=1)


POSITIONS = {"text": text_positions, "images": image_positions}


class TextModelWithHead(nn.Module):
    """transformers' text model and the linear head that its conditional generation adds."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        config = Qwen3VLTextConfig(
            vocab_size=NUM_TOKENS,
            hidden_size=SETTINGS["hidden_size"],
            intermediate_size=SETTINGS["ffn_hidden_size"],
            num_hidden_layers=SETTINGS["num_layers"],
            num_attention_heads=SETTINGS["num_attention_heads"],
            num_key_value_heads=SETTINGS["num_query_groups"],
            head_dim=SETTINGS["head_size"],
            rope_parameters={
                "rope_type": "default",
                "rope_theta": SETTINGS["rotary_base"],
                "mrope_section": list(SETTINGS["mrope_section"]),
                "mrope_interleaved": True,
            },
        )
        self.model = Qwen3VLTextModel(config)
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
        qkv = [hf[f"{there}.self_attn.{which}_proj.weight"] for which in "qkv"]
        gate_up = [hf[f"{there}.mlp.{which}_proj.weight"] for which in ("gate", "up")]
        ours |= {
            f"{here}.input_layernorm.weight": hf[f"{there}.input_layernorm.weight"],
            f"{here}.self_attention.linear_qkv.weight": lone_module.interleave_qkv(
                qkv, SETTINGS["num_query_groups"]
            ),
            f"{here}.self_attention.q_layernorm.weight": hf[f"{there}.self_attn.q_norm.weight"],
            f"{here}.self_attention.k_layernorm.weight": hf[f"{there}.self_attn.k_norm.weight"],
            f"{here}.self_attention.linear_proj.weight": hf[f"{there}.self_attn.o_proj.weight"],
            f"{here}.pre_mlp_layernorm.weight": hf[f"{there}.post_attention_layernorm.weight"],
            f"{here}.mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{here}.mlp.linear_fc2.weight": hf[f"{there}.mlp.down_proj.weight"],
        }
    return {name: tensor.detach().contiguous() for name, tensor in ours.items()}


@dataclass(frozen=True)
class Reference:
    """What transformers computed segment by segment, under our names."""

    weights: Weights
    ids: Tensor
    positions: Tensor
    logit_gradients: Tensor
    logits: Tensor
    gradients: Weights


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


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_and_every_gradient_equal_those_of_transformers_per_segment(
    run_ranks: RunRanks, tied: bool, positions: str
) -> None:
    reference = compute_reference(tied, positions)
    (got,) = run_ranks(
        lone_module.run_language,
        1,
        SETTINGS | {"tie_word_embeddings": tied},
        NUM_TOKENS,
        reference.weights,
        reference.ids,
        reference.positions,
        LENGTHS,
        reference.logit_gradients,
    )
    assert got["logits"].shape == (sum(LENGTHS), NUM_ROWS)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(
        got["logits"][:, :NUM_TOKENS], reference.logits, rtol=0, atol=TOLERANCE
    )
    # Padded rows of embedding and head are expected to be exactly zero in the reference.
    error, name = lone_module.worst_error(got["gradients"], reference.gradients)
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"


def test_losses_are_those_of_the_tokens_without_the_padding_of_the_vocabulary(
    run_ranks: RunRanks,
) -> None:
    reference = compute_reference(True, "text")
    (got,) = run_ranks(
        lone_module.run_language,
        1,
        SETTINGS | {"tie_word_embeddings": True},
        NUM_TOKENS,
        reference.weights,
        reference.ids,
        reference.positions,
        LENGTHS,
    )
    # Padded rows of the head hold 1e3: their logits would outweigh every token's.
    assert (got["logits"][:, NUM_TOKENS:].abs() > 100).any()
    expected = nn.functional.cross_entropy(reference.logits, reference.ids, reduction="none")
    torch.testing.assert_close(got["losses"], expected, rtol=0, atol=TOLERANCE)


def test_image_positions_change_the_logits() -> None:
    text = compute_reference(True, "text")
    images = compute_reference(True, "images")
    assert (text.logits - images.logits).abs().max() > 0.1


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_ranks_with_sequence_parallel_match_one_from_token_ids_alone(
    run_ranks: RunRanks, tied: bool
) -> None:
    reference = compute_reference(tied, "images")
    arguments = (
        SETTINGS | {"tie_word_embeddings": tied},
        NUM_TOKENS,
        reference.weights,
        reference.ids,
        reference.positions,
        LENGTHS,
        None,
    )
    (one,) = run_ranks(lone_module.run_language, 1, *arguments)
    two = run_ranks(lone_module.run_language, 2, *arguments, 2, True)
    for kind in ("logits", "embedded"):
        assert all(part[kind].shape == (sum(LENGTHS), NUM_ROWS // 2) for part in two), kind
        whole = torch.cat([part[kind] for part in two], dim=1)[:, :NUM_TOKENS]
        torch.testing.assert_close(whole, reference.logits, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(
            one[kind][:, :NUM_TOKENS], reference.logits, rtol=0, atol=TOLERANCE
        )


def test_fresh_weights_are_the_same_function_on_one_rank_and_on_two(run_ranks: RunRanks) -> None:
    settings = SETTINGS | {"init_std": 0.05, "tie_word_embeddings": True}
    ids = torch.arange(sum(LENGTHS)) % NUM_TOKENS
    arguments = (settings, NUM_TOKENS, None, ids, image_positions(), LENGTHS, None)
    (one,) = run_ranks(lone_module.run_language, 1, *arguments)
    two = run_ranks(lone_module.run_language, 2, *arguments, 2, True)
    whole = torch.cat([part["logits"] for part in two], dim=1)
    torch.testing.assert_close(whole, one["logits"], rtol=0, atol=TOLERANCE)
    for part in two:
        assert part["losses"].shape == (sum(LENGTHS),)
        torch.testing.assert_close(part["losses"], one["losses"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("num_tokens", "rows"), [(64, 64), (65, 128), (100, 128)])
def test_vocabulary_is_padded_to_a_multiple(num_tokens: int, rows: int) -> None:
    from mimo.families.languages import qwen3

    assert qwen3.Settings(**SETTINGS).padded_vocab_size(num_tokens) == rows


@given(st.tuples(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64)), st.integers(4, 16))
def test_scaling_down_keeps_the_shares_of_the_rotary_axes(
    section: tuple[int, int, int], channels: int
) -> None:
    from mimo.families.languages._decoder import proportional

    scaled = proportional(section, channels)
    assert sum(scaled) == channels
    for before, after in zip(section, scaled, strict=True):
        assert (before > 0) == (after > 0)
        assert abs(after - before * channels / sum(section)) < 2
