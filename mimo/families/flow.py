"""Flow matching: tokens of images, times, and the steps from noise to an image.

At time t a token is (1 - t) · x + t · noise (rectified flow, arXiv:2209.03003), and a generator
predicts its velocity, noise - x.

Letters: B items, c channels of pixels or latents, h and w the grid in tokens, S = h · w tokens,
C numbers of each, N steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
from torch import Tensor


def pack(images: Tensor, side: int = 2) -> Tensor:
    """images or latents (B, c, side·h, side·w) -> tokens (B, S, c·side²), in the lines of the grid.

    A token holds a square as (c, side, side), which is the order of Qwen-Image.
    """
    squares = images.unflatten(2, (-1, side)).unflatten(4, (-1, side))
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, grid: tuple[int, int], side: int = 2) -> Tensor:
    """Invert `pack`. grid: height and width in tokens."""
    squares = tokens.unflatten(1, grid).unflatten(3, (-1, side, side))
    return squares.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def shifted_time[T: (float, Tensor)](time: T, shift: float) -> T:
    """Return shift · t / (1 + (shift - 1) · t): above 1 it favours more noise."""
    return shift * time / (1 + (shift - 1) * time)  # type: ignore[return-value]


@dataclass(frozen=True)
class Schedule:
    """The times of sampling, with the keys of diffusers' `FlowMatchEulerDiscreteScheduler`.

    shift: of times, without dynamic shifting. With it, the shift is exp(μ), or μ if
    ``time_shift_type`` is linear. μ is linear in the number of tokens: base_shift for
    base_image_seq_len, max_shift for max_image_seq_len. shift_terminal: the last time before 0,
    to which times are stretched.
    """

    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None
    time_shift_type: Literal["exponential", "linear"] = "exponential"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read ``scheduler_config.json``. Raises ValueError for what we do not compute."""
        others = [f"use_{kind}_sigmas" for kind in ("karras", "exponential", "beta")]
        for key in ("invert_sigmas", "stochastic_sampling", *others):
            if config.get(key):
                raise ValueError(f"scheduler: {key} is {config[key]!r}; only false is supported")
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in config.items() if key in known})

    def shift_of(self, num_tokens: int) -> float:
        """Return the shift of times for an image of this many tokens."""
        if not self.use_dynamic_shifting:
            return self.shift
        slope = (self.max_shift - self.base_shift) / (
            self.max_image_seq_len - self.base_image_seq_len
        )
        mu = self.base_shift + slope * (num_tokens - self.base_image_seq_len)
        return math.exp(mu) if self.time_shift_type == "exponential" else mu

    def times(self, num_steps: int, num_tokens: int) -> Tensor:
        """Return the times from 1 to 0 between ``num_steps`` steps, (N + 1,) fp32."""
        even = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64)
        times = shifted_time(even, self.shift_of(num_tokens))
        if self.shift_terminal and num_steps > 1:
            times = 1 - (1 - times) * ((1 - self.shift_terminal) / (1 - times[-1]))
        return torch.cat([times, times.new_zeros(1)]).float()


def guided(with_condition: Tensor, without: Tensor, scale: float) -> Tensor:
    """Return the velocity of guidance: without + scale · (with - without) (arXiv:2207.12598).

    Both: (B, S, C). Each token keeps the norm that it has with the condition, as in the pipelines
    of Qwen-Image and Lumina 2.
    """
    velocity = without + scale * (with_condition - without)
    norms = [v.norm(dim=-1, keepdim=True) for v in (with_condition, velocity)]
    return velocity * (norms[0] / norms[1])


def euler_step(tokens: Tensor, velocity: Tensor, time: float, next_time: float) -> Tensor:
    """Move tokens (B, S, C) from one time to the next; computed in fp32 at least."""
    wide = torch.promote_types(tokens.dtype, torch.float32)
    return (tokens.to(wide) + (next_time - time) * velocity.to(wide)).to(tokens.dtype)
