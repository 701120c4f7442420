"""`mimo generate`: greedy answers from a trained checkpoint, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data.batch import pack_lane
from data.chat import ChatTokenizer, EncodedSample
from data.images import ImageProcessor, open_image
from mimo.checkpoint import find_checkpoint
from mimo.dataset import image_processor, open_tokenizer
from mimo.local import LocalModel, join_world_of_one
from mimo.recipe import load_recipe
from mimo.recipe_errors import InputError


@dataclass(frozen=True)
class Request:
    """A chat without its answer. messages: Hugging Face chat list; images in order of mention."""

    messages: Sequence[dict]
    images: Sequence[Image.Image]


class Generator:
    """A model with its tokenizer and processor, ready to answer."""

    def __init__(self, path: Path) -> None:
        """path: a run or checkpoint folder. Raises InputError when it holds no checkpoint."""
        join_world_of_one()
        recipe = load_recipe(find_checkpoint(path) / "recipe.yaml")
        self.chat: ChatTokenizer = open_tokenizer(recipe)
        self.processor: ImageProcessor = image_processor(recipe)
        self.model = LocalModel.from_checkpoint(path, self.chat.vocab_size)

    @torch.no_grad()
    def answer(self, requests: Sequence[Request], max_new_tokens: int = 64) -> list[str]:
        """Greedy answers, one per request; all requests run packed together.

        Every step runs over the whole sequences; there is no cache of keys and values.
        """
        prompts, grids, rows = [], [], []
        for request in requests:
            sizes = [self.processor.grid(*image.size) for image in request.images]
            counts = [self.processor.num_tokens(*image.size) for image in request.images]
            prompts.append(self.chat.encode_prompt(request.messages, counts))
            grids.append(sizes)
            rows += [self.processor.patches(image) for image in request.images]
        flat_grids = np.array([g for own in grids for g in own], np.int64).reshape(-1, 3)
        encoded = self.model.encode(np.concatenate(rows), flat_grids) if rows else None

        sequences = [prompt.input_ids.tolist() for prompt in prompts]
        open_requests = list(range(len(requests)))
        # A finished request leaves the pack, so its rows leave with it.
        owner = np.concatenate([np.full(len(p.input_ids), i) for i, p in enumerate(prompts)])[
            np.concatenate([p.input_ids for p in prompts]) == self.chat.image_token_id
        ]
        for _ in range(max_new_tokens):
            nexts = self._next_tokens(open_requests, sequences, prompts, grids, encoded, owner)
            for request, token in zip(open_requests, nexts, strict=True):
                sequences[request].append(token)
            open_requests = [
                r
                for r, token in zip(open_requests, nexts, strict=True)
                if token != self.chat.eos_token_id
            ]
            if not open_requests:
                break
        return [
            self.chat.decode(
                [
                    token
                    for token in sequence[len(prompt.input_ids) :]
                    if token != self.chat.eos_token_id
                ]
            )
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]

    def _next_tokens(
        self,
        open_requests: list[int],
        sequences: list[list[int]],
        prompts: list[EncodedSample],
        grids: list[list[tuple[int, int, int]]],
        encoded: torch.Tensor | None,
        owner: np.ndarray,
    ) -> list[int]:
        samples = [
            EncodedSample(
                input_ids=np.array(sequences[r], np.int64),
                labels=np.zeros(len(sequences[r]), np.int64),
                loss_mask=np.zeros(len(sequences[r]), np.float32),
                image_offsets=prompts[r].image_offsets,
            )
            for r in open_requests
        ]
        lengths = [len(sample.input_ids) for sample in samples]
        lane = pack_lane(
            samples,
            [grids[r] for r in open_requests],
            self.processor.merge_size,
            [0] * len(samples),
            sum(lengths),
            self.chat.pad_token_id,
        )
        places = np.flatnonzero(lane.input_ids == self.chat.image_token_id)
        chosen = None
        if encoded is not None:
            chosen = encoded[torch.from_numpy(np.isin(owner, open_requests))]
        logits = self.model.forward(lane, chosen, places, with_labels=False)
        last = torch.from_numpy(np.cumsum(lengths) - 1)
        # Rows that pad the vocabulary are no tokens.
        return logits[0, last, : self.model.num_tokens].argmax(-1).tolist()


def main(path: Path, images: Sequence[Path], prompt: str, max_new_tokens: int) -> int:
    """`mimo generate RUN_OR_CHECKPOINT --image ... --prompt ...`: prints the answer."""
    opened = []
    for image in images:
        if not image.is_file():
            raise InputError(f"--image {image}: no such file")
        try:
            opened.append(open_image(image.read_bytes()))
        except ValueError as error:
            raise InputError(f"--image {image}: {error}") from error
    generator = Generator(path)
    content = [{"type": "image"} for _ in opened] + [{"type": "text", "text": prompt}]
    request = Request([{"role": "user", "content": content}], opened)
    print(generator.answer([request], max_new_tokens)[0])
    return 0
