"""A training step of flow matching written with diffusers and transformers alone.

Letters: L tokens of a chat, S tokens of an image, C numbers of each, h and w its sides in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Picture:
    """An image to draw.

    pixels: (3, h, w) in -1..1. time: 0 for the image, 1 for the noise. noise: (S, C) in the order
    of `QwenImagePipeline`. first, last: the tokens of the chat that are its condition, last
    excluded.
    """

    pixels: Tensor
    time: float
    noise: Tensor
    first: int
    last: int


@dataclass(frozen=True)
class Example:
    """A chat and its images. ids: (L,) int64. counted: (L,) bool, tokens in the text's loss."""

    ids: Tensor
    pictures: Sequence[Picture]
    counted: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """The losses of a step: text per token, image per image; gradients by module and name."""

    text: float
    image: float
    gradients: dict[str, dict[str, Tensor]]


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


def text_loss_of(example: Example, logits: Tensor) -> Tensor:
    """Return the sum of the counted tokens' losses. logits: (1, L, V)."""
    if example.counted is None or not example.counted.any():
        return logits.new_zeros(())
    labels = example.ids.where(example.counted, -100)[1:]
    return nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum")


def image_loss_of(models: Models, picture: Picture, states: Tensor) -> Tensor:
    """Return the mean squared error of the velocity of an image. states: (1, L, H)."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline

    dtype = models.transformer.dtype
    latents = latents_of(models, picture.pixels).to(dtype)
    channels, height, width = latents.shape[1:]
    image = QwenImagePipeline._pack_latents(latents, 1, channels, height, width)
    noise, time = picture.noise[None].to(dtype), picture.time
    velocity = models.transformer(
        hidden_states=(1 - time) * image + time * noise,
        timestep=torch.tensor([time], dtype=torch.float32),
        encoder_hidden_states=states[:, picture.first : picture.last],
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, height // 2, width // 2)]],
        return_dict=False,
    )[0]
    return (velocity - (noise - image)).square().mean()


def train_step(models: Models, examples: Sequence[Example], image_weight: float = 1.0) -> Step:
    """Run a step: the mean over text tokens plus the weighted mean over images.

    A parameter without a gradient has zeros.
    """
    parts: dict[str, nn.Module] = {
        "text_encoder": models.text_encoder,
        "transformer": models.transformer,
    }
    for part in parts.values():
        part.zero_grad()
    texts, images, num_tokens = list[Tensor](), list[Tensor](), 0
    for example in examples:
        output = models.text_encoder(input_ids=example.ids[None], output_hidden_states=True)
        texts.append(text_loss_of(example, output.logits))
        num_tokens += 0 if example.counted is None else int(example.counted[1:].sum())
        states = output.hidden_states[-1]
        images += [image_loss_of(models, picture, states) for picture in example.pictures]
    text, image = torch.stack(texts).sum() / max(num_tokens, 1), torch.stack(images).mean()
    (text + image_weight * image).backward()
    gradients = {
        part: {
            name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
            for name, param in module.named_parameters()
        }
        for part, module in parts.items()
    }
    return Step(text.item(), image.item(), gradients)
