"""Answers with images: what a generator draws from its conditions, in one process.

Letters: B items, S tokens of each with C numbers, T rows of the longest condition, H their size.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.text.chat import ChatTokenizer
from mimo.checkpoint.hf.pipelines import schedule_of
from mimo.config.schema import Recipe
from mimo.engines.contract import Draw, Module
from mimo.errors import InputError
from mimo.families.contracts import Autoencoder
from mimo.families.flow import euler_step, guided, unpack
from mimo.families.registry import generator_settings

BATCH_ITEMS = 64  # items that are drawn together


@dataclass(frozen=True)
class Drawing:
    """Settings for drawing items.

    steps: from noise to an image. guidance: scale of classifier-free guidance, 1 for none. seed: of
    the noise. size: width and height in pixels; None for the largest square that was trained on.
    first: number of the first image; the noise depends on the number.
    """

    steps: int = 20
    guidance: float = 1.0
    seed: int = 0
    size: tuple[int, int] | None = None
    first: int = 0


DEFAULT = Drawing()


def parse_size(text: str) -> tuple[int, int]:
    """Parse ``WxH``. Raises InputError for any other form."""
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise InputError(f"--size {text}: need width and height in pixels, such as 1024x768")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Output:
    """An item that a model answers with, by its place in the sequence of prompt and answer.

    drawer: its generator. at: its start token. queries: number of its query positions, which
    follow. first, rows: the positions of its condition.
    """

    drawer: Drawer
    at: int
    queries: int
    first: int
    rows: int


@dataclass(frozen=True)
class Answer:
    """parts: texts and images uint8 (height, width, 3), in order."""

    parts: Sequence[str | np.ndarray]

    @property
    def text(self) -> str:
        return " ".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> list[np.ndarray]:
        return [part for part in self.parts if not isinstance(part, str)]


def queries_of(outputs: Sequence[Output]) -> list[tuple[str, int, int]]:
    """Return `PackedLane.queries` of one sequence."""
    return [(o.drawer.generator.output, o.first, o.queries) for o in outputs if o.queries]


def draw_all(
    states: Sequence[Tensor], outputs: Sequence[Sequence[Output]], how: Drawing
) -> list[list[np.ndarray]]:
    """Return the images of several sequences. states: hidden states (T, H) of each."""
    every = [
        (output.drawer, of_sequence[output.first : output.first + output.rows])
        for of_sequence, items in zip(states, outputs, strict=True)
        for output in items
    ]
    images: dict[int, np.ndarray] = {}
    for drawer in dict.fromkeys(drawer for drawer, _ in every):
        numbers = [number for number, (owner, _) in enumerate(every) if owner is drawer]
        drawn = drawer.draw([every[number][1] for number in numbers], how)
        images |= dict(zip(numbers, drawn, strict=True))
    number = itertools.count()
    return [[images[next(number)] for _ in items] for items in outputs]


def answer_of(
    chat: ChatTokenizer,
    sequence: Sequence[int],
    begin: int,
    outputs: Sequence[Output],
    images: Sequence[np.ndarray],
) -> Answer:
    """Return the texts of a sequence from ``begin`` on with the images between them, if any."""
    parts, stops = list[str | np.ndarray](), chat.stop_token_ids
    bounds = [(output.at, output.at + output.queries + 2) for output in outputs]
    for number, (end, following) in enumerate([*bounds, (len(sequence), 0)]):
        parts.append(chat.decode([t for t in sequence[begin:end] if t not in stops]))
        parts += images[number : number + 1]
        begin = following
    return Answer([part for part in parts if not isinstance(part, str) or part])


class Drawer:
    """A generator of a trained model, on this one rank."""

    def __init__(self, recipe: Recipe, name: str, chat: ChatTokenizer, module: Module) -> None:
        self.settings, self.model = generator_settings(recipe, name), cast("Any", module.whole)
        self.generator, self.name = recipe.generators[name], name
        self.end, self.padding = chat.output_ids[self.generator.output][1], chat.pad_token_id
        self.autoencoder: Autoencoder | None = self.model.encode.autoencoder
        self.schedule = schedule_of(recipe, name)

    def open_output(self, sequence: list[int], outputs: list[Output]) -> None:
        """Append query positions and the end token to a sequence that ends with a start token.

        The new output item is appended to those of the sequence.
        """
        at, queries = len(sequence) - 1, self.generator.num_queries
        first, rows = at + 1, queries
        if not queries:  # the tokens since the last item
            before = [output.at + output.queries + 2 for output in outputs]
            first = min(max([self.generator.skipped_tokens, *before]), at)
            rows = at - first
        outputs.append(Output(self, at, queries, first, rows))
        sequence += [*[self.padding] * queries, self.end]

    @torch.no_grad()
    def draw(self, conditions: Sequence[Tensor], how: Drawing) -> list[np.ndarray]:
        """Return an image uint8 (height, width, 3) for each condition (T, H)."""
        if how.guidance != 1.0 and self.generator.condition_dropout == 0.0:
            raise InputError(
                f"--guidance {how.guidance:g}: generators.{self.name} was trained with "
                f"condition_dropout 0, so it knows no image without a condition; leave it at 1"
            )
        images = list[np.ndarray]()
        for first in range(0, len(conditions), BATCH_ITEMS):
            images += self._draw(conditions[first : first + BATCH_ITEMS], how, how.first + first)
        return images

    def _grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return height and width in tokens."""
        side = self.settings.token_pixels
        if size is None:
            most = int(self.settings.max_pixels**0.5) // side
            return max(most, 1), max(most, 1)
        if any(pixels % side or pixels < side for pixels in size):
            raise InputError(f"--size {size[0]}x{size[1]}: needs multiples of {side} pixels")
        return size[1] // side, size[0] // side

    def _draw(self, conditions: Sequence[Tensor], how: Drawing, first: int) -> list[np.ndarray]:
        grid, device = self._grid(how.size), conditions[0].device
        draw = draw_of(conditions, grid)
        rows = torch.cat(list(conditions))
        blank = replace(draw, rows=draw.rows[:, :0], lengths=torch.zeros_like(draw.lengths))
        noise = [
            np.random.Generator(
                np.random.Philox(key=how.seed, counter=[0, first + b, 0, 0])
            ).standard_normal((grid[0] * grid[1], self.settings.in_channels), dtype=np.float32)
            for b in range(len(conditions))
        ]
        tokens = torch.from_numpy(np.stack(noise)).to(device)
        times = self.schedule.times(how.steps, grid[0] * grid[1]).tolist()
        for time, next_time in itertools.pairwise(times):
            at = torch.full((len(conditions),), time, device=device)
            velocity = self.model.predict(tokens, at, rows, draw)
            if how.guidance != 1.0:
                without = self.model.predict(tokens, at, rows, blank)
                velocity = guided(velocity, without, how.guidance)
            tokens = euler_step(tokens, velocity, time, next_time)
        images = unpack(tokens, grid)
        if self.autoencoder is not None:
            images = self.autoencoder.decode(images)
        pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return [*pixels.permute(0, 2, 3, 1).cpu().numpy()]


def draw_of(conditions: Sequence[Tensor], grid: tuple[int, int]) -> Draw:
    """Return the places of conditions that follow each other in one tensor; nothing is random."""
    device = conditions[0].device
    lengths = torch.tensor([len(condition) for condition in conditions])
    total = sum(map(len, conditions))
    places = torch.arange(total, device=device).split([*map(len, conditions)])
    rows = pad_sequence(list(places), batch_first=True, padding_value=total)
    nothing = torch.zeros(0, device=device)
    return Draw(grid, None, nothing, nothing, rows, lengths, nothing, nothing)
