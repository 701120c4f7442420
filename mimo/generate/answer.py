"""`mimo generate`: greedy answers from a trained checkpoint, in one process.

There is no cache of keys and values: each new token costs a forward over the whole sequence. It
computes what training computes, item attention and windows included, and is made for checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from data.batch import pack_lane
from data.media.images import open_image, to_rgb
from data.media.processor import Grid, Part, PartPlan
from data.text.chat import ChatTokenizer, EncodedSample
from data.text.messages import DEFAULT_FPS, PlaceholderError
from mimo.checkpoint.assets import recipe_of
from mimo.checkpoint.folder import find_checkpoint
from mimo.errors import InputError
from mimo.generate.one_rank import LocalModel, join_world_of_one
from mimo.step.dataset import item_processors, open_tokenizer


@dataclass(frozen=True)
class Request:
    """A chat without its answer.

    messages: Hugging Face chat list. images: the files of its content parts, in order of mention.
    name: what errors call it.
    """

    messages: Sequence[dict]
    images: Sequence[Image.Image]
    name: str = "the prompt"


@dataclass(frozen=True)
class _PromptPart:
    """A content part of a request: the items that it becomes, and its files."""

    media: str
    part: Part
    plan: PartPlan
    images: Sequence[Image.Image]


@dataclass(frozen=True)
class _Prompt:
    """A tokenized request with its content parts."""

    sample: EncodedSample
    parts: Sequence[_PromptPart]

    @property
    def grids(self) -> list[Grid]:
        """(t, h, w) in rows of each item."""
        return [one.plan.row_grid for one in self.parts for _ in range(one.plan.num_items)]

    @property
    def time_steps(self) -> list[float]:
        """Positions from one frame to the next of each item."""
        return [one.plan.time_step for one in self.parts for _ in range(one.plan.num_items)]


@dataclass(frozen=True)
class _Rows:
    """The rows of one encoder for all requests together.

    values: (N, H). request: (N,) that each belongs to. place: (N,) position in its prompt.
    """

    values: torch.Tensor
    request: np.ndarray
    place: np.ndarray


class Generator:
    """A model with its tokenizer and processors, ready to answer."""

    def __init__(self, path: Path) -> None:
        """path: a run or checkpoint folder. Raises InputError when it holds no checkpoint."""
        join_world_of_one()
        recipe = recipe_of(find_checkpoint(path))
        self.chat: ChatTokenizer = open_tokenizer(recipe)
        self.processors = item_processors(recipe)
        self.encoders = {
            media: name for name, one in recipe.encoders.items() for media in one.media_tokens
        }
        self.model = LocalModel.from_checkpoint(path, self.chat.vocab_size)

    @torch.no_grad()
    def answer(
        self,
        requests: Sequence[Request],
        max_new_tokens: int = 64,
        max_length: int | None = None,
    ) -> list[str]:
        """Greedy answers, one per request; all requests run packed together.

        max_length: tokens of a prompt and its answer together, at which the answer is cut, too.
        Raises InputError for a request that the tokenizer or a processor cannot take.
        """
        prompts = [self._encode_prompt(request) for request in requests]
        mentioned = {part.media for prompt in prompts for part in prompt.parts}
        rows = [self._encode(media, prompts) for media in self.processors if media in mentioned]

        sequences = [prompt.sample.input_ids.tolist() for prompt in prompts]
        open_requests = list(range(len(requests)))
        for _ in range(max_new_tokens):
            nexts = self._next_tokens(open_requests, sequences, prompts, rows)
            for request, token in zip(open_requests, nexts, strict=True):
                sequences[request].append(token)
            open_requests = [
                r
                for r, token in zip(open_requests, nexts, strict=True)
                if token not in self.chat.stop_token_ids and len(sequences[r]) != max_length
            ]
            if not open_requests:
                break
        return [
            self.chat.decode(
                [
                    token
                    for token in sequence[len(prompt.sample.input_ids) :]
                    if token not in self.chat.stop_token_ids
                ]
            )
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]

    def _encode_prompt(self, request: Request) -> _Prompt:
        try:
            parts = self._parts(request)
            rows = [one.plan.num_rows for one in parts for _ in range(one.plan.num_items)]
            texts = [one.plan.text for one in parts]
            return _Prompt(self.chat.encode_prompt(request.messages, rows, texts), parts)
        except ValueError as error:
            raise InputError(f"{request.name} cannot be answered: {error}") from error

    def _parts(self, request: Request) -> list[_PromptPart]:
        mentioned = self.chat.mentions(request.messages, "prompt")
        num_files = sum(one.frames for one in mentioned)
        if num_files != len(request.images):
            raise PlaceholderError("prompt", num_files, len(request.images))
        parts, first = [], 0
        for one in mentioned:
            images = request.images[first : first + one.frames]
            first += one.frames
            if any(image.size != images[0].size for image in images):
                sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
                raise ValueError(f"the frames of a {one.media} are {sizes}: need one size")
            part = Part(*images[0].size, one.frames, one.fps)
            plan = self.processors[one.media].plan(part)
            parts.append(_PromptPart(one.media, part, plan, images))
        return parts

    def _encode(self, media: str, prompts: Sequence[_Prompt]) -> _Rows:
        """All items of one media."""
        processor = self.processors[media]
        patches, grids = [], []
        for own in (part for prompt in prompts for part in prompt.parts if part.media == media):
            for item in range(own.plan.num_items):
                images = [own.images[file] for file in processor.item_files(own.part, item)]
                patches.append(processor.item_patches(images, own.part, item))
                grids.append(own.plan.grid)
        token = self.chat.placeholder_ids[media]
        places = [np.flatnonzero(prompt.sample.input_ids == token) for prompt in prompts]
        return _Rows(
            values=self.model.encode(
                self.encoders[media], np.concatenate(patches), np.array(grids, np.int64)
            ),
            request=np.repeat(np.arange(len(prompts)), [len(own) for own in places]),
            place=np.concatenate(places),
        )

    def _next_tokens(
        self,
        open_requests: list[int],
        sequences: list[list[int]],
        prompts: Sequence[_Prompt],
        rows: Sequence[_Rows],
    ) -> list[int]:
        samples = [
            EncodedSample(
                input_ids=np.array(sequences[r], np.int64),
                labels=np.zeros(len(sequences[r]), np.int64),
                loss_mask=np.zeros(len(sequences[r]), np.float32),
                item_offsets=prompts[r].sample.item_offsets,
            )
            for r in open_requests
        ]
        lengths = np.array([len(sample.input_ids) for sample in samples])
        lane = pack_lane(
            samples,
            [prompts[r].grids for r in open_requests],
            [0] * len(samples),
            int(lengths.sum()),
            self.chat.pad_token_id,
            time_steps=[prompts[r].time_steps for r in open_requests],
        )
        # A finished request leaves the pack, so its rows leave with it.
        start = np.zeros(len(sequences), np.int64)
        start[open_requests] = np.cumsum(lengths) - lengths
        placed = []
        for own in rows:
            kept = np.isin(own.request, open_requests)
            values = own.values[torch.from_numpy(kept).to(own.values.device)]
            placed.append((values, start[own.request[kept]] + own.place[kept]))
        last = np.cumsum(lengths) - 1
        logits = self.model.forward(lane, placed, with_labels=False, at=last)
        # Rows that pad the vocabulary are no tokens.
        return logits[0, :, : self.model.num_tokens].argmax(-1).tolist()


def main(
    path: Path,
    images: Sequence[Path],
    prompt: str,
    max_new_tokens: int,
    frames: Sequence[Path] = (),
    fps: float = DEFAULT_FPS,
) -> int:
    """`mimo generate RUN_OR_CHECKPOINT --image ... --prompt ...`: prints the answer.

    frames: of one video, which stands behind the images.
    """
    opened, of_video = _opened("--image", images), _opened("--frame", frames)
    generator = Generator(path)
    _check_media(generator, "--image", "image", images)
    _check_media(generator, "--frame", "video", frames)
    for image, pixels in zip(images, opened, strict=True):
        try:
            generator.processors["image"].plan(Part(*pixels.size))
        except ValueError as error:
            raise InputError(f"--image {image}: {error}") from error
    for media, text in generator.chat.media_text.items():
        for token in (text.written, text.placeholder):
            if token in prompt:
                raise InputError(
                    f"--prompt: {token!r} stands for an item of media {media!r} and is no text; "
                    "leave it out, a placeholder is added for each item that is given"
                )
    content: list[dict[str, Any]] = [{"type": "image"} for _ in opened]
    if of_video:
        content.append({"type": "video", "frames": len(of_video), "fps": fps})
    content.append({"type": "text", "text": prompt})
    request = Request([{"role": "user", "content": content}], [*opened, *of_video])
    print(generator.answer([request], max_new_tokens)[0])
    return 0


def _opened(option: str, paths: Sequence[Path]) -> list[Image.Image]:
    """The images in RGB. Raises InputError with option and path."""
    opened = []
    for path in paths:
        if not path.is_file():
            raise InputError(f"{option} {path}: no such file")
        try:
            opened.append(to_rgb(open_image(path.read_bytes())))
        except (OSError, ValueError) as error:
            raise InputError(f"{option} {path}: {error}") from error
    return opened


def _check_media(generator: Generator, option: str, media: str, paths: Sequence[Path]) -> None:
    if paths and media not in generator.processors:
        known = ", ".join(generator.processors) or "nothing but text"
        raise InputError(f"{option}: no encoder of this run takes {media}s; it takes {known}")
