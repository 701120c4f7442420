"""`mimo generate`: greedy answers from a trained checkpoint, in one process.

There is no KV cache: each new token costs a forward pass over the whole sequence. It computes what
training computes, item attention and windows included, and is meant for checks. Where the model
writes the start token of a generator, query positions and the end token follow, and the image is
drawn once the answer is complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.batch import PackedLane, pack_lane, read_items
from data.index.samples import Processors
from data.modalities.image_files import png_bytes
from data.modalities.processor import Part, PartPlan
from data.text.chat import ChatTokenizer, EncodedSample, ItemRows
from data.text.messages import Mention, PlaceholderError
from mimo.checkpoint.assets import portable_recipe
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.resume import open_checkpoint
from mimo.errors import InputError
from mimo.generate.drawing import (
    DEFAULT,
    Answer,
    Drawer,
    Drawing,
    Output,
    answer_of,
    draw_all,
    queries_of,
)
from mimo.generate.one_rank import LocalModel
from mimo.model.dataset import item_processors, open_tokenizer


@dataclass(frozen=True)
class Request:
    """A chat without its answer.

    messages: Hugging Face chat list. files: of its content parts, in order of mention, decoded by
    their modality. name: the request's name in errors.
    """

    messages: Sequence[dict]
    files: Sequence[Any]
    name: str = "the prompt"


@dataclass(frozen=True)
class ItemFiles:
    """The files of one content part from the command line.

    option: its command-line option, for messages. keys: of the content part, besides its type.
    """

    option: str
    media: str
    paths: Sequence[Path]
    keys: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, option: str, text: str) -> ItemFiles:
        """Parse ``media=path``. Raises InputError for any other form."""
        media, equals, path = text.partition("=")
        if not (media and equals and path):
            raise InputError(f"{option} {text}: need the media and a file, such as image=scan.png")
        return cls(option, media, [Path(path)])


@dataclass(frozen=True)
class _Item:
    """An item of a request, with the plan of its content part. patches: float32 (P, C)."""

    media: str
    plan: PartPlan
    patches: np.ndarray


@dataclass(frozen=True)
class _Prompt:
    """queries: of earlier output items, as in `PackedLane.queries`."""

    sample: EncodedSample
    items: Sequence[_Item]
    queries: Sequence[tuple[str, int, int]]


class Generator:
    """A model with its tokenizer and processors, ready to answer."""

    def __init__(self, path: Path, average: bool = False) -> None:
        """Load the latest checkpoint of ``path``, a run or checkpoint folder.

        Uses the checkpoint's copies of tokenizer, template and configuration. Raises InputError if
        there is no checkpoint, a damaged one, or no average.
        """
        checkpoint = find_checkpoint(path)
        stored = open_checkpoint(checkpoint)
        recipe = portable_recipe(checkpoint)
        self.chat: ChatTokenizer = open_tokenizer(recipe)
        self.processors = item_processors(recipe)
        self.media = {name: [*part.media_tokens] for name, part in recipe.encoders.items()}
        self.model = LocalModel.from_checkpoint(
            checkpoint, recipe, stored, self.chat.vocab_size, average
        )
        modules = self.model.model.modules
        self.drawers = {  # by the id of the start token
            self.chat.output_ids[part.output][0]: Drawer(recipe, name, self.chat, modules[name])
            for name, part in recipe.generators.items()
        }

    def answer(
        self, requests: Sequence[Request], max_new_tokens: int = 64, max_length: int | None = None
    ) -> list[str]:
        """Return the texts of `respond`, without drawing."""
        answers = self.respond(requests, max_new_tokens, max_length, None)
        return [answer.text for answer in answers]

    @torch.no_grad()
    def respond(
        self,
        requests: Sequence[Request],
        max_new_tokens: int = 64,
        max_length: int | None = None,
        how: Drawing | None = DEFAULT,
    ) -> list[Answer]:
        """Return greedy answers, one per request; all requests run packed together.

        max_length: cut an answer when it and its prompt have this many tokens together. how: to
        draw images; None draws none. Raises InputError for a request that the tokenizer or
        a processor refuses.
        """
        prompts = [self._encode_prompt(request) for request in requests]
        rows = {encoder: self._encode(encoder, prompts) for encoder in self.media}
        sequences = [prompt.sample.input_ids.tolist() for prompt in prompts]
        limit, stops = math.inf if max_length is None else max_length, self.chat.stop_token_ids
        open_requests = [r for r, sequence in enumerate(sequences) if len(sequence) < limit]
        outputs: list[list[Output]] = [[] for _ in requests]
        for _ in range(max_new_tokens):
            if not open_requests:
                break
            nexts = self._next_tokens(open_requests, sequences, prompts, outputs, rows)
            for request, token in zip(open_requests, nexts, strict=True):
                sequences[request].append(token)
                if token in self.drawers:
                    self.drawers[token].open_output(sequences[request], outputs[request])
            open_requests = [
                r
                for r in open_requests
                if sequences[r][-1] not in stops and len(sequences[r]) < limit
            ]
        images: list[list[np.ndarray]] = [[] for _ in requests]
        drawing = [r for r, of_request in enumerate(outputs) if of_request]
        if drawing and how is not None:
            lane, placed, _ = self._lane(drawing, sequences, prompts, outputs, rows)
            hidden = self.model.hidden_states(lane, placed)
            lengths = [len(sequences[r]) for r in drawing]
            drawn = draw_all(hidden.split(lengths), [outputs[r] for r in drawing], how)
            for r, of_request in zip(drawing, drawn, strict=True):
                images[r] = of_request
        begins = (len(prompt.sample.input_ids) for prompt in prompts)
        answers = zip(sequences, begins, outputs, images, strict=True)
        return [answer_of(self.chat, *answer) for answer in answers]

    def _encode_prompt(self, request: Request) -> _Prompt:
        try:
            mentions = self.chat.mentions(request.messages, "prompt")
            num_files = sum(mention.frames for mention in mentions)
            if num_files != len(request.files):
                raise PlaceholderError("prompt", num_files, len(request.files))
            items, texts, files = list[_Item](), list[str](), iter(request.files)
            rows = list[ItemRows]()
            for mention in mentions:
                items_of_part = self._items(mention, list(islice(files, mention.frames)))
                texts.append(items_of_part[0].plan.text)
                rows += items_of_part[0].plan.rows_of_items
                items += items_of_part
            sample = self.chat.encode_prompt(request.messages, rows, texts)
            queries = [
                (item.media, int(first), item.plan.num_rows)
                for item, first in zip(items, sample.item_offsets, strict=True)
                if item.plan.is_output and item.plan.num_rows
            ]
            sample = read_items(sample, [item.plan for item in items])
            return _Prompt(sample, [item for item in items if not item.plan.is_output], queries)
        except ValueError as error:
            raise InputError(f"{request.name} cannot be answered: {error}") from error

    def _items(self, mention: Mention, files: Sequence[Any]) -> list[_Item]:
        """Return the items of a content part, at least one. Raises ValueError."""
        media = self.processors[mention.media]
        sizes = [media.size_of(file) for file in files]
        if any(size != sizes[0] for size in sizes):
            listed = ", ".join(media.size_text(size) for size in sizes)
            raise ValueError(f"the files of a {mention.media} are {listed}: need one size")
        part = Part(sizes[0], mention.frames, mention.fps)
        plan, items = media.plan(part), []
        for number in range(plan.num_items):
            item_files = [files[file] for file in media.item_files(part, number)]
            patches = media.wire.values(media.item_patches(item_files, part, number))
            items.append(_Item(mention.media, plan, patches))
        return items

    def _encode(self, encoder: str, prompts: Sequence[_Prompt]) -> Sequence[torch.Tensor]:
        """Return the rows of an encoder, (N, L·H) for each prompt; nothing without items."""
        media = self.media[encoder]
        of_prompts = [[item for item in prompt.items if item.media in media] for prompt in prompts]
        items = list(chain.from_iterable(of_prompts))
        if not items:
            return ()
        patches = np.concatenate([item.patches for item in items])
        grids = np.array([item.plan.grid for item in items], np.int64)
        values = self.model.encode(encoder, patches, grids)
        return values.split([sum(item.plan.num_rows for item in items) for items in of_prompts])

    def _next_tokens(self, open_requests: list[int], *arguments: Any) -> list[int]:
        """Return the next token of each sequence. The arguments are those of `_lane`."""
        lane, placed, last = self._lane(open_requests, *arguments)
        logits = self.model.forward(lane, placed, with_labels=False, at=last)
        # Padding entries of the vocabulary are not tokens.
        return logits[0, :, : self.model.model.num_tokens].argmax(-1).tolist()

    def _lane(
        self,
        open_requests: list[int],
        sequences: Sequence[list[int]],
        prompts: Sequence[_Prompt],
        outputs: Sequence[Sequence[Output]],
        rows: Mapping[str, Sequence[torch.Tensor]],
    ) -> tuple[PackedLane, dict[str, tuple[torch.Tensor, np.ndarray]], np.ndarray]:
        """Pack some of the sequences; returns the lane, the encoders' rows, and the last tokens."""
        open_prompts = [prompts[r] for r in open_requests]
        ids = [np.array(sequences[r], np.int64) for r in open_requests]
        lengths = np.array([len(sequence) for sequence in ids])
        starts, placed = np.cumsum(lengths) - lengths, dict[str, tuple[torch.Tensor, np.ndarray]]()
        masks = [np.zeros(length, np.float32) for length in lengths]
        samples = [
            replace(prompt.sample, input_ids=sequence, labels=sequence, loss_mask=mask)
            for sequence, mask, prompt in zip(ids, masks, open_prompts, strict=True)
        ]
        lane = pack_lane(
            samples,
            [[item.plan.row_grid for item in prompt.items] for prompt in open_prompts],
            [0] * len(samples),
            int(lengths.sum()),
            self.chat.pad_token_id,
            time_steps=[[item.plan.time_step for item in prompt.items] for prompt in open_prompts],
            parts=[
                (item.media, item.plan.grid) for prompt in open_prompts for item in prompt.items
            ],
            queries=[
                (media, start + first, count)
                for start, r in zip(starts.tolist(), open_requests, strict=True)
                for media, first, count in (*prompts[r].queries, *queries_of(outputs[r]))
            ],
        )
        for encoder, rows_of_prompts in rows.items():
            if not rows_of_prompts:
                continue
            # In an answer these tokens stand for no item.
            tokens = [self.chat.placeholder_ids[media] for media in self.media[encoder]]
            places = [
                start + np.flatnonzero(np.isin(prompt.sample.input_ids, tokens))
                for start, prompt in zip(starts, open_prompts, strict=True)
            ]
            values = torch.cat([rows_of_prompts[r] for r in open_requests])
            placed[encoder] = values, np.concatenate(places)
        return lane, placed, np.cumsum(lengths) - 1


def main(
    path: Path,
    items: Sequence[ItemFiles],
    prompt: str,
    max_new_tokens: int,
    average: bool = False,
    how: Drawing = DEFAULT,
    output: Path = Path("."),
) -> int:
    """Print the answer; images are saved in ``output``, and their paths printed in their places.

    average: use the moving average of the weights.
    """
    processors = item_processors(portable_recipe(find_checkpoint(path)))
    files = [file for item in items for file in _decoded(item, processors)]
    generator = Generator(path, average)
    for media, text in generator.chat.media_text.items():
        for token in (text.written, text.placeholder):
            if token in prompt:
                raise InputError(
                    f"--prompt: {token!r} stands for an item of media {media!r} and is no text; "
                    "leave it out, a placeholder is added for each item that is given"
                )
    content: list[dict[str, Any]] = [{"type": item.media, **item.keys} for item in items]
    content.append({"type": "text", "text": prompt})
    request = Request([{"role": "user", "content": content}], files)
    (answer,), number = generator.respond([request], max_new_tokens, how=how), 0
    for part in answer.parts:
        if not isinstance(part, str):
            path, number = output / f"drawn_{number}.png", number + 1
            try:
                output.mkdir(parents=True, exist_ok=True)
                path.write_bytes(png_bytes(part))
            except OSError as error:
                problem = f"--output {output}: {path.name} cannot be written: {error}"
                raise InputError(problem) from error
            part = str(path)
        print(part)
    if not answer.parts:
        print()
    return 0


def _decoded(item: ItemFiles, processors: Processors) -> list[Any]:
    """Decode the files of an item. Raises InputError with option and path."""
    if item.media not in processors:
        known = ", ".join(processors) or "nothing but text"
        raise InputError(
            f"{item.option}: no encoder of this run takes {item.media}s; it takes {known}"
        )
    media, decoded = processors[item.media], []
    for path in item.paths:
        if not path.is_file():
            raise InputError(f"{item.option} {path}: no such file")
        try:
            decoded.append(media.decode(path.read_bytes()))
            if len(item.paths) == 1:
                media.plan(Part(media.size_of(decoded[-1])))
        except (OSError, ValueError) as error:
            raise InputError(f"{item.option} {path}: {error}") from error
    return decoded
