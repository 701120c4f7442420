"""A generator: a transformer of diffusers, unmodified, and its flow-matching losses.

A target x becomes (1 - t) · x + t · noise, and the transformer predicts the velocity noise - x
(rectified flow, Liu et al. 2022, arXiv:2209.03003). Times and noise are inputs, so that they do not
depend on the layout.

Letters: B items of one size, S tokens of each with C numbers, P = B·S patches, N rows of the lane,
H their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mimo.engines.contract import Draw
from mimo.engines.fsdp.context import FsdpContext, Wrapper

Predict = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor, tuple[int, int]], Tensor]
"""`mimo.families.contracts.GeneratorFamily.predict`."""
Encode = Callable[[Tensor], Tensor]
"""images (B, 3, h, w) in -1..1 -> latents (B, c, h', w')."""


class GeneratorModel(Wrapper):
    """A generator's transformer; its units are the blocks.

    encode: of a frozen autoencoder, which is no part of the module; None for pixels.
    """

    def __init__(
        self,
        transformer: nn.Module,
        units: Sequence[nn.Module],
        predict: Predict,
        encode: Encode | None,
        ctx: FsdpContext,
    ) -> None:
        super().__init__(ctx)
        self.transformer: Any = transformer
        self.units, self._predict, self._encode = list(units), predict, encode
        self.name_as_in(transformer)
        if ctx.recompute == "full":
            self.transformer.enable_gradient_checkpointing()

    def run(self, draw: Draw, rows: Tensor) -> Tensor:
        """Return the loss of each item (B,), at least fp32: the mean over its elements.

        rows: (N, H) of this lane.
        """
        values = self.values(draw.patches)
        noise = draw.noise.to(torch.promote_types(self.ctx.dtype, torch.float32))
        target = self.tokens(values, draw.grid).to(noise.dtype).view_as(noise)
        t = draw.times.to(noise.dtype)[:, None, None]
        predicted = self.predict((1 - t) * target + t * noise, draw.times, rows, draw)
        return (predicted.to(noise.dtype) - (noise - target)).square().mean(dim=(1, 2))

    def predict(self, tokens: Tensor, times: Tensor, rows: Tensor, draw: Draw) -> Tensor:
        """Return the velocity (B, S, C) of tokens (B, S, C) at times (B,)."""
        padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        condition = padded[draw.rows]
        return self._predict(
            self.transformer,
            tokens.to(self.ctx.dtype),
            times,
            condition.to(self.ctx.dtype),
            draw.lengths,
            draw.grid,
        )

    @torch.no_grad()
    def tokens(self, values: Tensor, grid: tuple[int, int]) -> Tensor:
        """Turn squares of pixels (P, 3·s·s) in -1..1 into tokens (P, C): latents, if encoded."""
        if self._encode is None:
            return values
        images = unpack(values, grid, channels=3)
        return pack(self._encode(images), grid)


def unpack(tokens: Tensor, grid: tuple[int, int], channels: int) -> Tensor:
    """(B·S, channels·s·s), in the lines of the grid -> (B, channels, h·s, w·s)."""
    h, w = grid
    side = round((tokens.shape[1] // channels) ** 0.5)
    squares = tokens.view(-1, h, w, channels, side, side)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, h * side, w * side)


def pack(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, c, h·s, w·s) -> tokens (B·S, c·s·s), the inverse of `unpack`."""
    h, w = grid
    side = images.shape[2] // h
    squares = images.unflatten(2, (h, side)).unflatten(4, (w, side))
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(images.shape[0] * h * w, -1)
