"""Audio encoder of Whisper's kind with a projector.

Two convolutions turn log-mel frames into half as many tokens, and sinusoidal positions are added.
Pre-norm blocks with LayerNorm and a GELU MLP follow, with full attention inside a clip; then
`tokens_per_row` neighbours are stacked into a row. Clips keep their length, whereas Whisper pads
each to 30 s. Unlike Whisper's, our keys have a bias, which has no effect on attention.
Source: transformers `WhisperEncoder`; rows are stacked as in Ultravox and SLAM-LLM.

Letters: I clips, P frames of all clips, C mel bands, T = P/2 tokens, D tower hidden, N rows,
H language hidden. A prime marks this rank's part.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from data.modalities.audio import FRAMES_PER_TOKEN, AudioClips
from encoders._tower import PackedItems, Tower, both, build_tower, gelu_stack, mlp_products, row_mlp
from mimo.config.bounds import Epsilon, ItemSeconds, MelBins, Patches
from mimo.engines import megatron as engine
from mimo.families.contracts import EncoderSettings
from mimo.families.flops import Product
from mimo.families.keymap import Weight

PROJECTOR = ("projector.",)
"""Prefixes of the projector's weight names."""

_LONGEST_WAVE = 10_000.0  # tokens, over 2π, of the slowest position


class Settings(EncoderSettings):
    """Recipe keys under ``encoders.<name>.model``. Sizes are numbers of elements."""

    changeable_keys: ClassVar = EncoderSettings.changeable_keys | {"max_seconds"}

    num_mel_bins: MelBins = 80
    """Mel bands of the spectrogram."""
    tokens_per_row: Patches = 1
    """Tokens of 20 ms that are stacked into one embedding."""
    max_seconds: ItemSeconds = 30.0
    """Length of the longest accepted clip, in seconds."""
    norm_eps: Epsilon = 1e-5

    @model_validator(mode="after")
    def _sizes_fit(self) -> Settings:
        if self.hidden_size % self.num_attention_heads or self.hidden_size % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be even and a multiple of "
                f"num_attention_heads, {self.num_attention_heads}"
            )
        return self

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        return super()._scaled_sizes(chunks, tp) | {
            "num_mel_bins": min(self.num_mel_bins, 8),
            "tokens_per_row": min(self.tokens_per_row, 3),
            "init_std": 0.2,
        }

    def processor(self, modality: str = "audio") -> AudioClips:
        """Return the processor of clips; every modality is taken as clips."""
        return AudioClips(
            num_mel_bins=self.num_mel_bins,
            tokens_per_row=self.tokens_per_row,
            max_seconds=self.max_seconds,
            tower_width=self.hidden_size,
        )

    def products(self, output_size: int) -> list[Product]:
        size = self.hidden_size
        return [
            Product("conv1.weight", "frame", (size, 3 * self.num_mel_bins)),
            Product("conv2.weight", "token", (size, 3 * size)),
            *self.stack_products("token", gated=False),
            *mlp_products("projector", size * self.tokens_per_row, output_size),
        ]

    def counts(self, grids: np.ndarray) -> dict[str, float]:
        frames = np.prod(grids, axis=1)
        tokens = frames // FRAMES_PER_TOKEN
        return {
            "frame": float(frames.sum()),
            "token": float(tokens.sum()),
            "row": float(tokens.sum()) / self.tokens_per_row,
            "attention pair": float((tokens**2).sum()),
        }


def neighbours(lengths: Tensor, stride: int) -> Tensor:
    """Return the inputs of each output of a convolution over items of these ``lengths`` (I,).

    (outputs, 3), for a kernel of 3 and a padding of 1: numbers of inputs, counted over all items,
    and -1 beyond an item's ends.
    """
    outputs = lengths // stride
    item = torch.arange(len(lengths)).repeat_interleave(outputs)
    place = torch.arange(len(item)) - (outputs.cumsum(0) - outputs)[item]
    seen = place[:, None] * stride + torch.tensor([-1, 0, 1])
    is_inside = (seen >= 0) & (seen < lengths[item, None])
    return torch.where(is_inside, (lengths.cumsum(0) - lengths)[item, None] + seen, -1)


class ItemConvolution(nn.Conv1d):
    """A convolution with a kernel of 3 over packed items, and its GELU."""

    def forward(self, values: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        """Map values (n, C) to (m, D). seen: (m, 3), from `neighbours`."""
        padded = torch.cat((values, values.new_zeros(1, values.shape[1])))  # -1 picks this last one
        inputs = padded[seen].flatten(1)
        weight = self.weight.transpose(1, 2).flatten(1)
        return nn.functional.gelu(nn.functional.linear(inputs, weight, self.bias))


def sinusoids(places: Tensor, size: int) -> Tensor:
    """Return (n, size) fp32 for places (n,): sines, then cosines, of longer and longer waves."""
    half = size // 2
    step = math.log(_LONGEST_WAVE) / (half - 1)
    angles = places[:, None] * torch.exp(-step * torch.arange(half))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class WhisperTower(Tower[PackedItems]):
    """Frames of many clips -> rows of the language model's size."""

    stack = staticmethod(partial(gelu_stack, approximate="none"))

    def __init__(self, settings: Settings, ctx: engine.ModuleContext, output_size: int) -> None:
        super().__init__(settings, ctx, settings.tokens_per_row)
        size = settings.hidden_size
        self.conv1, self.conv2, self.projector = None, None, None
        if ctx.is_first_stage:
            self.conv1 = ItemConvolution(settings.num_mel_bins, size, 3, dtype=ctx.dtype)
            self.conv2 = ItemConvolution(size, size, 3, dtype=ctx.dtype)
            self.part.sum_gradients(self.conv1)
            self.part.sum_gradients(self.conv2)
        self.blocks = engine.build_stack(self.config, ctx)
        if ctx.is_last_stage:
            self.projector = row_mlp(self.config, ctx, size * settings.tokens_per_row, output_size)

    def blank_grid(self, num_rows: int) -> tuple[int, int, int]:
        return num_rows * self.tokens_per_row * FRAMES_PER_TOKEN, 1, 1

    def num_tokens(self, grids: Tensor) -> list[int]:
        return (grids.prod(1) // FRAMES_PER_TOKEN).tolist()

    def pack(self, grids: Tensor) -> PackedItems:
        """Pack clips as segments; on the first stage with the inputs of both convolutions.

        ``lookups`` has the frames that conv1 reads, the outputs of conv1 that conv2 reads, and the
        positions of this rank's tokens.
        """
        num_frames = grids.prod(1)
        lengths = self.num_tokens(grids)
        segments = engine.PackedSegments.from_lengths(lengths, grids.device)
        if self.conv1 is None:
            return PackedItems(segments=segments)
        tokens = neighbours(num_frames, stride=FRAMES_PER_TOKEN)
        places = torch.cat([torch.arange(length) for length in lengths])
        tokens, places = (self.part.take(values, len(tokens)) for values in (tokens, places))
        first, end = int(tokens[tokens >= 0].min()), int(tokens.max()) + 1
        frames = neighbours(num_frames, stride=1)[first:end]
        positions = sinusoids(places, self.config.hidden_size).to(self.conv1.weight.dtype)
        lookups = (frames, torch.where(tokens >= 0, tokens - first, -1), positions)
        return PackedItems(segments=segments, lookups=lookups)

    def embed(self, patches: Tensor, packed: PackedItems) -> Tensor:
        """Embed frames (P, C) to this rank's tokens (T', D), from the frames they depend on."""
        assert self.conv1 is not None and self.conv2 is not None, "the first stage embeds"
        frames, seen, positions = packed.lookups
        # Blank clips at the end are silence, as is what lies beyond a clip's ends.
        hidden = self.conv1(patches, torch.where(frames < len(patches), frames, -1))
        return self.conv2(hidden, seen) + positions

    def project(self, hidden: list[Tensor], packed: PackedItems) -> Tensor:
        assert self.projector is not None, "the last stage projects"
        stacked = hidden[0].reshape(-1, self.tokens_per_row * hidden[0].shape[-1])
        return self.projector(stacked)


build = partial(build_tower, WhisperTower)


def weights_in_hf(settings: Settings, output_size: int) -> list[Weight]:
    """Return every parameter of the whole tower; no published checkpoint has all of them."""
    size, ffn = settings.hidden_size, settings.ffn_hidden_size
    stacked = size * settings.tokens_per_row
    shapes: dict[str, tuple[int, ...]] = {
        "conv1": (size, settings.num_mel_bins, 3),
        "conv2": (size, size, 3),
        "blocks.final_layernorm": (size,),
        "projector.linear_fc1": (stacked, stacked),
        "projector.linear_fc2": (output_size, stacked),
    }
    for n in range(settings.num_layers):
        layer = f"blocks.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm": (size,),
            f"{layer}.self_attention.linear_qkv": (3 * size, size),
            f"{layer}.self_attention.linear_proj": (size, size),
            f"{layer}.pre_mlp_layernorm": (size,),
            f"{layer}.mlp.linear_fc1": (ffn, size),
            f"{layer}.mlp.linear_fc2": (size, ffn),
        }
    return [weight for name, shape in shapes.items() for weight in both(name, name, *shape)]
