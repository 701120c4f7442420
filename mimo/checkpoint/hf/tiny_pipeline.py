"""The parts of a tiny folder of diffusers beside its text encoder, see `mimo.checkpoint.hf.tiny`.

As there, no number is the default of a class.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mimo.checkpoint.hf import pipelines

TEXT_ENCODERS = {"qwen_image": "qwen2_5_vl"}
"""The family of the text encoder of each."""
_TRANSFORMER: dict[str, Any] = {
    "in_channels": 20,
    "out_channels": 5,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "axes_dims_rope": (4, 6, 6),
}
_AUTOENCODER: dict[str, Any] = {
    "base_dim": 6,
    "z_dim": 5,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [0.1, -0.2, 0.05, 0.15, -0.1],
    "latents_std": [0.9, 0.7, 0.6, 1.1, 0.8],
}
_SCHEDULER: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.4,
    "max_shift": 0.8,
    "base_image_seq_len": 4,
    "max_image_seq_len": 64,
    "shift_terminal": 0.03,
}


def write_parts(
    folder: Path, hidden_size: int, seed: int, dtype: Any, draw: Callable[[Any], None]
) -> int:
    """Write transformer, autoencoder, scheduler and index; return the number of weights.

    The text encoder is in ``folder`` already. hidden_size: its width. draw: draws the weights of
    the transformer; the autoencoder keeps those of its class, with which images come through.
    """
    import diffusers
    import torch

    kinds: Any = diffusers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = kinds.QwenImageTransformer2DModel(
            **_TRANSFORMER, joint_attention_dim=hidden_size
        )
        autoencoder = kinds.AutoencoderKLQwenImage(**_AUTOENCODER)
    draw(transformer)
    parts = {pipelines.TRANSFORMER: transformer, pipelines.VAE: autoencoder}
    for name, part in parts.items():
        for param in part.parameters():
            param.data = param.data.to(dtype)
        part.save_pretrained(folder / name)
    scheduler = kinds.FlowMatchEulerDiscreteScheduler(**_SCHEDULER)
    scheduler.save_pretrained(folder / pipelines.SCHEDULER)
    pipelines.write_index(folder, "QwenImagePipeline")
    return sum(param.numel() for part in parts.values() for param in part.parameters())
