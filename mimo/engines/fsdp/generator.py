"""A generator: a transformer of diffusers, unmodified, and its flow-matching losses.

A target x becomes (1 - t) · x + t · noise, and the transformer predicts the velocity noise - x
(rectified flow, Liu et al. 2022, arXiv:2209.03003). Times and noise are inputs, so that they do not
depend on the layout.

Letters: B items of one size, S tokens of each with C numbers, P = B·S patches, N rows of the lane,
H their size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mimo.engines.contract import Draw
from mimo.engines.fsdp.context import FsdpContext, Wrapper

Predict = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor, tuple[int, int]], Tensor]
"""`mimo.families.contracts.GeneratorFamily.predict`."""
Encode = Callable[[Tensor, tuple[int, int]], Tensor]
"""Squares of pixels (B, S, W) in -1..1, of a grid of tokens -> tokens (B, S, C)."""


class GeneratorModel(Wrapper):
    """A generator's transformer; its units are the blocks.

    encode: makes tokens of pixels; a frozen autoencoder is no part of the module.
    """

    def __init__(
        self,
        transformer: nn.Module,
        units: Sequence[nn.Module],
        predict: Predict,
        encode: Encode,
        ctx: FsdpContext,
    ) -> None:
        super().__init__(ctx)
        self.transformer: Any = transformer
        self.units, self._predict, self.encode = list(units), predict, encode
        self.name_as_in(transformer)
        if ctx.recompute == "full":
            for unit in self.units:  # the transformer's own switch leaves some of them out
                unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)

    def run(self, draw: Draw, rows: Tensor) -> Tensor:
        """Return the loss of each item (B,), at least fp32: the mean over its elements.

        rows: (N, H) of this lane.
        """
        values = self.values(draw.patches)
        noise = draw.noise.to(torch.promote_types(self.ctx.dtype, torch.float32))
        with torch.no_grad():
            squares = values.unflatten(0, (len(noise), -1))
            target = self.encode(squares, draw.grid).to(noise.dtype)
        # Rounded as in the transformer, so that the noise is that of the time it gets.
        times = draw.times
        if self.ctx.dtype.itemsize < times.dtype.itemsize:
            times = times.to(self.ctx.dtype).float()
        t = times.to(noise.dtype)[:, None, None]
        predicted = self.predict((1 - t) * target + t * noise, times, rows, draw)
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
