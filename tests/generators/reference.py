"""A training step of flow matching written with diffusers and transformers alone.

Letters: L tokens of a prompt, S tokens of an image, C numbers of each, h and w its sides in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Example:
    """A prompt and its image.

    ids: (L,) int64. pixels: (3, h, w) in -1..1. time: 0 for the image, 1 for the noise. noise:
    (S, C) in the order of `QwenImagePipeline`.
    """

    ids: Tensor
    pixels: Tensor
    time: float
    noise: Tensor


@dataclass(frozen=True)
class Models:
    """The models of a folder in Qwen-Image's layout."""

    text_encoder: Any
    transformer: Any
    vae: Any


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Models:
    """Load a folder; the autoencoder is frozen, in fp32."""
    import diffusers
    from transformers import AutoModelForImageTextToText

    kinds: Any = diffusers
    text = AutoModelForImageTextToText.from_pretrained(folder / "text_encoder", dtype=dtype)
    transformer = kinds.QwenImageTransformer2DModel.from_pretrained(
        folder / "transformer", torch_dtype=dtype
    )
    vae = kinds.AutoencoderKLQwenImage.from_pretrained(folder / "vae").requires_grad_(False)
    return Models(text.train(), transformer.train(), vae.eval())


def latents_of(models: Models, pixels: Tensor) -> Tensor:
    """Return the normalised mean of the latents' distribution (1, c, h', w')."""
    config = models.vae.config
    mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)
    latents = models.vae.encode(pixels[None, :, None].float()).latent_dist.mode()
    return ((latents - mean) / std)[:, :, 0]


def loss_of(models: Models, example: Example, skipped: int) -> Tensor:
    """Return the mean squared error of the velocity of one image."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline

    dtype = models.transformer.dtype
    latents = latents_of(models, example.pixels).to(dtype)
    channels, height, width = latents.shape[1:]
    image = QwenImagePipeline._pack_latents(latents, 1, channels, height, width)
    noise, time = example.noise[None].to(dtype), example.time
    states = models.text_encoder(input_ids=example.ids[None], output_hidden_states=True)
    velocity = models.transformer(
        hidden_states=(1 - time) * image + time * noise,
        timestep=torch.tensor([time], dtype=torch.float32),
        encoder_hidden_states=states.hidden_states[-1][:, skipped:],
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, height // 2, width // 2)]],
        return_dict=False,
    )[0]
    return (velocity - (noise - image)).square().mean()


def train_step(
    models: Models, examples: Sequence[Example], skipped: int = 0
) -> tuple[float, dict[str, dict[str, Tensor]]]:
    """Return the mean loss of the examples and all gradients, by module and name in its class.

    A parameter without one has zeros.
    """
    parts: dict[str, nn.Module] = {
        "text_encoder": models.text_encoder,
        "transformer": models.transformer,
    }
    for part in parts.values():
        part.zero_grad()
    loss = torch.stack([loss_of(models, example, skipped) for example in examples]).mean()
    loss.backward()
    gradients = {
        part: {
            name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
            for name, param in module.named_parameters()
        }
        for part, module in parts.items()
    }
    return loss.item(), gradients
