"""Qwen-Image's transformer (arXiv:2508.02324): tokens and condition are two streams.

The module is `QwenImageTransformer2DModel` of diffusers. Each block modulates both streams by the
time, and attends over the condition's rows and the image's tokens together. The autoencoder is
`AutoencoderKLQwenImage`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from data.modalities.images import MAX_ASPECT_RATIO
from generators import _shared
from mimo.config.bounds import Width
from mimo.families.flops import Product
from mimo.families.hf_config import Config
from mimo.families.keymap import Weight, plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_CLASS = "QwenImageTransformer2DModel"
PIPELINE = "QwenImagePipeline"
"""The class of diffusers for a whole folder."""
RECIPE_KEYS = {
    "condition": "prompt",
    "skipped_tokens": 34,
    "system_prompt": "Describe the image by detailing the color, shape, size, texture, quantity, "
    "text, spatial relationships of the objects and background:",
}
"""Recipe keys of a generator from a folder: the published model drops its template's tokens."""
_EMBED = "time_text_embed.timestep_embedder"
# Of each stream: its unit, projections before and after attention.
_STREAMS = {
    "img": ("image token", ("to_q", "to_k", "to_v"), "to_out.0"),
    "txt": ("condition row", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"),
}
_KEYS = {
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "in_channels": "in_channels",
    "condition_size": "joint_attention_dim",
    "axes_dims_rope": "axes_dims_rope",
}
_PLAIN = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")


class Settings(_shared.TransformerSettings):
    """Recipe keys under ``generators.<name>.model``. Sizes are numbers of elements or pixels."""

    ffn_hidden_size: Width = Field(default_factory=lambda data: 4 * data["hidden_size"])
    """Inner width of the MLP: always 4 · hidden_size."""

    @model_validator(mode="after")
    def _fixed_by_the_module(self) -> Settings:
        for key, value in {"ffn_hidden_size": 4 * self.hidden_size, "norm_eps": 1e-6}.items():
            if getattr(self, key) != value:
                raise ValueError(f"{key} {getattr(self, key)} must be {value}; leave it out")
        return self

    @property
    def most_rows(self) -> int:
        """Positions left for the condition, of 4,096, after half of the longest side."""
        tokens = self.max_pixels // self.token_pixels**2
        return max(4096 - int((tokens * MAX_ASPECT_RATIO) ** 0.5) // 2, 1)

    @property
    def kept_beside_linears(self) -> tuple[float, float]:
        return 7.1 * self.hidden_size, 4 * self.hidden_size

    @staticmethod
    def latent_format(config: Config) -> tuple[int, int]:
        return config["z_dim"], 2 ** len(config["temperal_downsample"])

    def products(self) -> list[Product]:
        size, inner = self.hidden_size, self.ffn_hidden_size
        products = [
            Product(f"{_EMBED}.linear_1.weight", "item", (size, _shared.TIME_CHANNELS)),
            Product(f"{_EMBED}.linear_2.weight", "item", (size, size)),
            Product("img_in.weight", "image token", (size, self.in_channels)),
            Product("txt_in.weight", "condition row", (size, self.condition_size)),
        ]
        for block in (f"transformer_blocks.{number}" for number in range(self.num_layers)):
            for stream, (per, inputs, _) in _STREAMS.items():
                products.append(Product(f"{block}.{stream}_mod.1.weight", "item", (6 * size, size)))
                products += [Product(f"{block}.attn.{k}.weight", per, (size, size)) for k in inputs]
            products.append(Product(None, "token pair", (2, size)))
            for stream, (per, _, output) in _STREAMS.items():
                mlp = f"{block}.{stream}_mlp.net"
                products += [
                    Product(f"{block}.attn.{output}.weight", per, (size, size)),
                    Product(f"{mlp}.0.proj.weight", per, (inner, size)),
                    Product(f"{mlp}.2.weight", per, (size, inner)),
                ]
        return [
            *products,
            Product("norm_out.linear.weight", "item", (2 * size, size)),
            Product("proj_out.weight", "image token", (self.in_channels, size)),
        ]


def weights(settings: Settings) -> list[Weight]:
    """Return every parameter, under its name in diffusers."""
    head = settings.hidden_size // settings.num_attention_heads
    weights = [*_shared.linear_weights(settings.products())]
    weights.append(plain("txt_norm.weight", "txt_norm.weight", settings.condition_size))
    for number in range(settings.num_layers):
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            name = f"transformer_blocks.{number}.attn.{norm}.weight"
            weights.append(plain(name, name, head))
    return weights


def build(settings: Settings) -> nn.Module:
    """Build diffusers' module."""
    return _shared.diffusers_class(_CLASS)(
        in_channels=settings.in_channels,
        out_channels=settings.in_channels // 4,
        num_layers=settings.num_layers,
        attention_head_dim=settings.hidden_size // settings.num_attention_heads,
        num_attention_heads=settings.num_attention_heads,
        joint_attention_dim=settings.condition_size,
        axes_dims_rope=settings.axes_dims_rope,
    )


def units(transformer: Any) -> list[nn.Module]:
    """Return its blocks in the order of a forward."""
    return [*transformer.transformer_blocks]


def predict(
    transformer: Any,
    tokens: Tensor,
    times: Tensor,
    condition: Tensor,
    lengths: Tensor,
    grid: tuple[int, int],
) -> Tensor:
    """Return the velocity, see `GeneratorFamily.predict`; the module's has the same sign."""
    condition = _shared.with_a_row(condition)
    # Without a mask more attention kernels apply.
    is_full = bool((lengths == condition.shape[1]).all())
    mask = None if is_full else _shared.condition_mask(condition, lengths)
    (velocity,) = transformer(
        hidden_states=tokens,
        timestep=times,
        encoder_hidden_states=condition,
        encoder_hidden_states_mask=mask,
        # All items have one size: the rotary embedding uses that of the first.
        img_shapes=[[(1, *grid)]] * len(tokens),
        return_dict=False,
    )
    return velocity


def settings_from_folder(folder: Path) -> dict[str, Any] | None:
    """Return settings by key of a folder in Qwen-Image's layout. Raises ValueError."""
    read = _shared.folder_settings(folder, _CLASS, _KEYS, **dict.fromkeys(_PLAIN, False))
    if read is None:
        return None
    settings, config = read
    if 4 * config["out_channels"] != config["in_channels"]:
        raise ValueError("transformer/config.json: out_channels must be a quarter of in_channels")
    return {**settings, "hidden_size": config["num_attention_heads"] * config["attention_head_dim"]}


def autoencoder(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> _shared.ScaledAutoencoder:
    """Open an `AutoencoderKLQwenImage`, frozen. Raises ValueError."""
    module = _shared.open_module("AutoencoderKLQwenImage", folder, device, dtype)
    mean, std = module.config["latents_mean"], module.config["latents_std"]
    return _shared.ScaledAutoencoder(module, mean, std, frames=(1,))
