"""The language model computes what transformers' Gemma-3 text model with a head computes.

fp32 on a CPU, random weights in every parameter, packed segments against one call per segment.
Logits differ by at most 1e-5 (they are of order one), gradients by 1e-5 of their largest element.
Segments are longer than the window, and the embedding has padded rows: 100 tokens in 128 rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM

from mimo.families.languages import gemma3
from tests import lone_module
from tests.conftest import RunRanks
from tests.lone_module import Weights, noise

TOLERANCE = 1e-5

SETTINGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "ffn_hidden_size": 72,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_size": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    # Close together, so that layers with the other kind's base or factor would show.
    "local_rotary_base": 100.0,
    "rotary_base": 1_000.0,
    "rotary_factor": 3.0,
}
NUM_TOKENS = 100
NUM_ROWS = 128
# Segments longer and shorter than the window, two alike; the sum is even for two ranks.
LENGTHS = [23, 9, 1, 23, 14]


def text_config() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=SETTINGS["hidden_size"],
        intermediate_size=SETTINGS["ffn_hidden_size"],
        num_hidden_layers=SETTINGS["num_layers"],
        num_attention_heads=SETTINGS["num_attention_heads"],
        num_key_value_heads=SETTINGS["num_query_groups"],
        head_dim=SETTINGS["head_size"],
        query_pre_attn_scalar=SETTINGS["query_pre_attn_scalar"],
        sliding_window=SETTINGS["sliding_window"],
        layer_types=["sliding_attention", "full_attention"] * (SETTINGS["num_layers"] // 2),
        rope_parameters={
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": SETTINGS["local_rotary_base"],
            },
            "full_attention": {
                "rope_type": "linear",
                "factor": SETTINGS["rotary_factor"],
                "rope_theta": SETTINGS["rotary_base"],
            },
        },
        # transformers gives this row of the embedding no gradient; none of ours is special.
        pad_token_id=None,
    )


def randomize(model: nn.Module, seed: int) -> None:
    """As `lone_module.randomize`, with norm weights around 0."""
    lone_module.randomize(model, seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight") and "vision_tower" not in name:
                param.sub_(1)  # factors are 1 + weight


def to_ours(hf: Weights, padding: float) -> Weights:
    """Weights or gradients under our names and in our layout; padded rows hold ``padding``."""

    def padded(rows: Tensor) -> Tensor:
        return nn.functional.pad(rows, (0, 0, 0, NUM_ROWS - NUM_TOKENS), value=padding)

    ours = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    for n in range(SETTINGS["num_layers"]):
        there, here = f"model.layers.{n}", f"decoder.layers.{n}"
        qkv = [hf[f"{there}.self_attn.{which}_proj.weight"] for which in "qkv"]
        gate_up = [hf[f"{there}.mlp.{which}_proj.weight"] for which in ("gate", "up")]
        norms = {
            "input_layernorm": "input_layernorm",
            "self_attn_bda.norm": "post_attention_layernorm",
            "pre_mlp_layernorm": "pre_feedforward_layernorm",
            "mlp_bda.norm": "post_feedforward_layernorm",
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
        }
        ours |= {f"{here}.{a}.weight": hf[f"{there}.{b}.weight"] for a, b in norms.items()}
        ours |= {
            f"{here}.self_attention.linear_qkv.weight": lone_module.interleave_qkv(
                qkv, SETTINGS["num_query_groups"]
            ),
            f"{here}.self_attention.linear_proj.weight": hf[f"{there}.self_attn.o_proj.weight"],
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
def compute_reference() -> Reference:
    model = Gemma3ForCausalLM(text_config())
    randomize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, NUM_TOKENS, (sum(LENGTHS),), generator=generator)
    logits = torch.cat(
        [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(LENGTHS)]
    )
    logit_gradients = noise(2, *logits.shape)
    logits.backward(logit_gradients)
    return Reference(
        # A padded row that entered a result would show.
        weights=to_ours(dict(model.named_parameters()), padding=1e3),
        ids=ids,
        positions=torch.cat([torch.arange(n) for n in LENGTHS]).expand(3, -1).contiguous(),
        logit_gradients=logit_gradients,
        logits=logits.detach(),
        gradients=to_ours(lone_module.gradients(model), padding=0.0),
    )


def run(
    run_ranks: RunRanks,
    ranks: int,
    sp: bool,
    weights: Weights | None,
    logit_gradients: Tensor | None,
    settings: dict[str, Any] = SETTINGS,
) -> list[dict[str, Any]]:
    reference = compute_reference()
    return run_ranks(
        lone_module.run_language,
        ranks,
        settings,
        NUM_TOKENS,
        weights,
        reference.ids,
        reference.positions,
        LENGTHS,
        logit_gradients,
        ranks,
        sp,
        "gemma3",
    )


@pytest.mark.parametrize(
    ("ranks", "sp"), [(1, False), (2, False), (2, True)], ids=["one rank", "tp2", "tp2 with sp"]
)
def test_logits_and_every_gradient_equal_those_of_transformers_per_segment(
    run_ranks: RunRanks, ranks: int, sp: bool
) -> None:
    reference = compute_reference()
    results = run(run_ranks, ranks, sp, reference.weights, reference.logit_gradients)
    logits = torch.cat([part["logits"] for part in results], dim=1)
    assert logits.shape == (sum(LENGTHS), NUM_ROWS)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(logits[:, :NUM_TOKENS], reference.logits, rtol=0, atol=TOLERANCE)
    # Padded rows of the embedding are expected to be exactly zero in the reference.
    gradients = lone_module.join_gradients(results)
    error, name = lone_module.worst_error(gradients, reference.gradients)
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"


def test_fresh_weights_are_the_same_function_on_one_rank_and_on_two(run_ranks: RunRanks) -> None:
    settings = SETTINGS | {"init_std": 0.05}
    (one,) = run(run_ranks, 1, False, None, None, settings)
    two = run(run_ranks, 2, True, None, None, settings)
    for kind in ("logits", "embedded"):
        whole = torch.cat([part[kind] for part in two], dim=1)
        torch.testing.assert_close(whole, one["logits"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(one["embedded"], one["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [(5, {"sliding"}), (6, {"sliding", "global"}), (26, {"sliding", "global"})],
)
@given(st.integers(1, 8))
def test_a_scaled_down_copy_has_a_layer_of_every_kind_in_every_stage(
    layers: int, kinds: set[str], stages: int
) -> None:
    whole = gemma3.Settings.model_validate(SETTINGS | {"num_layers": layers} | PUBLISHED_PATTERN)
    small = whole.scaled_down(stages, tp=2)
    found = small.layer_kinds()
    per_stage = len(found) // stages
    for stage in range(stages):
        assert set(found[stage * per_stage : (stage + 1) * per_stage]) == kinds
    assert not list(small.grid_problems(2, stages))


PUBLISHED_PATTERN = {"sliding_window": 1024, "sliding_window_pattern": 6}


def test_five_layers_of_six_are_local() -> None:
    settings = gemma3.Settings.model_validate(SETTINGS | {"num_layers": 13} | PUBLISHED_PATTERN)
    globals_ = [n for n, kind in enumerate(settings.layer_kinds()) if kind == "global"]
    assert globals_ == [5, 11]
