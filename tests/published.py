"""Configurations and processors of published models, with the sizes that they have."""

from __future__ import annotations

from typing import Any

QWEN3_TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 5000000,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
QWEN3_VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "deepstack_visual_indexes": [8, 16, 24],
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 896,
    "vision_use_head": False,
}
GEMMA_TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "vocab_size": 262208,
}


def qwen3_vl(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "text_config": {
            **QWEN3_TEXT,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": ffn,
        },
        "vision_config": {**QWEN3_VISION, "out_hidden_size": hidden},
        "tie_word_embeddings": False,
    }


def qwen3_5(model_type: str, **text: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    of_all = {"head_dim": 256, "vocab_size": 248320, "full_attention_interval": 4}
    of_all |= {"model_type": f"{model_type}_text", "attn_output_gate": True}
    tower = {k: v for k, v in QWEN3_VISION.items() if k != "deepstack_visual_indexes"}
    tower |= {"model_type": model_type, "out_hidden_size": text["hidden_size"]}
    return {
        "model_type": model_type,
        "text_config": {**of_all, "rope_parameters": rope, **text},
        "vision_config": tower,
        "tie_word_embeddings": False,
    }


def gemma3(**text: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma3",
        "text_config": {**GEMMA_TEXT, **text},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 256,
    }


def qwen3_vl_moe(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    config = qwen3_vl(hidden, layers, heads, 3 * hidden)
    config["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    config["vision_config"]["model_type"] = "qwen3_vl_moe"
    return config | {"model_type": "qwen3_vl_moe"}


# By the folder that a recipe starts from; in the form of the published `config.json`.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "hidden_act": "silu",
        },
    },
    "Qwen3-VL-8B-Instruct": qwen3_vl(4096, 36, 32, 12288),
    "Qwen3-VL-32B-Instruct": qwen3_vl(5120, 64, 64, 25600),
    "Qwen3-VL-30B-A3B-Instruct": qwen3_vl_moe(2048, 48, 32, 768),
    "Qwen3.5-27B": qwen3_5(
        "qwen3_5",
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        intermediate_size=17408,
        linear_num_value_heads=48,
    ),
    "Qwen3.5-35B-A3B": qwen3_5(
        "qwen3_5_moe",
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "gemma-3-4b-it": gemma3(
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=10240,
        query_pre_attn_scalar=256,
    ),
    "gemma-3-27b-it": gemma3(
        hidden_size=5376,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        intermediate_size=21504,
        query_pre_attn_scalar=168,
    ),
}

_HALF = [0.5, 0.5, 0.5]
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 12845056},
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": _HALF,
        "image_std": _HALF,
    },
    "gemma3": {"size": {"height": 896, "width": 896}, "image_mean": _HALF, "image_std": _HALF},
}
PROCESSORS["qwen3_5"] = PROCESSORS["qwen3_vl"]


def merged(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """A tiny folder's file with the sizes of a large model; the ids of tokens stay."""
    return {
        **small,
        **{
            key: merged(small[key], value)
            if isinstance(value, dict) and isinstance(small.get(key), dict)
            else value
            for key, value in large.items()
        },
    }


# Of models that are built by transformers' own classes, by their `model_type`: the configuration
# and the processor. Gemma 4 has the sizes of Gemma 3 27B where its own are not known here.
TRANSFORMERS_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        qwen3_5(
            "qwen3_5",
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=16,
            num_key_value_heads=4,
            intermediate_size=12288,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8,
            tie_word_embeddings=False,
        ),
        {**PROCESSORS["qwen3_5"], "merge_size": 2, "temporal_patch_size": 2},
    ),
    "internvl": (
        {
            "text_config": {
                "model_type": "qwen3",
                "hidden_size": 4096,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 12288,
                "vocab_size": 151936,
                "layer_types": ["full_attention"] * 36,
                "max_window_layers": 36,
            },
            "tie_word_embeddings": False,
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": [448, 448],
                "patch_size": [14, 14],
                "attention_bias": True,
            },
        },
        {"image_processor": {"size": {"height": 448, "width": 448}}, "image_seq_length": 256},
    ),
    "gemma4": (
        {
            "audio_config": None,
            "text_config": {
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_hidden_layers": 60,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "global_head_dim": 512,
                "num_global_key_value_heads": 4,
                "attention_k_eq_v": True,
                "vocab_size": 262144,
                "hidden_size_per_layer_input": 0,
                "sliding_window": 1024,
                "final_logit_softcapping": 30.0,
                "use_bidirectional_attention": "vision",
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
                "per_layer_config": None,
            },
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": 72,
                "patch_size": 16,
                "position_embedding_size": 10240,
            },
        },
        {"image_processor": {"patch_size": 16, "max_soft_tokens": 280}, "image_seq_length": 280},
    ),
}
