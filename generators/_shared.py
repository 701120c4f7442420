"""Shared parts of generator families: settings, checks, masks and autoencoders.

Letters: B items, T rows of each condition, H their size, c channels of latents, h and w in pixels.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from mimo.config.bounds import Channels
from mimo.errors import InputError
from mimo.families.contracts import GeneratorSettings
from mimo.families.flops import Product
from mimo.families.hf_config import Config, expect, read_json
from mimo.families.keymap import Weight, plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TIME_CHANNELS = 256
"""Width of the sines and cosines that embed a time."""


class TransformerSettings(GeneratorSettings):
    """Settings of a transformer that takes squares of 2 × 2 pixels or latents."""

    axes_dims_rope: Annotated[tuple[Channels, Channels, Channels], Field(strict=False)]
    """Channels of a head rotated by time or text, row and column: even, in sum the head's size."""

    @model_validator(mode="after")
    def _axes_make_a_head(self) -> Self:
        axes, heads = self.axes_dims_rope, self.num_attention_heads
        if sum(axes) * heads != self.hidden_size or any(size % 2 for size in axes):
            raise ValueError(
                f"axes_dims_rope {list(axes)} must be even and add up to hidden_size / "
                f"num_attention_heads = {self.hidden_size} / {heads}"
            )
        return self

    @property
    @abstractmethod
    def kept_beside_linears(self) -> tuple[float, float]:
        """Numbers of a token that a layer keeps, too: in the model's dtype, and in fp32."""

    @staticmethod
    @abstractmethod
    def latent_format(config: Config) -> tuple[int, int]:
        """Return the channels of latents, and the pixels along the side of one.

        config: the autoencoder's ``config.json``. Raises KeyError.
        """

    def _format(self) -> tuple[int, int]:
        path = Path(self.autoencoder or "") / "config.json"
        try:
            return self.latent_format(_autoencoder_config(path))
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}: {error} is missing or has another form") from error

    @property
    def token_pixels(self) -> int:
        return 2 if self.autoencoder is None else 2 * self._format()[1]

    def problems(self, hidden_size: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(hidden_size)
        _autoencoder_config.cache_clear()  # the folder may be gone since
        try:
            channels = 3 if self.autoencoder is None else self._format()[0]
        except InputError as error:
            yield "autoencoder", f"{error}; give the folder of an autoencoder, or null for pixels"
            return
        if self.in_channels != 4 * channels:
            yield (
                "in_channels",
                f"got {self.in_channels}, but a token is a square of 2 × 2, so with {channels} "
                f"channels it has {4 * channels} numbers",
            )

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Scale down to images of up to 16 tokens, without an autoencoder.

        There are two layers: parts of the last may have no gradient.
        """
        return {
            "num_layers": 2 * chunks,
            "hidden_size": 32,
            "ffn_hidden_size": 128,
            "num_attention_heads": 2,
            "axes_dims_rope": (4, 6, 6),
            "in_channels": 12 if self.autoencoder else self.in_channels,
            "condition_size": 32,
            "max_pixels": 16 * 2**2,
            "autoencoder": None,
        }

    def counts(self, grids: np.ndarray, condition_rows: np.ndarray) -> dict[str, float]:
        image, condition = grids.prod(1).astype(np.float64), condition_rows.astype(np.float64)
        per_item = {
            "item": np.ones(len(grids)),
            "image token": image,
            "condition row": condition,
            "token": image + condition,  # both in one sequence
            "image pair": image**2,
            "condition pair": condition**2,
            "token pair": (image + condition) ** 2,
        }
        return {unit: float(counts.sum()) for unit, counts in per_item.items()}


@functools.lru_cache(maxsize=8)  # every item asks for the size of a token
def _autoencoder_config(path: Path) -> Config:
    return read_json(path)


def folder_settings(
    folder: Path, class_name: str, keys: Mapping[str, str], **expected: object
) -> tuple[dict[str, Any], Config] | None:
    """Return settings of a folder of diffusers, and ``transformer/config.json``.

    None for a transformer of another class. keys: diffusers' by ours. expected: the only values
    of diffusers' keys that the family computes. Raises ValueError for others.
    """
    path = folder / "transformer" / "config.json"
    config = read_json(path)
    if config.get("_class_name") != class_name:
        return None
    expect(config, "transformer/config.json", patch_size=2, **expected)
    if missing := [key for key in keys.values() if key not in config]:
        raise ValueError(f"{path}: {', '.join(missing)} missing")
    settings = {ours: config[theirs] for ours, theirs in keys.items()}
    vae = folder / "vae"
    return settings | ({"autoencoder": str(vae)} if vae.is_dir() else {}), config


def linear_weights(products: Sequence[Product], without_bias: tuple[str, ...] = ()) -> list[Weight]:
    """Return the matrices of products and their biases, under their names in diffusers.

    without_bias: the last components of the names of linears that have none.
    """
    weights = []
    for product in products:
        if (name := product.parameter) is None:
            continue
        weights.append(plain(name, name, *product.shape))
        linear = name.removesuffix(".weight")
        if not linear.endswith(without_bias):
            weights.append(plain(f"{linear}.bias", f"{linear}.bias", product.shape[0]))
    return weights


def with_a_row(condition: Tensor) -> Tensor:
    """Add a masked row of zeros to a condition (B, 0, H): modules need at least one row."""
    from torch.nn.functional import pad  # recipes are read without it

    return condition if condition.shape[1] else pad(condition, (0, 0, 0, 1))


def condition_mask(condition: Tensor, lengths: Tensor) -> Tensor:
    """Return (B, T) bool, true in the first ``lengths`` (B,), on the host, rows of (B, T, H)."""
    import torch

    return (torch.arange(condition.shape[1]) < lengths[:, None]).to(condition.device)


def diffusers_class(name: str) -> Any:
    """Return a class of diffusers, which takes seconds to import."""
    return getattr(importlib.import_module("diffusers"), name)


def open_module(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a class of diffusers from its folder, frozen. Raises ValueError."""
    try:
        # Without `low_cpu_mem_usage`, which needs accelerate.
        module = diffusers_class(name).from_pretrained(
            str(folder), torch_dtype=dtype, local_files_only=True, low_cpu_mem_usage=False
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder}: no {name} can be loaded: {error}") from error
    return module.to(device).eval().requires_grad_(False)


class ScaledAutoencoder:
    """A frozen autoencoder of diffusers whose latents are normalised by channel.

    mean, std: of each of the c channels, or of all. frames: (1,) for an autoencoder of videos, for
    which an image is a video of one frame.
    """

    def __init__(
        self, module: Any, mean: list[float], std: list[float], frames: tuple[int, ...] = ()
    ) -> None:
        import torch

        self.module, self._frames = module, frames
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=module.device).view(-1, 1, 1)
            for values in (mean, std)
        )

    def encode(self, images: Tensor) -> Tensor:
        """images (B, 3, h, w) in -1..1 -> latents (B, c, h', w'), the mean, normalised, fp32."""
        import torch

        inputs = images.to(self.module.dtype).unflatten(1, (-1, *self._frames))
        # Not in inference mode: the latents take part in training.
        with torch.no_grad():
            latents = self.module.encode(inputs).latent_dist.mode()
        return (latents.flatten(1, 1 + len(self._frames)).float() - self._mean) / self._std

    def decode(self, latents: Tensor) -> Tensor:
        """latents (B, c, h', w') -> images (B, 3, h, w) in -1..1 but for rounding, fp32."""
        import torch

        scaled = (latents.float() * self._std + self._mean).to(self.module.dtype)
        with torch.no_grad():
            images = self.module.decode(scaled.unflatten(1, (-1, *self._frames))).sample
        return images.flatten(1, 1 + len(self._frames)).float()
