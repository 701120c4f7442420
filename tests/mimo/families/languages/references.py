"""Small language models of every family, with what transformers computes with the same weights.

fp32 on a CPU, random weights in every parameter; the vocabulary has padded rows throughout, 100
tokens in 128 rows. Letters: L tokens of a segment, T of all segments.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from data.batch import mrope_position_ids
from tests import lone_module
from tests.encoders.towers import randomize
from tests.lone_module import Weights, noise

TOLERANCE = 1e-5
NUM_TOKENS = 100
NUM_ROWS = 128
# Segments of unequal, equal and the smallest length, longer and shorter than Gemma's window; the
# sum is even for two ranks.
LENGTHS = [23, 9, 1, 23, 14]
# (offset, grid in rows) of the images in each segment.
IMAGES = [[(2, (1, 2, 3)), (12, (1, 3, 3))], [(0, (1, 1, 4))], [], [(5, (1, 4, 2))], []]

HYBRID = {
    "num_layers": 4,
    "mrope_section": (2, 1, 1),  # half of each head turns
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_size": 8,
    "linear_value_size": 12,
    "norm_eps": 0.01,
}
_SIZES: dict[str, Any] = {
    "ffn_hidden_size": 72,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_size": 16,
}
_EXPERTS = {
    "ffn_hidden_size": 24,
    "num_experts": 8,
    "experts_per_token": 3,
    "shared_expert_size": 40,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": _SIZES
    | {
        "num_layers": 3,
        "hidden_size": 48,
        "rotary_base": 10_000.0,
        "mrope_section": (4, 2, 2),
    },
    "qwen2_5": _SIZES
    | {
        "num_layers": 3,
        "hidden_size": 64,
        "rotary_base": 10_000.0,
        "mrope_section": (2, 3, 3),
        "norm_eps": 1e-6,
    },
    "qwen3_5": _SIZES
    | HYBRID
    | {
        "hidden_size": 48,
        "rotary_base": 10_000.0,
        "conv_width": 3,
    },
    "gemma3": _SIZES
    | {
        "num_layers": 4,
        "hidden_size": 48,
        "query_pre_attn_scalar": 20,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        # Close together, so that layers with the other kind's base or factor would show.
        "local_rotary_base": 100.0,
        "rotary_base": 1_000.0,
        "rotary_factor": 3.0,
    },
}
SETTINGS["qwen3_5_moe"] = SETTINGS["qwen3_5"] | _EXPERTS


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


def text_config(family: str) -> Any:
    """The configuration of transformers' text model."""
    settings = SETTINGS[family]
    sizes = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": settings["hidden_size"],
        "intermediate_size": settings["ffn_hidden_size"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": settings["num_attention_heads"],
        "num_key_value_heads": settings["num_query_groups"],
    }
    rope = {"rope_type": "default", "rope_theta": settings["rotary_base"]}
    if family == "gemma3":
        return Gemma3TextConfig(
            **sizes,
            head_dim=settings["head_size"],
            query_pre_attn_scalar=settings["query_pre_attn_scalar"],
            sliding_window=settings["sliding_window"],
            layer_types=["sliding_attention", "full_attention"] * (settings["num_layers"] // 2),
            rope_parameters={
                "sliding_attention": rope | {"rope_theta": settings["local_rotary_base"]},
                "full_attention": rope
                | {"rope_type": "linear", "factor": settings["rotary_factor"]},
            },
            # transformers gives this row of the embedding no gradient; none of ours is special.
            pad_token_id=None,
        )
    rope |= {"mrope_section": list(settings["mrope_section"])}
    if family.startswith("qwen3_5"):
        config = Qwen3_5TextConfig
        if family == "qwen3_5_moe":
            config, inner = Qwen3_5MoeTextConfig, sizes.pop("intermediate_size")
            sizes |= {"moe_intermediate_size": inner, "num_experts": settings["num_experts"]}
            sizes["num_experts_per_tok"] = settings["experts_per_token"]
            sizes["shared_expert_intermediate_size"] = settings["shared_expert_size"]
        return config(
            **sizes,
            head_dim=settings["head_size"],
            layer_types=["linear_attention", "full_attention"] * (settings["num_layers"] // 2),
            linear_num_key_heads=settings["linear_num_key_heads"],
            linear_num_value_heads=settings["linear_num_value_heads"],
            linear_key_head_dim=settings["linear_key_size"],
            linear_value_head_dim=settings["linear_value_size"],
            linear_conv_kernel_dim=settings["conv_width"],
            rms_norm_eps=settings["norm_eps"],
            rope_parameters=rope | {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
        )
    if family == "qwen2_5":
        return Qwen2_5_VLTextConfig(
            **sizes, rms_norm_eps=settings["norm_eps"], rope_parameters=rope
        )
    return Qwen3VLTextConfig(
        **sizes, head_dim=settings["head_size"], rope_parameters=rope | {"mrope_interleaved": True}
    )


class TextModelWithHead(nn.Module):
    """transformers' text model and the linear head that its conditional generation adds."""

    def __init__(self, family: str, tied: bool) -> None:
        super().__init__()
        models = {
            "qwen3": Qwen3VLTextModel,
            "qwen2_5": Qwen2_5_VLTextModel,
            "qwen3_5": Qwen3_5TextModel,
            "qwen3_5_moe": Qwen3_5MoeTextModel,
        }
        self.model: Any = models.get(family, Gemma3TextModel)(text_config(family))
        self.has_axes = family in models
        self.lm_head = nn.Linear(SETTINGS[family]["hidden_size"], NUM_TOKENS, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor, positions: Tensor, **levels: Any) -> Tensor:
        """ids (L,), positions (3, L) of one segment -> logits (L, NUM_TOKENS)."""
        places = positions[:, None] if self.has_axes else positions[:1]
        output = self.model(input_ids=ids[None], position_ids=places, use_cache=False, **levels)
        return self.lm_head(output.last_hidden_state)[0]


def soften(model: nn.Module) -> None:
    """Draw norms with factors 1 + weight around 1, smaller projections, and slower decays.

    Else states forget within two tokens, and transformers itself, compared with fp64, rounds by
    several times the tolerance.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name and not name.endswith("linear_attn.norm.weight"):
                param.sub_(1)
            elif "proj" in name:
                param.mul_(0.5)
            elif name.endswith("A_log"):
                param.sub_(2)


def to_ours(family: str, hf: Weights, padding: float) -> Weights:
    """Weights or gradients under our names, by the key map; padded rows hold ``padding``."""
    module: Any = importlib.import_module(f"mimo.families.languages.{family}")
    changes = {"vocab_size": NUM_TOKENS, "tie_word_embeddings": "lm_head.weight" not in hf}
    settings = module.Settings(**SETTINGS[family] | changes)
    named = {n.replace("model.", "model.language_model.", 1): t.detach() for n, t in hf.items()}
    ours = {weight.name: weight.pack(named) for weight in module.weights_in_hf(settings)}
    for name, rows in ours.items():
        if len(rows) == NUM_TOKENS:
            rows_of_padding = (0, 0, 0, NUM_ROWS - NUM_TOKENS)
            ours[name] = nn.functional.pad(rows, rows_of_padding, value=padding)
    return ours


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
def compute_reference(family: str, tied: bool, kind: str) -> Reference:
    """``kind``: a key of POSITIONS."""
    positions = POSITIONS[kind]()
    model = TextModelWithHead(family, tied)
    randomize(model, seed=0)
    if family.startswith("qwen3_5"):
        soften(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, NUM_TOKENS, (sum(LENGTHS),), generator=generator)
    segments = zip(ids.split(LENGTHS), positions.split(LENGTHS, dim=1), strict=True)
    logits = torch.cat([model(part, place) for part, place in segments])
    logit_gradients = noise(2, *logits.shape)
    logits.backward(logit_gradients)
    return Reference(
        # A padded row that entered a result would show.
        weights=to_ours(family, dict(model.named_parameters()), padding=1e3),
        ids=ids,
        positions=positions,
        logit_gradients=logit_gradients,
        logits=logits.detach(),
        gradients=to_ours(family, lone_module.gradients(model), padding=0.0),
    )
