"""Autoencoders give normalised latents, as diffusers' pipelines make and read them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generators.families import FAMILIES, settings_of

diffusers: Any = importlib.import_module("diffusers")

CHANNELS, DEVICE = 4, torch.device("cpu")


def save(family: str, folder: Path) -> Any:
    """Save a tiny autoencoder with random weights; return it."""
    torch.manual_seed(0)
    if family == "qwen_image":
        module = diffusers.AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.4],
            latents_std=[1.5, 0.7, 2.0, 1.1],
        )
    else:
        module = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(4, 4, 8, 8),
            latent_channels=CHANNELS,
            norm_num_groups=2,
            scaling_factor=0.36,
            shift_factor=0.12,
        )
    module.eval().save_pretrained(folder)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_and_images_are_those_of_the_pipelines_formulas(
    family: str, tmp_path: Path
) -> None:
    theirs = save(family, tmp_path)
    ours = settings_of(family)[0].autoencoder(tmp_path, DEVICE, torch.float32)
    images = torch.rand(2, 3, 32, 16) * 2 - 1
    config = theirs.config
    with torch.no_grad():
        if family == "qwen_image":
            mean = torch.tensor(config["latents_mean"]).view(1, CHANNELS, 1, 1, 1)
            std = torch.tensor(config["latents_std"]).view(1, CHANNELS, 1, 1, 1)
            frames = images.unsqueeze(2)
            latents = ((theirs.encode(frames).latent_dist.mode() - mean) / std).squeeze(2)
            decoded = theirs.decode(latents.unsqueeze(2) * std + mean).sample.squeeze(2)
        else:
            mode = theirs.encode(images).latent_dist.mode()
            latents = (mode - config["shift_factor"]) * config["scaling_factor"]
            original = latents / config["scaling_factor"] + config["shift_factor"]
            decoded = theirs.decode(original).sample
    assert latents.shape == (2, CHANNELS, 4, 2)
    torch.testing.assert_close(ours.encode(images), latents)
    torch.testing.assert_close(ours.decode(latents), decoded)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_frozen_and_what_it_gives_takes_part_in_training(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    ours = settings_of(family)[0].autoencoder(tmp_path, DEVICE, torch.bfloat16)
    assert not ours.module.training
    assert not any(param.requires_grad for param in ours.module.parameters())
    latents = ours.encode(torch.rand(1, 3, 16, 16))
    assert latents.dtype == torch.float32
    assert not latents.requires_grad
    scale = torch.ones((), requires_grad=True)
    (latents * scale).square().sum().backward()
    assert scale.grad is not None
    assert ours.decode(latents).dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_stands_for_two_by_two_latents(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    _, settings = settings_of(family, autoencoder=str(tmp_path), in_channels=4 * CHANNELS)
    assert settings.token_pixels == 16
    assert [*settings.problems(24)] == []
    _, settings = settings_of(family, autoencoder=str(tmp_path), in_channels=12)
    ((key, message),) = settings.problems(24)
    assert key == "in_channels"
    assert "with 4 channels it has 16 numbers" in message


def test_a_folder_without_an_autoencoder_is_refused(tmp_path: Path) -> None:
    for family in FAMILIES:
        with pytest.raises(ValueError, match="no AutoencoderKL.* can be loaded"):
            settings_of(family)[0].autoencoder(tmp_path, DEVICE, torch.float32)
