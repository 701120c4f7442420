"""Lumina-Image 2.0's transformer (arXiv:2503.21758): condition and tokens are one sequence.

The module is `Lumina2Transformer2DModel` of diffusers. Separate blocks refine the condition and
the tokens before the joint blocks. Its time runs from noise at 0 to the image at 1, and its
velocity points there. The published model is conditioned on another layer than the last, so a
generator from a folder takes learned queries by default.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from generators import _shared
from mimo.config.bounds import Heads, Layers, Side
from mimo.families.flops import Product
from mimo.families.hf_config import Config
from mimo.families.keymap import Weight, plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_CLASS = "Lumina2Transformer2DModel"
PIPELINE = "Lumina2Pipeline"
RECIPE_KEYS: dict[str, Any] = {}
_TIME, _TEXT = "time_caption_embed.timestep_embedder", "time_caption_embed.caption_embedder"
_STACKS = {"context_refiner": "condition", "noise_refiner": "image", "layers": "token"}
_UNITS = {"condition": "condition row", "image": "image token", "token": "token"}
_NO_BIAS = (*("to_q", "to_k", "to_v", "to_out.0"), *(f"feed_forward.linear_{n}" for n in (1, 2, 3)))
_SAME = ("num_layers", "hidden_size", "num_attention_heads", "num_refiner_layers", "norm_eps")
_KEYS = {**{key: key for key in _SAME}, "num_query_groups": "num_kv_heads"}
_KEYS |= {"axes_dims_rope": "axes_dim_rope", "axes_lens": "axes_lens"}


class Settings(_shared.TransformerSettings):
    """Recipe keys under ``generators.<name>.model``. Sizes are numbers of elements or pixels."""

    num_query_groups: Heads
    """Key and value heads; query heads share them in equal groups."""
    num_refiner_layers: Layers = 2
    """Layers that refine the condition, and as many that refine the tokens."""
    axes_lens: Annotated[tuple[Side, Side, Side], Field(strict=False)] = (300, 512, 512)
    """Most positions of text, lines and columns; a condition has fewer rows than the first."""

    @model_validator(mode="after")
    def _heads_form_groups(self) -> Settings:
        if self.num_attention_heads % (groups := self.num_query_groups):
            raise ValueError(
                f"num_query_groups {groups} must divide num_attention_heads, which is "
                f"{self.num_attention_heads}"
            )
        return self

    @property
    def most_rows(self) -> int:
        return self.axes_lens[0] - 1

    @property
    def kept_beside_linears(self) -> tuple[float, float]:
        size, inner = self.hidden_size, self.ffn_hidden_size
        return 5 * size - inner, 11 * size + inner  # the gate is activated in fp32

    @staticmethod
    def latent_format(config: Config) -> tuple[int, int]:
        return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1)

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        groups = 2 if self.num_query_groups == self.num_attention_heads else 1
        sizes = {"num_query_groups": groups, "num_refiner_layers": 1}
        return super()._scaled_sizes(chunks, tp) | sizes

    def layers(self) -> list[tuple[str, str]]:
        """Return the name and the kind of each layer, in the order of a forward."""
        refiners = self.num_refiner_layers
        counts = {"context_refiner": refiners, "noise_refiner": refiners, "layers": self.num_layers}
        return [(f"{stack}.{n}", _STACKS[stack]) for stack in counts for n in range(counts[stack])]

    def products(self) -> list[Product]:
        size, inner, time = self.hidden_size, self.ffn_hidden_size, min(self.hidden_size, 1024)
        kv_size = size // self.num_attention_heads * self.num_query_groups
        products = [
            Product(f"{_TIME}.linear_1.weight", "item", (time, _shared.TIME_CHANNELS)),
            Product(f"{_TIME}.linear_2.weight", "item", (time, time)),
            Product(f"{_TEXT}.1.weight", "condition row", (size, self.condition_size)),
            Product("x_embedder.weight", "image token", (size, self.in_channels)),
        ]
        for layer, kind in self.layers():
            if kind != "condition":
                products.append(Product(f"{layer}.norm1.linear.weight", "item", (4 * size, time)))
            for name, rows in {"to_q": size, "to_k": kv_size, "to_v": kv_size}.items():
                products.append(Product(f"{layer}.attn.{name}.weight", _UNITS[kind], (rows, size)))
            products.append(Product(None, f"{kind} pair", (2, size)))
            after = {"attn.to_out.0": (size, size), "feed_forward.linear_2": (size, inner)}
            after |= {f"feed_forward.linear_{n}": (inner, size) for n in (1, 3)}
            for name, shape in after.items():
                products.append(Product(f"{layer}.{name}.weight", _UNITS[kind], shape))
        products.append(Product("norm_out.linear_1.weight", "item", (size, time)))
        return [*products, Product("norm_out.linear_2.weight", "token", (self.in_channels, size))]


def weights(settings: Settings) -> list[Weight]:
    """Return every parameter, under its name in diffusers."""
    size, head = settings.hidden_size, settings.hidden_size // settings.num_attention_heads
    norms = {f"{_TEXT}.0": settings.condition_size}
    for layer, kind in settings.layers():
        first = "norm1" if kind == "condition" else "norm1.norm"
        norms |= {f"{layer}.attn.{name}": head for name in ("norm_q", "norm_k")}
        norms |= {f"{layer}.{name}": size for name in (first, "norm2", "ffn_norm1", "ffn_norm2")}
    weights = _shared.linear_weights(settings.products(), without_bias=_NO_BIAS)
    return [*weights, *(plain(f"{n}.weight", f"{n}.weight", size) for n, size in norms.items())]


def build(settings: Settings) -> nn.Module:
    """Build diffusers' module."""
    return _shared.diffusers_class(_CLASS)(
        **{theirs: getattr(settings, ours) for ours, theirs in _KEYS.items()},
        in_channels=settings.in_channels // 4,
        cap_feat_dim=settings.condition_size,
        # The inner width is rounded up to the multiple.
        multiple_of=settings.ffn_hidden_size,
        ffn_dim_multiplier=settings.ffn_hidden_size / (4 * settings.hidden_size),
    )


def units(transformer: Any) -> list[nn.Module]:
    """Return its blocks in the order of a forward."""
    return [block for stack in _STACKS for block in transformer.get_submodule(stack).children()]


def predict(
    transformer: Any,
    tokens: Tensor,
    times: Tensor,
    condition: Tensor,
    lengths: Tensor,
    grid: tuple[int, int],
) -> Tensor:
    """Return the velocity, see `GeneratorFamily.predict`. Raises ValueError for too many positions.

    An item without a condition gets one row of zeros.
    """
    from mimo.families.flow import pack, unpack

    limits, sizes = transformer.config.axes_lens, (condition.shape[1] + 1, *grid)
    if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
        raise ValueError(f"condition and grid need {sizes} positions, but axes_lens is {limits}")
    condition = _shared.with_a_row(condition)
    has_value = _shared.condition_mask(condition, lengths)
    (velocity,) = transformer(
        hidden_states=unpack(tokens, grid),
        timestep=1 - times,
        encoder_hidden_states=condition.where(has_value[..., None], 0),
        encoder_attention_mask=_shared.condition_mask(condition, lengths.clamp(min=1)),
        return_dict=False,
    )
    return -pack(velocity)


def settings_from_folder(folder: Path) -> dict[str, Any] | None:
    """Return settings by key of a folder in Lumina's layout. Raises ValueError."""
    read = _shared.folder_settings(folder, _CLASS, _KEYS)
    if read is None:
        return None
    settings, config = read
    inner = int((config["ffn_dim_multiplier"] or 1) * 4 * config["hidden_size"])
    return {
        **settings,
        "ffn_hidden_size": -(-inner // config["multiple_of"]) * config["multiple_of"],
        "in_channels": 4 * config["in_channels"],
        "condition_size": config["cap_feat_dim"],
    }


def autoencoder(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> _shared.ScaledAutoencoder:
    """Open an `AutoencoderKL`, frozen. Raises ValueError."""
    module = _shared.open_module("AutoencoderKL", folder, device, dtype)
    mean, scale = module.config["shift_factor"] or 0.0, module.config["scaling_factor"]
    return _shared.ScaledAutoencoder(module, [mean], [1 / scale])
